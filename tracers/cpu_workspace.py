"""Formulas for the workspace of torch's CPU operators, each with its source in torch.

Checked against the allocator with torch 2.13. The files named are below `aten/src/ATen/native`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from .calls import Call, TensorSpec, aten


def formula_bytes(call: Call) -> int | None:
    """Returns the workspace on the CPU by formula; None where there is no formula."""
    packet = call.packet
    if any(t.is_neg or (t.is_conj and packet not in _PRODUCTS) for t in call.inputs):
        return None
    if packet in _FORMULAS:
        return _FORMULAS[packet](call)
    if packet in _WITHOUT:
        return 0
    return _pointwise(call) if call.is_pointwise else None


def _copy_bytes(*tensors: TensorSpec) -> int:
    """Returns the bytes of contiguous copies of the tensors that are not contiguous."""
    return sum(t.nbytes for t in tensors if not t.is_contiguous)


def _pointwise(call: Call) -> int | None:
    """TensorIterator.cpp, `compute_types`: inputs are cast to the common type first."""
    packet = call.packet
    if not call.outputs[0].dtype.is_complex and any(t.dtype.is_complex for t in call.inputs):
        return _real_of_complex(call)

    operands = (
        call.args[1:]
        if packet is aten.where
        else call.args[:1]
        if packet is aten.masked_fill
        else call.args
    )

    tensors = [t for t in operands if isinstance(t, TensorSpec)]
    operands = operands[: 1 if packet is aten.pow else 2]
    numbers = [n for n in operands if isinstance(n, int | float | complex)]

    common = _common_dtype(call, tensors, numbers)
    casts = sum(t.numel for t in tensors if t.dtype != common) * common.itemsize

    if packet is aten.where:
        return casts + common.itemsize * len(numbers)

    if packet in _WRAPS_NUMBERS:
        casts += sum(
            _dtype_of(n).itemsize + (common.itemsize if common is not _dtype_of(n) else 0)
            for n in numbers
        )

    return casts


def _real_of_complex(call: Call) -> int | None:
    """UnaryOps.cpp, `unary_op_impl_with_complex_to_float_out`: a complex result first."""
    spec = call.args[0]
    return int(spec.nbytes) if call.packet in (aten.abs, aten.angle) else None


def _common_dtype(call: Call, tensors: list[TensorSpec], numbers: list[Any]) -> torch.dtype:
    out = call.outputs[0].dtype
    if out is not torch.bool or not tensors:
        return out
    common = reduce(
        torch.promote_types, [t.dtype for t in tensors if t.shape] or [t.dtype for t in tensors]
    )
    has_fraction = any(isinstance(n, float) for n in numbers)
    return torch.get_default_dtype() if has_fraction and not common.is_floating_point else common


def _dtype_of(number: complex) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, int):
        return torch.int64
    return torch.float64 if isinstance(number, float) else torch.complex128


def _product(call: Call) -> int | None:
    """LinearAlgebra.cpp: BLAS needs one stride of 1.

    Other matrices are copied, those of a batch one by one. Conjugates are copied too, since BLAS
    conjugates only transposed matrices, and none in a batch (`_suits_blas_conjugated`).

    oneDNN computes products in reduced precision (`use_mkldnn_bf16_matmul`).
    """
    left, right = (
        t
        for t in call.args
        if isinstance(t, TensorSpec) and len(t.shape) >= 2 and t is not _bias(call)
    )

    if left.dtype.itemsize < 4:
        return None
    if left.is_conj or right.is_conj:
        return _conjugate_product(left, right)

    if len(left.shape) == 3 and left.shape[1] * left.shape[2] * right.shape[2] < 400:
        return 0

    batch = left.shape[0] if len(left.shape) == 3 else 1
    return sum(t.nbytes // max(1, batch) for t in (left, right) if not _suits_blas(t))


def _conjugate_product(left: TensorSpec, right: TensorSpec) -> int | None:
    if 1 in (*left.shape[-2:], *right.shape[-2:]):  # ambiguous which matrix is transposed
        return None
    batch = left.shape[0] if len(left.shape) == 3 else 1
    is_copied = [t.is_conj and not _suits_blas_conjugated(t) for t in (left, right)]
    copies = sum(t.nbytes for t, copied in zip((left, right), is_copied, strict=True) if copied)
    others = [t for t, copied in zip((left, right), is_copied, strict=True) if not copied]
    return copies + sum(t.nbytes // max(1, batch) for t in others if not _suits_blas(t))


def _suits_blas_conjugated(t: TensorSpec) -> bool:
    """LinearAlgebra.cpp, `addmm_impl_cpu_`: BLAS conjugates only matrices that it transposes."""
    (rows, _), (down, across) = t.shape[-2:], t.stride[-2:]
    return len(t.shape) == 2 and down == 1 and across >= max(1, rows)


def _bias(call: Call) -> Any:
    return call.args[0] if call.packet in (aten.addmm, aten.baddbmm) else None


def _suits_blas(t: TensorSpec) -> bool:
    (rows, columns), (down, across) = t.shape[-2:], t.stride[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _mean(call: Call) -> int | None:
    """ReduceOps.cpp, `mean_kernel_impl`: a float32 sum, then a division by a wrapped number."""
    spec, out = call.args[0], call.outputs[0]
    if out.dtype is not spec.dtype:
        return None
    if spec.dtype.itemsize >= 4:
        return max(8 + int(spec.dtype.itemsize), _partial_bytes(spec, out, out.dtype.itemsize))
    return 4 * int(spec.numel + out.numel) + _partial_bytes(spec, out, 4)


def _reduction(call: Call) -> int | None:
    """Sums and maxima in the input's type."""
    spec, out = call.args[0], call.outputs[0]
    return _partial_bytes(spec, out, out.dtype.itemsize) if out.dtype is spec.dtype else None


