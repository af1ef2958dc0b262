"""Makes models of `transformers` take the same path when captured as in plain PyTorch.

The models check whether they are being compiled, and then take another path: they make a causal
mask that plain attention does not need, and so use another attention kernel; Mamba uses an
associative scan instead of its loop, which rounds differently. While a planned step is captured,
they take the path of the plain step. Only this module uses private names of `transformers` (5.17 to
5.23).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from remat.torch_border.dynamo import SCANS, at_capture, decided_at_capture, scan_as_operators

_LOG = logging.getLogger(__name__)
_LOCK = threading.Lock()
_PREFIX = "transformers."
_LOOP_STEPS = 32  # longest sequence captured as a loop, of some 19 operators per step and layer


@contextmanager
def plain_paths() -> Iterator[None]:
    """Makes models captured inside of a `with` block take the paths of plain PyTorch.

    Several threads may be inside at the same time: the last one restores the library.
    """
    with _LOCK:
        _PATHS.enter()
    try:
        yield
    finally:
        with _LOCK:
            _PATHS.leave()


class _Paths:
    """The library's functions that are replaced while a step is captured or runs."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.replaced: list[tuple[Any, str, Any]] = []

    def enter(self) -> None:
        """Replaces the functions for the first thread inside."""
        self.num_inside += 1
        if self.num_inside > 1:
            return

        self._replace(SCANS, "associative_scan", scan_as_operators)
        for name, make in _REPLACEMENTS:
            module_name, _, function = name.rpartition(".")
            self._replace(sys.modules.get(_PREFIX + module_name), function, make)

    def _replace(self, module: Any, function: str, make: Callable[[Any], Any]) -> None:
        plain = getattr(module, function, None)
        if plain is not None:
            self.replaced.append((module, function, plain))
            setattr(module, function, make(plain))

    def leave(self) -> None:
        """Restores the functions after the last thread inside."""
        self.num_inside -= 1
        while self.num_inside == 0 and self.replaced:
            setattr(*self.replaced.pop())


def _never_exporting(plain: Callable[[], bool]) -> Callable[[], bool]:
    """Returns `plain`, but False while dynamo captures.

    Dynamo always reports that it exports (torch 2.13), and exported models make masks.
    """

    def is_exporting() -> bool:
        return not torch.compiler.is_dynamo_compiling() and plain()

    return is_exporting


def _never_tracing_nothing(plain: Callable[..., bool]) -> Callable[..., bool]:
    """Returns `plain`, but False while dynamo captures a call without a padding mask.

    No tensor is traced then, but transformers before 5.23 says that one is.
    """

    def is_tracing(tensor: Any = None) -> bool:
        if tensor is None and torch.compiler.is_dynamo_compiling():
            return False
        return plain(tensor)

    return is_tracing


def _packed_where_plain_finds_any(
    plain: Callable[[torch.Tensor], torch.Tensor | None],
) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """Returns `plain`, but decided at capture if the positions don't depend on an input.

    Plain PyTorch tells from the positions whether several sequences share a row.
    """

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        if torch.compiler.is_dynamo_compiling():
            steps = position_ids[:, 1:] - position_ids[:, :-1]
            if decided_at_capture((steps == 1).all()):
                return None

        return plain(position_ids)

    return find_packed_sequence_indices


def _looping_where_short(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `plain`, but with the loop for short sequences while dynamo captures.

    A plain step always loops over the sequence. For long ones, the captured loop would have too
    many operators.
    """

    def mamba_selective_scan(
        hidden_states: torch.Tensor, *args: Any, use_associative_scan: bool = False, **kwargs: Any
    ) -> Any:
        if use_associative_scan and torch.compiler.is_dynamo_compiling():
            use_associative_scan = hidden_states.shape[-1] > _LOOP_STEPS
            if use_associative_scan:
                at_capture(_say_that_it_scans)

        return plain(hidden_states, *args, use_associative_scan=use_associative_scan, **kwargs)

    return mamba_selective_scan


def _say_that_it_scans(_: Any) -> None:
    _LOG.warning(
        "a state space model's loop over more than %d steps is captured as the associative scan "
        "that transformers uses under torch.compile, which rounds differently from the loop; to "
        "capture the loop, operator by operator, set config.use_associative_scan=False",
        _LOOP_STEPS,
    )


_STATE_SPACE = ("mamba", "falcon_mamba", "jamba", "zamba")
_REPLACEMENTS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("masking_utils.is_torchdynamo_exporting", _never_exporting),
    ("masking_utils.is_tracing", _never_tracing_nothing),
    ("masking_utils.find_packed_sequence_indices", _packed_where_plain_finds_any),
    *(
        (f"models.{name}.modeling_{name}.{function}", make)
        for name in _STATE_SPACE
        for function, make in (
            ("is_torchdynamo_exporting", _never_exporting),
            ("mamba_selective_scan", _looping_where_short),
        )
    ),
)
_PATHS = _Paths()


def install_capturing_hooks(module: nn.Module) -> None:
    """Installs the hooks that models of `transformers` 5 install in their first call.

    They do it under a lock, which dynamo can't trace.
    """
    library, models = (
        sys.modules.get(_PREFIX + name) for name in ("utils.output_capturing", "modeling_utils")
    )
    if library is None or models is None:
        return
    for part in module.modules():
        if isinstance(part, models.PreTrainedModel):
            library.maybe_install_capturing_hooks(part)
