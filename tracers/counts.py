"""The work of an operator call: floating-point operations and bytes moved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from .calls import Call, OpOverload, TensorSpec, aten


def bytes_moved(call: Call) -> int:
    """Returns the bytes that a call moves: its inputs' distinct elements and its outputs."""
    if call.packet in _UNINITIALISED:
        return 0
    written = sum(t.nbytes for t in call.outputs)
    if call.packet in _LOOKUPS:
        return 2 * written + sum(t.unique_bytes for t in call.inputs[1:])
    return written + sum(t.unique_bytes for t in call.inputs)


def flop_of(call: Call) -> int:
    """Returns the floating-point operations of a call.

    Products and convolutions are counted by torch's formulas, or by those below where torch has no
    formula or a wrong one. Every other call counts one operation per element of its largest tensor.
    """
    packet = call.packet
    if packet in _FORMULAS:
        return _FORMULAS[packet](call)
    if packet in flop_registry:
        return _registered_flop(call)
    if packet in _UNINITIALISED:
        return 0
    if packet in _LOOKUPS:
        return sum(t.numel for t in call.outputs)
    return max((t.numel for t in (*call.inputs, *call.outputs)), default=0)


def draws_of(call: Call) -> int:
    """Returns how many random numbers a call draws: one per element of its largest result."""
    if is_contraction(call) or not isinstance(call.target, OpOverload):
        return 0
    is_random = torch.Tag.nondeterministic_seeded in call.target.tags
    if not is_random and str(call.target) != "prims.inductor_random.default":
        return 0
    return max((t.numel for t in call.outputs), default=0)


def is_contraction(call: Call) -> bool:
    """Returns whether matrix units can do the work: products, convolutions, attention."""
    return call.packet in _FORMULAS or call.packet in flop_registry


def _registered_flop(call: Call) -> int:
    args, kwargs = _as_meta(call.args), {name: _as_meta(value) for name, value in call.kwargs}
    out: Any = tuple(map(_as_meta, call.outputs))
    return int(
        flop_registry[call.packet](*args, **kwargs, out_val=out[0] if len(out) == 1 else out)
    )


def _as_meta(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return tuple(map(_as_meta, value))
    return value


def _convolution_backward_flop(call: Call) -> int:
    """Counts the forward's FLOP once for the input's and once for the weight's gradient.

    Torch's formula for the weight's gradient ignores groups (torch 2.13): its result for a
    depthwise convolution of 960 channels is 960 times too large.
    """
    grad_output, _, weight = call.args[:3]
    pixels = grad_output if not call.argument("transposed") else call.args[1]
    once = 2 * pixels.shape[0] * math.prod(pixels.shape[2:]) * weight.numel
    return int(once * sum(call.argument("output_mask")[:2]))


def _attention_forward_flop(call: Call) -> int:
    query, key, value = call.args[:3]
    return int(
        2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    )


def _attention_backward_flop(call: Call) -> int:
    """Counts the scores again and gradients of scores, values, queries and keys, not masks."""
    _, query, key, value = call.args[:4]
    return int(
        2
        * math.prod(query.shape[:-1])
        * key.shape[-2]
        * (3 * query.shape[-1] + 2 * value.shape[-1])
    )


def _product_flop(call: Call) -> int:
    """Counts 2 k per element of the output; k is the last dimension of the first matrix."""
    left = call.args[1 if call.packet is aten.addmv else 0]
    return int(2 * left.shape[-1] * sum(t.numel for t in call.outputs))


_ATTENTION = (
    "flash_attention_for_cpu", "fused_attention_overrideable", "flash_attention",
    "efficient_attention", "cudnn_attention",
)  # fmt: skip
_FORMULAS: dict[Any, Callable[[Call], int]] = {
    aten.convolution_backward: _convolution_backward_flop,
    # torch's own formulas refuse several query heads that share one key head
    **{
        getattr(aten, f"_scaled_dot_product_{name}"): _attention_forward_flop for name in _ATTENTION
    },
    **{
        getattr(aten, f"_scaled_dot_product_{name}_backward"): _attention_backward_flop
        for name in _ATTENTION
    },
    **dict.fromkeys(
        (aten.mv, aten.addmv, aten.dot, aten._int_mm, aten._grouped_mm, aten._scaled_grouped_mm),
        _product_flop,
    ),
}
CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
# These operators allocate, and write nothing.
_UNINITIALISED = {
    aten.empty,
    aten.empty_strided,
    aten.empty_like,
    aten.new_empty,
    aten.new_empty_strided,
    aten.empty_permuted,
}
# These operators read as much of the first input as they write.
_LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather, aten._unsafe_index}
