"""Traces the operators that plain PyTorch runs, with the layouts that their kernels return.

AOTAutograd (torch 2.13) differs from eager PyTorch in two ways that change results in the last bit,
or break the step:

- it decomposes some operators that have kernels, such as bilinear interpolation, an LSTM, or the
  shrinkage functions. Here the kernels are traced, except for those named below;
- for inputs that are not contiguous, some operators have other strides on fake tensors than their
  kernels return. Everything after them is traced for the wrong strides: a view can't be made, or
  the next product reads another layout and rounds differently. Here results are traced in the
  layout that `tracers/layouts.py` finds by running each call once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from remat.run.plain_derivatives import plain_derivatives
from remat.torch_border.kernels import corrected_fakes, is_dense, with_python_kernels
from remat.tracers.calls import Call
from remat.tracers.layouts import Layout, layouts_of
from remat.tracers.retarget import is_for_cuda

aten = torch.ops.aten

# Operators that torch's tracing may still decompose: dropout, whose fused form draws the same mask
# and saves one byte per element instead of a float; batch norm, in functional form; and operators
# that only move data or make indices.
_KEPT = frozenset({
    aten.dropout.default, aten.native_batch_norm.default, aten.cudnn_batch_norm.default,
    aten.one_hot.default, aten.empty.out,
    aten.broadcast_tensors.default, aten.pad_sequence.default,
    aten.tensor_split.tensor_indices_or_sections, aten.unsafe_chunk.default,
    aten.stft.center, aten.istft.default, aten.matmul.out,
})  # fmt: skip
# Operators that copy all memory of their first argument, even if it is a view
# (`clone_preserve_strides` in TensorShape.cpp and functionalization's inverses of views, 2.13).
_COPY_ALL_MEMORY = frozenset({
    aten.copy, aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter,
    aten.as_strided_scatter,
})  # fmt: skip


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Traces operators and layouts as in plain PyTorch inside of a `with` block; see above."""
    with (
        with_python_kernels(_KEPT, {aten.dropout.default: _plain_where_it_rounds}),
        corrected_fakes(as_the_kernel_lays_out),
        plain_derivatives(),
    ):
        yield


def _plain_where_it_rounds(fused: Callable[..., Any]) -> Callable[..., Any]:
    """Returns dropout that is computed as in eager mode where the fused one gives other bits.

    On a CPU the fused dropout rounds its scale differently, in bfloat16 and float16 always, in
    float32 for some p, such as 0.15. With p = 1 it draws numbers, and eager mode does not. On CUDA,
    eager mode runs the fused one for 0 < p < 1.
    """

    def dropout(x: torch.Tensor, p: float, train: bool) -> Any:
        if train and p == 1:
            return x * torch.zeros((), dtype=x.dtype, device=x.device)
        is_eager_fused = x.device.type != "cpu" or is_for_cuda() or _rounds_alike(p, x.dtype)
        if not train or p == 0 or is_eager_fused:
            return fused(x, p, train)
        return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)

    return dropout


def _rounds_alike(p: Any, dtype: torch.dtype) -> bool:
    """True if 1 divided by the rounded 1 - p is the rounded 1 / (1 - p), and p is known."""
    if isinstance(p, torch.SymFloat):
        return False
    if dtype is torch.float32:
        return bool(np.float32(1) / np.float32(1 - p) == np.float32(1 / (1 - p)))
    return dtype is torch.float64


def as_the_kernel_lays_out(operator: Any, result: Any, args: Any, kwargs: Any) -> Any:
    """Returns an operator's result on fake tensors in the layout that its kernel returns."""
    if getattr(operator, "overloadpacket", None) in _COPY_ALL_MEMORY:
        return _in_all_memory(result, args[0])
    if not _may_differ(operator, result, args, kwargs):
        return result

    found = layouts_of(Call.made(operator, args, kwargs, result))
    # the call can't be run, or returns another number of tensors
    if found is None or len(found) != len(_tensors(result)):
        return result
    layouts = iter(found)
    return tree_map_only(torch.Tensor, lambda t: _laid_out(t, next(layouts)), result)


def _may_differ(operator: Any, result: Any, args: Any, kwargs: Any) -> bool:
    """False where the layout is certain, or the kernel can't choose it."""
    if not isinstance(operator, OpOverload) or operator.namespace != "aten" or operator.is_view:
        return False
    if operator._schema.is_mutable:
        return False

    inputs, results = _tensors((args, kwargs)), _tensors(result)
    if not inputs or not results or not all(map(_is_plain, (*inputs, *results))):
        return False
    if torch.Tag.pointwise in operator.tags and all(t.is_contiguous() for t in inputs):
        return False

    memory = [t.untyped_storage()._cdata for t in results]
    given = {t.untyped_storage()._cdata for t in inputs}
    return len(set(memory)) == len(memory) and given.isdisjoint(memory)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for a strided tensor on the CPU or CUDA whose sizes are known."""
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        return False
    return all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride()))


def _in_all_memory(result: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Returns the result in a copy of all memory of `source`, at the same place.

    It is unchanged if elements of the source overlap.
    """
    shape, stride, offset = source.shape, source.stride(), source.storage_offset()
    is_overlapping = any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True))
    size_bytes = source.untyped_storage().nbytes()
    if is_overlapping or result.untyped_storage().nbytes() == size_bytes:
        return result
    num_elements = size_bytes // source.dtype.itemsize
    memory = torch.empty(num_elements, dtype=result.dtype, device=result.device)
    return memory.as_strided(shape, stride, offset)


def _laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns the tensor in that layout, or unchanged where this makes no difference.

    A result with gaps between its elements also stays unchanged if shape and strides agree: it lies
    in a copy of all its input's memory, which a layout does not describe.
    """
    promised = Layout.of(tensor)
    is_same = replace(promised, size_bytes=layout.size_bytes) == layout
    if promised == layout or not tensor.numel() or (is_same and not is_dense(tensor)):
        return tensor
    num_elements = layout.size_bytes // layout.dtype.itemsize
    memory = torch.empty(num_elements, dtype=layout.dtype, device=tensor.device)
    return memory.as_strided(layout.shape, layout.stride)
