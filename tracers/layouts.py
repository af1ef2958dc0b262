"""The layouts that kernels really return, found by running each call once.

On fake tensors, some operators have other strides or storage sizes than their kernels return (torch
2.13; `experiments/fake_kernels.py` lists them). Everything after them would be traced for the wrong
strides: a view could not be made, or the next product would read another layout and round
differently. No rule says which operators these are, so each distinct call is run once.

A layout depends on the order of strides, on gaps, and on which sizes are 1; hardly ever on the
other sizes. So a large call is run with smaller tensors where this is safe: elementwise calls with
sizes in the same order, others with a smaller batch. Where that fails, or does not determine the
layout, the call is run as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from .calls import Call, TensorSpec
from .counts import bytes_moved, flop_of
from .replay import results_of

_LOG = logging.getLogger(__name__)
Change = Callable[[tuple[int, ...]], tuple[int, ...]]

# Calls up to this size are run as they are, which takes microseconds.
SMALL_BYTES = 1 << 18
# Calls above either limit, about a quarter of a second on two cores, are run smaller or not at all.
_MOST_BYTES = 1 << 28
_MOST_FLOP = 2e10
# In elementwise calls, sizes from this one on are made smaller. Numbers below it may be indices of
# dimensions.
FIRST_SIZE = 9
_BATCH = 3  # the smaller batch of other calls


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a tensor; `stride` counts elements, `size_bytes` is that of the storage."""

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
    """Returns the layouts of the tensors that a call returns; None where they can't be found."""
    if sum(spec.extent_bytes for spec in (*call.inputs, *call.outputs)) <= SMALL_BYTES:
        return _run(call)

    found = _run_smaller(call)
    if found is not None:
        return found

    if bytes_moved(call) > _MOST_BYTES or flop_of(call) > _MOST_FLOP:
        _LOG.info("%s is too large to be run for its layout: torch's layout is used", call.target)
        return None

    return _run(call)


def _run(call: Call) -> tuple[Layout, ...] | None:
    results = results_of(call)
    if results is None or any(t.layout != torch.strided or t.storage_offset() for t in results):
        return None
    return tuple(map(Layout.of, results))


def _run_smaller(call: Call) -> tuple[Layout, ...] | None:
    """Returns a call's layouts from a smaller run; None where that is not possible."""
    change = _smaller_sizes(call) or _smaller_batch(call)
    small = _changed(call, change) if change else None
    found = _run(small) if small else None

    if (
        small is None
        or found is None
        or [t.shape for t in found] != [t.shape for t in small.outputs]
    ):
        return None

    grown = [_grown(*pair, call, small) for pair in zip(found, call.outputs, strict=True)]
    return tuple(layout for layout in grown if layout) if all(grown) else None


def _smaller_sizes(call: Call) -> Change | None:
    """Returns smaller sizes in the same order, if a call's tensors all broadcast to one shape."""
    try:
        whole = torch.broadcast_shapes(*(t.shape for t in call.inputs))
    except RuntimeError:
        return None

    if any(t.shape not in (whole, ()) for t in call.outputs):
        return None
    if any(number >= FIRST_SIZE for number in _numbers(call)):
        return None

    large = sorted({n for n in whole if n >= FIRST_SIZE})
    small_of = dict(zip(large, range(FIRST_SIZE, FIRST_SIZE + len(large)), strict=True))
    return lambda shape: tuple(small_of.get(n, n) for n in shape)


def _smaller_batch(call: Call) -> Change | None:
    """Returns a smaller batch, if the batch size occurs only as the first size of tensors."""
    tensors = (*call.inputs, *call.outputs)
    shape = call.outputs[0].shape if call.outputs else ()
    batch = shape[0] if shape else 0
    is_first = batch > _BATCH and all(batch not in t.shape[1:] for t in tensors)
    if not is_first or any(number == batch for number in _numbers(call)):
        return None
    return lambda shape: (_BATCH, *shape[1:]) if shape and shape[0] == batch else shape


def _numbers(call: Call) -> list[int]:
    """Returns the integers among a call's arguments and the lengths of lists, except shapes.

    Kernels trust sizes that are passed beside a tensor, and read beyond the tensor if the sizes do
    not match it.
    """
    shapes = {t.shape for t in (*call.inputs, *call.outputs)}
    found: list[int] = []

    def add(value: Any) -> None:
        if isinstance(value, tuple) and value not in shapes:
            found.append(len(value))
            for item in value:
                add(item)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append(abs(value))

    for value in (*call.args, *(value for _, value in call.kwargs)):
        add(value)
    return found


def _changed(call: Call, change: Change) -> Call | None:
    """Returns the call with other shapes of its tensors, and of lists that are their shapes.

    None where elements of a tensor overlap.
    """
    shapes = {t.shape for t in (*call.inputs, *call.outputs)}
    lost = False

    def new(value: Any) -> Any:
        nonlocal lost
        if isinstance(value, TensorSpec):
            shape = change(value.shape)
            stride = _restrided(value.shape, value.stride, shape)
            lost |= stride is None
            return replace(value, shape=shape, stride=stride or ())
        if isinstance(value, tuple):
            return change(value) if value in shapes else tuple(map(new, value))
        return value

    kwargs = tuple((name, new(value)) for name, value in call.kwargs)
    outputs = tuple(replace(t, shape=change(t.shape), stride=()) for t in call.outputs)
    small = replace(call, args=new(call.args), kwargs=kwargs, outputs=outputs)
    return None if lost else small


def _grown(found: Layout, promised: TensorSpec, call: Call, small: Call) -> Layout | None:
    """Returns the full-size layout for one that was found with smaller tensors."""
    stride = _restrided(found.shape, found.stride, promised.shape)
    extent = TensorSpec(found.shape, found.stride, found.dtype)
    if stride is None or extent.extent_bytes != extent.nbytes:  # gaps in full size are not known
        return None

    dense_bytes = math.prod(promised.shape) * found.dtype.itemsize
    if found.size_bytes == extent.nbytes:
        return Layout(promised.shape, stride, found.dtype, dense_bytes)

    pairs = zip(call.inputs, small.inputs, strict=True)
    as_input = {one.extent_bytes for one, other in pairs if other.extent_bytes == found.size_bytes}
    if len(as_input) != 1:
        return None

    return Layout(promised.shape, stride, found.dtype, as_input.pop())


def _restrided(
    shape: tuple[int, ...], stride: tuple[int, ...], other: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Returns strides for the shape `other`, with the order and the gaps of `stride`.

    Dimensions of stride 0 keep it. None where elements overlap in another way.
    """
    new = [0] * len(shape)
    end = other_end = 1  # number of elements that the dimensions so far span

    for d in sorted(range(len(shape)), key=lambda d: (stride[d], shape[d] > 1)):
        if stride[d] == 0 and shape[d] > 1:
            continue
        if shape[d] > 1 and stride[d] < end:
            return None

        new[d] = other_end if stride[d] == end else 2 * other_end if stride[d] > end else 1
        if shape[d] > 1:
            end, other_end = stride[d] * shape[d], new[d] * other[d]

    return tuple(new)
