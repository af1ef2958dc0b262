"""The attention kernel that PyTorch chooses on a card: its rules, in its order.

Source: ATen/native/transformers/cuda/sdp_utils.cpp in torch's main branch of 2026, and
sdp_utils_cpp.h (masks, heads, strides) in 2.11, 2.12, 2.14 and 2.15. The version from which a rule
applies was read from these four versions of libtorch_cuda.so: from the messages in it, and for the
widest heads from the versions of cuDNN that it compares with. Torch 2.13 was not read, and counts
as 2.12.

Assumed are the wheels for CUDA 13, which bring cuDNN 9.19 (torch 2.11), 9.20 (2.12), 9.24 (2.14)
and 9.26 (2.15). Wheels for older CUDA bring an older one, which PyTorch does not prefer.

An H100 with torch 2.11 chose the same for 7 head widths, 3 types, masks, dropout and grouped heads
(`experiments/gpu_run.py`, section `environment`). No other card or version was asked.

Not covered: an order of the user's own (`sdpa_kernel(..., set_priority=True)`), FlashAttention 3
and 4, and, from 2.14 on, efficient attention's rule that inputs begin at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .devices import AMPERE, BLACKWELL, HOPPER

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

_LOW = (torch.float16, torch.bfloat16)
_CUDNN_FIRST = ("cudnn", "flash", "efficient", "math")
_FLASH_FIRST = ("flash", "efficient", "math", "cudnn")
_MOST_BLOCKS = 65535  # of a grid of CUDA's in its second and third dimension


class Attention(NamedTuple):
    """A call of attention on a card, as far as it decides the kernel.

    Attributes:
        capability: the card's compute capability.
        query: of shape (batch, heads, length, width); without a batch from torch 2.14 on.
        key: likewise, with fewer heads if `enable_gqa`.
        value: likewise; its width may differ.
        mask: added to the scores or, if it is Boolean, says which of them count.
        dropout_p: probability of dropout.
        is_causal: later keys do not count.
        enable_gqa: several heads of `query` share one of `key` and `value`.
        version: of torch.
    """

    capability: float
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False
    version: tuple[int, ...] = VERSION

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value


def chosen_kernel(call: Attention) -> str:
    """Returns `cudnn`, `flash`, `efficient` or `math`.

    Raises:
        RuntimeError: the kernels that are enabled can't run this call, as in torch itself.
    """
    call = with_batch(call)
    enabled = _enabled_kernels()
    for kernel in _CUDNN_FIRST if HOPPER <= call.capability < 11 else _FLASH_FIRST:
        if kernel in enabled and all(is_met(call) for is_met in _RULES[kernel]):
            return kernel
    raise RuntimeError(
        f"no enabled kernel runs this attention on the card: enabled are {', '.join(enabled)}, the "
        f"type is {call.query.dtype}; enable another one (torch.nn.attention.sdpa_kernel)"
    )


def with_batch(call: Attention) -> Attention:
    """Returns the call with a batch of one, which torch adds from 2.14 on (sdp_utils_cpp.h)."""
    if call.version < (2, 14) or any(tensor.dim() != 3 for tensor in call.tensors):
        return call

    mask = call.mask
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    query, key, value = (tensor.unsqueeze(0) for tensor in call.tensors)
    return call._replace(query=query, key=key, value=value, mask=mask)


def needs_gradient(call: Attention) -> bool:
    """True where a gradient of query, key or value will be asked for."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _enabled_kernels() -> tuple[str, ...]:
    """Returns the kernels that settings allow; a model may change them around its attention."""
    backends = torch.backends.cuda
    is_warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    is_strict = torch.are_deterministic_algorithms_enabled() and not is_warned_only
    enabled = {
        "cudnn": backends.cudnn_sdp_enabled() and not is_strict,
        "flash": backends.flash_sdp_enabled(),
        "efficient": backends.mem_efficient_sdp_enabled(),
        "math": backends.math_sdp_enabled(),
    }
    return tuple(kernel for kernel, is_enabled in enabled.items() if is_enabled)


def _fits_fused_kernels(call: Attention) -> bool:
    """Four dimensions, one batch, one type, no empty length, and rows without gaps."""
    query, tensors = call.query, call.tensors
    return (
        all(tensor.dim() == 4 for tensor in tensors)
        and all(tensor.shape[0] == query.shape[0] for tensor in tensors)
        and all(tensor.dtype == query.dtype for tensor in tensors)
        and all(tensor.shape[2] > 0 for tensor in tensors)
        and all(tensor.stride(-1) == 1 for tensor in tensors)
        and (call.mask is None or call.mask.stride(-1) == 1)
    )


def _has_no_mask(call: Attention) -> bool:
    return call.mask is None


def _has_mask_for_cudnn(call: Attention) -> bool:
    """Constant, of two or four dimensions, each that of the scores or 1."""
    mask, query = call.mask, call.query
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    scores = (*query.shape[:3], call.key.shape[2])[4 - mask.dim() :]
    return all(size in (1, wanted) for size, wanted in zip(mask.shape, scores, strict=True))


def _is_half(call: Attention) -> bool:
    """Cards before Ampere compute in float16 alone."""
    return call.query.dtype in (_LOW if call.capability >= AMPERE else _LOW[:1])


