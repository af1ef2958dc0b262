"""Autocast's cache in a traced step: a parameter is cast once, however many operators read it.

Plain PyTorch sums the gradients of all readers of the cast in the lower precision, and casts the
sum back once. AOTAutograd (torch 2.13) turns the cache off, and autocast caches casts of leaves
only, which traced parameters are not. So each reader's gradient would be cast back before the sum,
and would round differently. Here casts are stored on the tensors that stand for leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from remat.torch_border.autograd import autocast_cache_left_on, is_inside_autocast_cast
from remat.torch_border.kernels import with_kernel

_CASTS = "_remat_autocasts"  # attribute of a tensor that stands for a leaf: dtype -> its cast


@contextmanager
def autocast_cache(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Traces `module`, a captured forward, with autocast's cache.

    Args:
        module: an operator that marks leaves is added to it, and runs while it is traced.
        inputs: its example inputs, one per placeholder.
    """
    leaves: list[Any] = []
    regions = _Regions()

    def mark(*tensors: torch.Tensor) -> None:
        leaves.extend(tensors)
        regions.begin()
        forget()

    def forget() -> None:
        for leaf in leaves:
            setattr(leaf, _CASTS, {})

    _mark_leaves(module, inputs, mark)
    clear, enable = torch.clear_autocast_cache, torch.set_autocast_enabled
    replaced: Any = torch

    def clear_both() -> None:  # called where an autocast region ends
        forget()
        clear()

    def noted(*args: Any) -> None:  # called where a region begins or ends
        regions.enable(*args)
        enable(*args)

    replaced.clear_autocast_cache, replaced.set_autocast_enabled = clear_both, noted
    try:
        with autocast_cache_left_on(), with_kernel(torch.ops.aten.to.dtype, regions.remembering):
            yield
    finally:
        replaced.clear_autocast_cache, replaced.set_autocast_enabled = clear, enable
        clear()


class _Regions:
    """Which autocast regions the trace is in, and the kernel that caches casts there.

    An operator can't see this itself. Autocast is off inside of every operator that it calls.
    """

    def __init__(self) -> None:
        self.is_on: dict[str, bool] = {}  # by device type

    def begin(self) -> None:
        """Notes the region that the step begins in."""
        for kind in ("cpu", "cuda"):
            self.is_on[kind] = torch.is_autocast_enabled(kind)

    def enable(self, *args: Any) -> None:
        """Notes the arguments of `torch.set_autocast_enabled`; without a device, CUDA is meant."""
        kind, is_on = args if len(args) == 2 else ("cuda", *args)
        self.is_on[kind] = is_on

    def remembering(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `aten.to.dtype` with the cache."""

        def to(x: torch.Tensor, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
            casts: dict[torch.dtype, torch.Tensor] | None = getattr(x, _CASTS, None)
            if casts is None or not self._is_caching(x.device.type, dtype):
                return plain(x, dtype, *args, **kwargs)
            if dtype not in casts:
                casts[dtype] = plain(x, dtype, *args, **kwargs)
            return casts[dtype]

        return to

    def _is_caching(self, kind: str, dtype: torch.dtype) -> bool:
        return (
            self.is_on.get(kind, False)
            and is_inside_autocast_cast(kind)
            and torch.is_autocast_cache_enabled()
            and dtype is torch.get_autocast_dtype(kind)
        )


def _mark_leaves(module: fx.GraphModule, inputs: Sequence[Any], mark: Callable[..., None]) -> None:
    """Makes the module begin with `mark(*leaves)`, if autocast would cache the cast of any leaf."""
    nodes = module.graph.find_nodes(op="placeholder")
    leaves = [node for node, value in zip(nodes, inputs, strict=True) if _is_cached(value)]
    if leaves:
        with module.graph.inserting_after(nodes[-1]):
            module.graph.call_function(mark, tuple(leaves))
        module.recompile()


def _is_cached(value: Any) -> bool:
    """True where autocast would cache casts of `value`.

    The condition is that of `cached_cast` in aten/src/ATen/autocast_mode.cpp (torch 2.13).
    """
    is_trained_leaf = (
        isinstance(value, torch.Tensor)
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
    )
    return is_trained_leaf and value.dtype is torch.float32
