"""Calls of torch's operators, forward and backward, from its own operator database.

Each operator of `torch.testing._internal.common_methods_invocations.op_db` runs forward with a few
of its sample inputs, and backward from all its results. The operators below autograd that do the
work are recorded, in their functional form, as in a captured graph.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from remat.tracers.calls import Call

# What an operator raises for a layout or a type that it does not take.
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)


class Made(NamedTuple):
    """One call of an operator on real tensors."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Returns the operator's result, with the same random numbers at each run."""
        torch.manual_seed(0)
        return self.target(*self.args, **self.kwargs)


class _Recorder(TorchDispatchMode):
    """Notes each operator that runs, in its functional form."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Made] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        functional = functional_form(func)
        if functional is not None:
            # in place: the inputs as they were before the call
            keep = torch.Tensor.detach if functional is func else copied
            kept = tree_map_only(torch.Tensor, keep, (args, kwargs or {}))
            self.calls.append(Made(functional, *kept))
        return func(*args, **(kwargs or {}))


def functional_form(target: Any) -> OpOverload | None:
    """Returns the form of an operator that does not change its inputs, or None."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    if not target._schema.is_mutable:
        return target

    name = target._schema.name.split("::")[1]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name[-1] == "_" else None
    overload = getattr(packet, target._overloadname, None)
    is_functional = isinstance(overload, OpOverload) and not overload._schema.is_mutable
    return overload if is_functional else None


def operators(only: str = "") -> list[Any]:
    """Returns the entries of torch's operator database whose name contains `only`."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [info for info in op_db if only in info.name]


def calls_of(info: Any, dtype: torch.dtype, num_samples: int) -> list[Made]:
    """Returns the distinct calls that an operator makes, forward and backward, on samples."""
    if dtype not in info.supported_dtypes("cpu"):
        return []

    trains = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    torch.manual_seed(0)

    found: dict[Call, Made] = {}
    recorder = _Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in _samples(info, dtype, num_samples, trains=trains):
            try:
                with recorder:
                    _step(info.op, sample, trains=trains)
            except REFUSALS:  # some samples are for tests that expect errors
                continue

    for made in recorder.calls:
        found.setdefault(Call.made(made.target, made.args, made.kwargs, None), made)

    return list(found.values())


def _samples(info: Any, dtype: torch.dtype, count: int, *, trains: bool) -> list[Any]:
    try:
        drawn = info.sample_inputs("cpu", dtype, requires_grad=trains)
        return [sample for _, sample in zip(range(count), drawn, strict=False)]
    except REFUSALS:  # the operator runs on GPUs only
        return []


def _step(operator: Callable[..., Any], sample: Any, *, trains: bool) -> None:
    outputs = operator(sample.input, *sample.args, **sample.kwargs)
    inputs = _that_train((sample.input, sample.args, sample.kwargs))
    results = _that_train(outputs)
    if trains and inputs and results:
        gradients = [torch.randn_like(t) for t in results]
        torch.autograd.grad(results, inputs, gradients, allow_unused=True)


def _that_train(values: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.requires_grad]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in its own memory, with the original's layout."""
    if tensor.layout != torch.strided:
        return tensor.detach().clone()
    with torch.no_grad():
        memory = tensor.detach().untyped_storage().clone()
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _swapped(t: torch.Tensor, one: int, other: int) -> torch.Tensor:
    return t.transpose(one, other).contiguous().transpose(one, other) if t.dim() > 1 else t


def _with_gaps(t: torch.Tensor) -> torch.Tensor:
    """Uses every other element of memory, without a gap after the last one."""
    rows = t.contiguous()
    wide = t.new_zeros(max(0, 2 * t.numel() - 1))
    return wide.as_strided(t.shape, [2 * n for n in rows.stride()]).copy_(t)


def _channels_last(t: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=formats[t.dim()]) if t.dim() in formats else t


def _expanded(t: torch.Tensor) -> torch.Tensor:
    is_data = t.dim() and t.numel() and (t.is_floating_point() or t.is_complex())
    return t[(0,) * t.dim()].clone().expand(t.shape) if is_data else t  # not indices


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda t: t.contiguous(),
    "first and second swapped": lambda t: _swapped(t, 0, 1) if t.dim() > 1 else t,
    "first and last swapped": lambda t: _swapped(t, 0, -1),
    "channels last": _channels_last,
    "gaps": _with_gaps,
    "expanded": _expanded,
}


def in_layouts(made: Made, shape: tuple[int, ...] = ()) -> Iterator[Made]:
    """Yields a call with its tensors in other layouts: all of them, and the first alone.

    If `shape` is given and all tensors have one shape, they are enlarged to `shape`; calls whose
    tensors differ in shape are skipped.
    """
    leaves, spec = tree_flatten((made.args, made.kwargs))
    places = [i for i, leaf in enumerate(leaves) if _is_dense_data(leaf)]
    if shape and {leaves[i].shape for i in places} - {leaves[places[0]].shape if places else ()}:
        return

    with torch.no_grad():
        for place in places if shape else ():
            leaves[place] = _filled(leaves[place], shape)

        for change in LAYOUTS.values():
            for changed in (places, places[:1]) if len(places) > 1 else (places,):
                new = list(leaves)
                for place in changed:
                    new[place] = change(leaves[place].detach())

                args, kwargs = tree_unflatten(new, spec)
                yield Made(made.target, args, kwargs)


def _is_dense_data(leaf: Any) -> bool:
    is_tensor = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
    return is_tensor and bool(leaf.numel())


def _filled(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Repeats a tensor's numbers, with small differences where they are floating-point."""
    count = math.prod(shape)
    flat = tensor.detach().reshape(-1)
    flat = flat.repeat(-(-count // len(flat)))[:count].reshape(shape)
    if flat.is_floating_point() or flat.is_complex():
        flat = flat * (1 + 0.1 * torch.rand(shape)).to(flat.dtype)
    return flat
