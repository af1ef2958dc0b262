"""The layouts that kernels really return, found by running each call once.

On fake tensors an operator promises strides and an amount of memory. Some kernels keep neither
(torch 2.13; `experiments/fake_kernels.py` lists them): all that follows would be traced for the
wrong strides, a view could not be made, or the next product would read another layout and round
otherwise. No formula says which kernels these are, so each distinct call is run once.

A layout depends on the order of strides, on gaps, and on which sizes are 1; hardly ever on how
large the others are. A large call is run at small sizes in the same order, and at its own where
that is refused, or where its result does not say what the layout would be.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from .calls import Call, TensorSpec
from .counts import bytes_moved, flop_of
from .replay import results_of

_LOG = logging.getLogger(__name__)

# Below it a call is run as it is, which takes microseconds.
SMALL_BYTES = 1 << 18
# Calls above either are run at small sizes or not at all: a quarter of a second on two cores.
_MOST_BYTES = 1 << 28
_MOST_FLOP = 2e10
# Sizes from here on are made smaller; numbers below it may be places of dimensions, or strides of
# a window, which are no sizes.
FIRST_SIZE = 9


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in memory; `stride` counts elements, `size_bytes` is of the storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    size_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Returns the layout of a real or fake tensor."""
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return cls(shape, stride, tensor.dtype, tensor.untyped_storage().nbytes())


@cache
def layouts_of(call: Call) -> tuple[Layout, ...] | None:
    """Returns how each tensor that a call returns lies in memory; None where nothing can tell."""
    if sum(spec.extent_bytes for spec in (*call.inputs, *call.outputs)) <= SMALL_BYTES:
        return _run(call)
    found = _run_smaller(call)
    if found is not None:
        return found
    if bytes_moved(call) > _MOST_BYTES or flop_of(call) > _MOST_FLOP:
        _LOG.info("%s is too large to be run for its layout: torch's is taken", call.target)
        return None
    return _run(call)


def _run(call: Call) -> tuple[Layout, ...] | None:
    results = results_of(call)
    if results is None or any(t.layout != torch.strided or t.storage_offset() for t in results):
        return None
    return tuple(map(Layout.of, results))


def _run_smaller(call: Call) -> tuple[Layout, ...] | None:
    """The layouts of a call that is run at smaller sizes; None where these don't tell."""
    smaller = _Sizes.of(call)
    args, kwargs = smaller.change(call.args), smaller.change(call.kwargs)
    outputs = tuple(replace(t, shape=smaller.shape(t.shape), stride=()) for t in call.outputs)
    if args is None or kwargs is None:
        return None
    small = replace(call, args=args, kwargs=kwargs, outputs=outputs)
    found = _run(small)
    if found is None or [t.shape for t in found] != [t.shape for t in outputs]:
        return None
    grown = [_grown(*pair, call, small) for pair in zip(found, call.outputs, strict=True)]
    return tuple(layout for layout in grown if layout) if all(grown) else None


def _grown(found: Layout, promised: TensorSpec, call: Call, small: Call) -> Layout | None:
    """The layout at the shape that was promised of one that was found at a smaller shape."""
    stride = _restrided(found.shape, found.stride, promised.shape)
    extent = TensorSpec(found.shape, found.stride, found.dtype)
    if stride is None or extent.extent_bytes != extent.nbytes:  # gaps are not known in full size
        return None
    dense_bytes = math.prod(promised.shape) * found.dtype.itemsize
    if found.size_bytes == extent.nbytes:
        return Layout(promised.shape, stride, found.dtype, dense_bytes)
    pairs = zip(call.inputs, small.inputs, strict=True)
    as_input = {one.extent_bytes for one, other in pairs if other.extent_bytes == found.size_bytes}
    if len(as_input) != 1:
        return None
    return Layout(promised.shape, stride, found.dtype, as_input.pop())


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Large sizes and the small ones in their place, in the same order."""

    small_of: dict[int, int]

    @classmethod
    def of(cls, call: Call) -> _Sizes:
        sizes = {n for spec in (*call.inputs, *call.outputs) for n in spec.shape}
        large = sorted(n for n in sizes if n >= FIRST_SIZE)
        return cls(dict(zip(large, range(FIRST_SIZE, FIRST_SIZE + len(large)), strict=True)))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.small_of.get(n, n) for n in shape)

    def change(self, value: Any) -> Any:
        """`value` at small sizes; None where tensors overlap themselves."""
        if isinstance(value, TensorSpec):
            shape = self.shape(value.shape)
            stride = _restrided(value.shape, value.stride, shape)
            return None if stride is None else replace(value, shape=shape, stride=stride)
        if isinstance(value, tuple):
            changed = tuple(map(self.change, value))
            lost = any(
                new is None and old is not None for new, old in zip(changed, value, strict=True)
            )
            return None if lost else changed
        if isinstance(value, int) and not isinstance(value, bool):
            return self.small_of.get(value, value)
        return value


def _restrided(
    shape: tuple[int, ...], stride: tuple[int, ...], other: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Strides for the shape `other`, in the order of `stride`, with gaps where it has gaps.

    Dimensions of stride 0 keep it. None where elements overlap in another way.
    """
    new = [0] * len(shape)
    end = other_end = 1  # elements up to here are those of the dimensions so far
    for d in sorted(range(len(shape)), key=lambda d: (stride[d], shape[d] > 1)):
        if stride[d] == 0 and shape[d] > 1:
            continue
        if shape[d] > 1 and stride[d] < end:
            return None
        new[d] = other_end if stride[d] == end else 2 * other_end if stride[d] > end else 1
        if shape[d] > 1:
            end, other_end = stride[d] * shape[d], new[d] * other[d]
    return tuple(new)
