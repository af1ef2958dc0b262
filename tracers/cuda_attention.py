"""The attention kernels that CUDA would run, traced on a machine without a GPU.

`torch.nn.functional.scaled_dot_product_attention` asks the device which kernel to call. Here CPU
tensors get the kernel that a card of the device table would choose (`attention_choice`): its
shapes, seeds and backward are known without a GPU.

What surrounds the kernel is that of ATen/native/transformers/attention.cpp: flash attention pads
widths to multiples of 8, and efficient attention pads the rows of a mask to multiples of 16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .attention_choice import Attention, chosen_kernel, needs_gradient, with_batch
from .devices import Device

aten = torch.ops.aten


@contextmanager
def cuda_attention(device: Device) -> Iterator[None]:
    """Traces attention as `device` runs it, in a `with` block.

    It applies to the whole process.
    """
    functional: Any = torch.nn.functional
    plain = functional.scaled_dot_product_attention

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        query, key, value, attn_mask = map(_as_autocast, (query, key, value, attn_mask))
        given = Attention(
            device.capability, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa
        )
        call = with_batch(given)
        result = _KERNELS[chosen_kernel(call)](call, scale)
        return result if call is given else result.squeeze(0)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain


def _cudnn(call: Attention, scale: float | None) -> Any:
    return aten._scaled_dot_product_cudnn_attention(
        *call.tensors,
        _as_float(call.mask, call.query.dtype),
        needs_gradient(call),
        call.dropout_p,
        call.is_causal,
        False,
        scale=scale,
    )[0]


def _flash(call: Attention, scale: float | None) -> Any:
    width = call.query.shape[-1]
    padding = (0, -width % 8)
    query, key, value = (
        torch.nn.functional.pad(tensor, padding) if padding[1] else tensor
        for tensor in call.tensors
    )
    scale = 1 / math.sqrt(width) if scale is None else scale
    result = aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return result[..., :width] if padding[1] else result


def _efficient(call: Attention, scale: float | None) -> Any:
    mask = _as_float(call.mask, call.query.dtype)
    if mask is not None:
        mask = _with_aligned_rows(mask).expand(*call.query.shape[:-1], call.key.shape[-2])
    return aten._scaled_dot_product_efficient_attention(
        *call.tensors,
        mask,
        needs_gradient(call),
        call.dropout_p,
        call.is_causal,
        scale=scale,
    )[0]


def _math(call: Attention, scale: float | None) -> Any:
    return aten._scaled_dot_product_attention_math(
        *call.tensors,
        _as_float(call.mask, call.query.dtype),
        call.dropout_p,
        call.is_causal,
        scale=scale,
        enable_gqa=call.enable_gqa,
    )[0]


_KERNELS = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": _math}


def _with_aligned_rows(mask: torch.Tensor) -> torch.Tensor:
    """Pads each row of a mask to a multiple of 16 elements, and hides the rest (`pad_bias`)."""
    if all(step % 16 == 0 for step in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, 16 - length % 16))[..., :length]


def _as_autocast(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Casts as autocast does before attention; Boolean masks stay as they are."""
    if tensor is None or not torch.is_autocast_enabled("cpu") or not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _as_float(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -torch.inf)
