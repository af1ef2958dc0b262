"""What plain PyTorch runs is what is traced.

Its own kernels, and the layouts that they really return.

AOTAutograd (torch 2.13) differs from eager PyTorch in two ways that change results in the last bit,
or break the step:

- it replaces some operators that have kernels by sums of simpler ones, such as bilinear
  interpolation, an LSTM, or the shrinkage functions. The kernels are traced here, except those
  named below;
- the strides that some operators have on fake tensors are not those that their kernels return, for
  inputs that are not contiguous. All that follows is traced for the wrong strides: a view can't be
  made, or the next product reads another layout and rounds otherwise. `LAYOUTS` holds the real
  ones, found by running every operator of torch's own test database both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from remat.torch_border.kernels import corrected_fakes, suggest_memory_format, with_python_kernels

aten = torch.ops.aten
# (result on fake tensors, *arguments, **arguments) -> the result as the kernel lays it out
Layout = Callable[..., Any]

# Replaced by torch's tracing all the same: the fused dropout draws the same mask and keeps a byte
# an element instead of a float; batch norm in functional form; and what only moves data or makes
# indices.
_KEPT = frozenset({
    aten.dropout.default, aten.native_batch_norm.default, aten.cudnn_batch_norm.default,
    aten.one_hot.default, aten.empty.out,
    aten.broadcast_tensors.default, aten.pad_sequence.default,
    aten.tensor_split.tensor_indices_or_sections, aten.unsafe_chunk.default,
    aten.stft.center, aten.istft.default, aten.matmul.out,
})  # fmt: skip


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Traces as plain PyTorch runs; see above."""
    with (
        with_python_kernels(_KEPT, {aten.dropout.default: _plain_where_it_rounds}),
        corrected_fakes(LAYOUTS),
    ):
        yield


def _plain_where_it_rounds(fused: Callable[..., Any]) -> Callable[..., Any]:
    """Dropout on the CPU in bfloat16 or float16 as eager computes it.

    The fused one rounds its scale otherwise.
    """

    def dropout(x: torch.Tensor, p: float, train: bool) -> Any:
        if (
            not train
            or x.device.type != "cpu"
            or x.dtype not in (torch.bfloat16, torch.float16)
            or not 0 < p < 1
        ):
            return fused(x, p, train)
        return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)

    return dropout


def _contiguous(result: Any, *_: Any, **__: Any) -> Any:
    return _with_first(result, lambda t: torch.empty_like(t, memory_format=torch.contiguous_format))


def _contiguous_on_cpu(result: Any, *_: Any, **__: Any) -> Any:
    """Every result is contiguous, where it is on the CPU."""
    if result[0].device.type != "cpu":
        return result
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in result)


def _as_product(result: Any, first: Any, second: Any, *_: Any, **__: Any) -> Any:
    """What all elementwise operators of two tensors do.

    One of them, or both (`torch.div(32, 4)`), may be numbers.
    """
    if not (isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor)):
        return result
    with torch.no_grad():
        return torch.empty_like(result) if first is second else (first * second).to(result.dtype)


def _in_format_of(place: int) -> Layout:
    """On the CPU the first result is channels-last where argument `place` is, contiguous
    otherwise.
    """

    def layout(result: Any, *args: Any, **_: Any) -> Any:
        memory_format = suggest_memory_format(args[place])
        if args[place].device.type != "cpu":
            return result
        return _with_first(result, lambda t: torch.empty_like(t, memory_format=memory_format))

    return layout


def _channels_last_from_dense(
    result: torch.Tensor, gradient: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """On the CPU the result is channels-last only where the gradient is so without gaps."""
    is_dense = (
        gradient.is_contiguous(memory_format=torch.channels_last) and not gradient.is_contiguous()
    )
    memory_format = torch.channels_last if is_dense else torch.contiguous_format
    return (
        torch.empty_like(result, memory_format=memory_format)
        if gradient.device.type == "cpu"
        else result
    )


def _in_larger_storage(
    result: torch.Tensor, first: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """The result stays in memory that was taken for as many elements as the first argument has."""
    if result.shape == first.shape:
        return torch.empty_like(first)
    if result.numel() >= first.numel():
        return result
    return result.new_empty(first.numel()).as_strided(result.shape, result.stride())


def _with_first(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return change(result)
    return (None if result[0] is None else change(result[0]), *result[1:])


LAYOUTS: dict[Any, Layout] = {
    **dict.fromkeys(
        (
            aten.native_dropout_backward.default, aten.softplus_backward.default,
            aten.div.Tensor_mode, aten.copysign.Tensor,
            aten.xlogy.Tensor, aten.special_xlog1py.default, aten.logaddexp.default,
        ),
        _as_product,
    ),
    **dict.fromkeys(
        (
            aten.native_layer_norm_backward.default, aten._log_softmax_backward_data.default,
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
            aten.glu_backward.default, aten.pow.Scalar,
            aten.nll_loss2d_forward.default,
        ),
        _contiguous,
    ),
    aten.log_sigmoid_forward.default: _contiguous_on_cpu,
    aten.upsample_bilinear2d_backward.default: _channels_last_from_dense,
    **dict.fromkeys(
        (
            aten.native_batch_norm.default, aten._native_batch_norm_legit.default,
            aten._native_batch_norm_legit.no_stats,
            aten._native_batch_norm_legit_functional.default, aten._batch_norm_with_update.default,
            aten._batch_norm_with_update_functional.default, aten.reflection_pad3d.default,
            aten.replication_pad3d.default,
            aten.max_unpool2d.default,
        ),
        _in_format_of(0),
    ),
    **dict.fromkeys(
        (
            aten.native_batch_norm_backward.default, aten.reflection_pad2d_backward.default,
            aten.reflection_pad3d_backward.default,
            aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default,
        ),
        _in_format_of(1),
    ),
    **dict.fromkeys(
        (
            aten.mse_loss.default, aten.smooth_l1_loss.default, aten.binary_cross_entropy.default,
            aten.soft_margin_loss.default,
            aten.col2im.default,
        ),
        _in_larger_storage,
    ),
}  # fmt: skip
