"""The attention kernels that CUDA would run, traced on a machine without a GPU.

`torch.nn.functional.scaled_dot_product_attention` asks the device which kernel to call. Here CPU
tensors get the kernel that a card of the device table would choose: the kernel's shapes, seeds and
backward are known without a GPU. The choices are those of an H100 with torch 2.11, as
`torch._fused_sdp_choice` gave them for 7 head widths, 3 types, masks, dropout and grouped heads
(`experiments/gpu_run.py`, section `environment`). From torch's documentation: flash attention needs
an Ampere, and cards older than Hopper do not prefer cuDNN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .devices import AMPERE, HOPPER, Device

aten = torch.ops.aten

_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 256  # widest head for flash attention and cuDNN


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
        kernel = chosen_kernel(device, query, key, attn_mask, enable_gqa=enable_gqa)
        mask = _as_float(attn_mask, query.dtype)

        needs_gradient = torch.is_grad_enabled() and _any_requires_grad(query, key, value)

        if kernel == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, needs_gradient, dropout_p, is_causal, False, scale=scale
            )[0]

        if kernel == "flash":
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]

        if kernel == "efficient":
            if mask is not None:
                mask = mask.expand(*query.shape[:-1], key.shape[-2])
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, needs_gradient, dropout_p, is_causal, scale=scale
            )[0]

        return aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain


def chosen_kernel(
    device: Device,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    enable_gqa: bool = False,
) -> str:
    """Returns `cudnn`, `flash`, `efficient` or `math`.

    Args:
        device: a GPU of the device table.
        query: of shape (batch, heads, length, width).
        key: likewise, with fewer heads if `enable_gqa`.
        mask: added to the scores, or None.
        enable_gqa: several heads of `query` share one of `key`.
    """
    if query.dim() != 4 or query.dtype not in (*_HALF, torch.float32):
        return "math"

    is_half, width = query.dtype in _HALF, query.shape[-1]
    is_short = width <= _WIDEST and width % 8 == 0
    if is_half and is_short and device.capability >= HOPPER:
        return "cudnn"
    if is_half and is_short and mask is None and device.capability >= AMPERE:
        return "flash"

    return "math" if enable_gqa and key.shape[1] != query.shape[1] else "efficient"


def _any_requires_grad(*tensors: torch.Tensor) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def _as_autocast(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Casts as autocast does before attention; Boolean masks stay as they are."""
    if tensor is None or not torch.is_autocast_enabled("cpu") or not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _as_float(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -torch.inf)