def _partial_bytes(spec: TensorSpec, out: TensorSpec, itemsize: int) -> int:
    """TensorIteratorReduce.cpp, `two_pass_reduction`.

    A full reduction of 32,768 numbers or more needs one number per thread.
    """
    num_threads = torch.get_num_threads()
    return (
        num_threads * itemsize if num_threads > 1 and out.numel == 1 and spec.numel >= 32768 else 0
    )


def _logsumexp(call: Call) -> int:
    """ReduceOps.cpp, `logsumexp_out_impl`: maxima, then exponentials."""
    return int(call.args[0].nbytes + call.outputs[0].nbytes)


def _contiguous(call: Call) -> int:
    """SoftMax.cpp, TriangularOps.cpp: inputs are made contiguous."""
    return _copy_bytes(*call.inputs)


def _one_type(call: Call) -> int | None:
    """TensorShape.cpp, ReduceOps.cpp: inputs of another type than the output's are cast."""
    return 0 if all(t.dtype is call.outputs[0].dtype for t in call.inputs) else None


def _safe_softmax(call: Call) -> int:
    """transformers/attention.cpp, `_safe_softmax`: a mask, a flag per row, a zero."""
    spec: TensorSpec = call.args[0]
    return int(spec.numel + spec.numel // max(1, spec.shape[call.args[1]]) + spec.dtype.itemsize)


def _dropout(call: Call) -> int | None:
    """Dropout.cpp, `native_dropout_cpu`: the mask is cast before the multiplication.

    The mask is drawn in place. Where torch draws with MKL, it needs integers for that; its builds
    2.11 to 2.15 contain no such kernel, on any processor.
    """
    probability, is_training = call.args[1], call.args[2]
    if not is_training or not 0 < probability < 1:
        return None
    return int(call.args[0].nbytes)


def _dropout_backward(call: Call) -> int:
    """Dropout.cpp: gradient times mask, then times the scale, which is wrapped in tensors."""
    spec: TensorSpec = call.args[0]
    return spec.nbytes + (12 if spec.dtype is torch.float32 else 8 + spec.dtype.itemsize)


def _embedding(call: Call) -> int:
    """Embedding.cpp: indices are flattened."""
    return _copy_bytes(call.args[1])


def _embedding_backward(call: Call) -> int:
    """Embedding.cpp, `embedding_dense_backward_cpu`: gradient and indices are made contiguous."""
    return _copy_bytes(*call.args[:2])


def _layer_norm(call: Call) -> int:
    """layer_norm.cpp: the input is made contiguous."""
    return _copy_bytes(call.args[0])


def _layer_norm_backward(call: Call) -> int:
    """cpu/layer_norm_kernel.cpp: two rows per thread for the gradients of weight and bias."""
    spec, mask = call.args[1], call.argument("output_mask")
    width = spec.numel // max(1, call.args[3].numel)
    rows = 2 * torch.get_num_threads() * width * spec.dtype.itemsize if mask[1] or mask[2] else 0
    return _copy_bytes(*call.args[:2]) + rows


def _max_pool(call: Call) -> int:
    """MaxPooling.cpp: an input that is neither contiguous nor channels last is copied."""
    spec: TensorSpec = call.args[0]
    return 0 if spec.is_contiguous or spec.is_channels_last else spec.nbytes


def _max_pool_backward(call: Call) -> int:
    """MaxPooling.cpp: gradient and indices get the input's memory format."""
    gradient, spec, indices = call.args[0], call.args[1], call.argument("indices")
    if spec.is_channels_last and not spec.is_contiguous:
        return sum(t.nbytes for t in (gradient, indices) if not t.is_channels_last)
    return _copy_bytes(gradient, indices)


def _group_norm_backward(call: Call) -> int:
    """cpu/group_norm_kernel.cpp: two sums per channel and sample, in float32 at least."""
    return int(2 * max(4, call.args[0].dtype.itemsize) * call.argument("N") * call.argument("C"))


def _batch_norm(call: Call) -> int | None:
    """Normalization.cpp: mean and variance of each channel.

    With channels last, also one number per thread and channel (cpu/batch_norm_kernel.cpp). For
    inputs of shape (batch, channels), the kernels of some machines hold twice as much.
    """
    spec: TensorSpec = call.args[0]
    if len(spec.shape) == 2:
        return None

    channels, wide = spec.shape[1], max(4, spec.dtype.itemsize)
    if spec.is_contiguous:
        return 2 * wide * channels
    if not spec.is_channels_last or spec.dtype is torch.float16:
        return None
    return max(
        2 * wide * channels,
        2 * spec.dtype.itemsize * channels + wide * channels * torch.get_num_threads(),
    )


def _batch_norm_backward(call: Call) -> int | None:
    """Normalization.cpp, `batch_norm_backward_cpu`: a second gradient of the input."""
    gradient, spec = call.args[:2]
    if (
        gradient.stride != spec.stride
        or not (spec.is_contiguous or spec.is_channels_last)
        or not call.argument("output_mask")[0]
        or call.argument("weight") is None  # then it depends on the machine's kernels
    ):
        return None

    return max(
        int(spec.nbytes),
        8 * spec.shape[1] * (torch.get_num_threads() + 2) if spec.is_channels_last else 0,
    )


def _attention(call: Call) -> int | None:
    """cpu/FlashAttentionKernel.cpp, `cpu_flash_attention`.

    One tile of scores and one of the output per thread.
    """
    query, key = call.args[:2]
    rows, columns = _tile(query.shape[2], key.shape[2])
    if query.dtype.itemsize < 4:
        return None
    return int(
        torch.get_num_threads() * rows * (columns + 2 + query.shape[3]) * query.dtype.itemsize
    )


def _attention_backward(call: Call) -> int | None:
    """cpu/FlashAttentionKernel.cpp, `cpu_flash_attention_backward`.

    Two tiles of scores per thread, one sum per row, and a copy of the gradient if its rows are not
    contiguous.
    """
    gradient, query, key = call.args[:3]
    rows, columns = _tile(query.shape[2], key.shape[2])
    if query.dtype.itemsize < 4:
        return None
    return _copy_bytes(gradient.permuted(0, 2, 1, 3)) + int(
        (torch.get_num_threads() * 2 * rows * columns + rows) * query.dtype.itemsize
    )


def _tile(num_queries: int, num_keys: int) -> tuple[int, int]:
    rows = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return min(rows, num_queries), min(512, num_keys)


def _gelu_backward(call: Call) -> int:
    """Activation.cpp: oneDNN's kernel needs both inputs in one layout."""
    gradient, spec = call.args[:2]
    return (
        0 if gradient.stride == spec.stride or spec.dtype is torch.float64 else 2 * int(spec.nbytes)
    )


_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
_FORMULAS: dict[Any, Callable[[Call], int | None]] = {
    **dict.fromkeys(_PRODUCTS, _product),
    aten.mean: _mean,
    **dict.fromkeys((aten.sum, aten.amax), _reduction),
    aten.logsumexp: _logsumexp,
    **dict.fromkeys(
        (
            aten._softmax,
            aten._log_softmax,
            aten._softmax_backward_data,
            aten._log_softmax_backward_data,
        ),
        _contiguous,
    ),
    **dict.fromkeys((aten.tril, aten.triu), _contiguous),
    **dict.fromkeys((aten.cat, aten.cumsum), _one_type),
    aten._safe_softmax: _safe_softmax,
    aten.native_dropout: _dropout,
    aten.native_dropout_backward: _dropout_backward,
    aten.embedding: _embedding,
    aten.embedding_dense_backward: _embedding_backward,
    aten.native_layer_norm: _layer_norm,
    aten.native_layer_norm_backward: _layer_norm_backward,
    aten.native_group_norm_backward: _group_norm_backward,
    aten.max_pool2d_with_indices: _max_pool,
    aten.max_pool2d_with_indices_backward: _max_pool_backward,
    **dict.fromkeys(
        (
            aten._native_batch_norm_legit_functional,
            aten._native_batch_norm_legit,
            aten.native_batch_norm,
        ),
        _batch_norm,
    ),
    aten.native_batch_norm_backward: _batch_norm_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.gelu_backward: _gelu_backward,
    aten.isinf: lambda call: None,
}
# Operators that wrap a Python number in a tensor, and cast this tensor to the common type.
_WRAPS_NUMBERS = {
    aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.pow, aten.fmod, aten.remainder,
    aten.floor_divide, aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.eq, aten.ne,
    aten.lt, aten.le, aten.gt, aten.ge, aten.add_, aten.sub_, aten.mul_, aten.div_,
}  # fmt: skip
_WITHOUT = {
    aten.arange, aten.full, aten.full_like, aten.zeros, aten.zeros_like, aten.ones,
    aten.ones_like, aten.scalar_tensor, aten.fill, aten.empty, aten.empty_like,
    aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_full,
    aten.clone, aten.copy, aten.copy_, aten._to_copy, aten.lift_fresh_copy, aten.constant_pad_nd,
    aten.slice_scatter, aten.select_scatter, aten.as_strided_scatter, aten.slice_backward,
    aten.select_backward, aten.rand, aten.randn, aten.rand_like, aten.randn_like, aten.bernoulli,
    aten.gather, aten.index_select, aten.nll_loss_forward, aten.nll_loss_backward,
    aten.hardtanh_backward, aten.argmax, aten.native_group_norm,
}  # fmt: skip