def _is_half_or_float32(call: Attention) -> bool:
    return call.query.dtype == torch.float32 or _is_half(call)


def _has_ampere(call: Attention) -> bool:
    return call.capability >= AMPERE


def _has_heads_in_groups(call: Attention) -> bool:
    """Several heads may share those of key and value; without `enable_gqa` only from 2.14 on."""
    heads, of_key, of_value = (tensor.shape[1] for tensor in call.tensors)
    if call.enable_gqa:
        return heads % of_key == 0 and of_key == of_value
    return heads == of_key == of_value or (call.version >= (2, 14) and of_key == of_value == 1)


def _has_heads_for_cudnn(call: Attention) -> bool:
    """With `enable_gqa`, key and value may have different numbers of heads."""
    heads, of_key, of_value = (tensor.shape[1] for tensor in call.tensors)
    if call.enable_gqa:
        return heads % of_key == 0 and heads % of_value == 0
    return _has_heads_in_groups(call)


def _has_heads_for_efficient(call: Attention) -> bool:
    """Grouped heads are new in 2.14 (template arguments in libtorch_cuda.so)."""
    if call.version >= (2, 14):
        return _has_heads_in_groups(call)
    return call.query.shape[1] == call.key.shape[1] == call.value.shape[1]


def _has_width_for_cudnn(call: Attention) -> bool:
    """At most 128; 256 on Hopper, and from 2.14 on Blackwell too, which before took 192 and 128."""
    widths = call.query.shape[3], call.value.shape[3]
    is_blackwell = BLACKWELL <= call.capability < 11
    limit = 128
    if call.capability == HOPPER or (is_blackwell and call.version >= (2, 14)):
        limit = 256
    elif is_blackwell and widths == (192, 128):
        limit = 192
    return max(widths) <= limit and widths[0] % 8 == widths[1] % 8 == 0


def _has_width_for_cudnns_backward(call: Attention) -> bool:
    """`check_cudnn_d256_bprop_head_dim`, from 2.14 on: at most 128, 192 and 128, or 256."""
    if call.version < (2, 14) or not needs_gradient(call):
        return True
    widths = call.query.shape[3], call.value.shape[3]
    return max(widths) <= 128 or widths in ((192, 128), (256, 256))


def _has_lengths_for_cudnn(call: Attention) -> bool:
    """No single key; no single query with dropout, nor on Blackwell with cuDNN 9.24 (2.14)."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    is_decode_broken = call.version == (2, 14) and BLACKWELL <= call.capability < 12
    return keys != 1 and (queries != 1 or not (call.dropout_p or is_decode_broken))


def _has_dropout_for_cudnn(call: Attention) -> bool:
    """From 2.12 on a multiple of 1/16."""
    return call.version < (2, 12) or call.dropout_p * 16 == int(call.dropout_p * 16)


def _has_grid_for_cudnn(call: Attention) -> bool:
    return call.version < (2, 14) or max(call.query.shape[:2]) <= _MOST_BLOCKS


def _has_grid_for_flash(call: Attention) -> bool:
    return call.version < (2, 15) or max(call.query.shape[:2]) <= _MOST_BLOCKS


def _has_width_for_flash(call: Attention) -> bool:
    """One width of at most 256; others than multiples of 8 are padded."""
    width = call.query.shape[3]
    return call.key.shape[3] == call.value.shape[3] == width <= 256


def _has_width_for_flashs_backward(call: Attention) -> bool:
    """On sm86, sm89 and sm12x, none above 192, except for those above 224 without dropout."""
    width = call.query.shape[3]
    is_small_card = 8.6 <= call.capability <= 8.9 or call.capability >= 12
    if not is_small_card or not needs_gradient(call):
        return True
    return width <= 192 or (width > 224 and not call.dropout_p)


def _is_square_if_causal(call: Attention) -> bool:
    return not call.is_causal or call.query.shape[2] == call.key.shape[2]


def _has_width_for_efficient(call: Attention) -> bool:
    """`minimum_gemm_alignment`: multiples of 16 bytes, and any float32 before Ampere."""
    alignment = 16 // call.query.itemsize
    if call.query.dtype == torch.float32 and call.capability < AMPERE:
        alignment = 1
    widths = [tensor.shape[3] for tensor in call.tensors]
    return widths[0] == widths[1] and all(w > 0 and w % alignment == 0 for w in widths)


_RULES: dict[str, tuple[Callable[[Attention], bool], ...]] = {
    "cudnn": (
        _fits_fused_kernels, _is_half, _has_ampere, _has_mask_for_cudnn, _has_heads_for_cudnn,
        _has_width_for_cudnn, _has_width_for_cudnns_backward, _has_lengths_for_cudnn,
        _has_dropout_for_cudnn, _has_grid_for_cudnn,
    ),
    "flash": (
        _fits_fused_kernels, _is_half, _has_ampere, _has_no_mask, _has_heads_in_groups,
        _has_width_for_flash, _has_width_for_flashs_backward, _is_square_if_causal,
        _has_grid_for_flash,
    ),
    "efficient": (
        _fits_fused_kernels, _is_half_or_float32, _has_heads_for_efficient,
        _has_width_for_efficient,
    ),
    "math": (),
}  # fmt: skip
