"""Formulas for the workspace of torch's CUDA operators, each with its source in torch.

They follow from torch's sources; no GPU has confirmed them yet.
"""

from __future__ import annotations

from .calls import Call, TensorSpec, aten
from .retarget import allocated_bytes


def formula_bytes(call: Call) -> int:
    """Returns the workspace on CUDA by formula; 0 where there is no formula."""
    if call.packet is aten._scaled_dot_product_flash_attention_backward:
        return _flash_attention_backward(call)
    return 0


def _flash_attention_backward(call: Call) -> int:
    """flash_attn/flash_api.cpp, `mha_bwd`; cuda/attention_backward.cu, both of FlashAttention 2.

    - `dq_accum`: a gradient of the query in float32, in blocks of 128 rows and 32 columns, or 64
      for heads wider than 128. With deterministic algorithms there are several, one per group of
      multiprocessors; here one counts.
    - `softmax_d`: a sum per row in float32.
    - `dk_expanded`, `dv_expanded`: where heads share keys, a gradient for each head of the query.
    - copies of the output and its gradient that are not contiguous in rows of all heads.
    """
    gradient, query, key = (call.argument(name) for name in ("grad_out", "query", "key"))
    batch, heads, length, width = query.shape
    padded_rows = batch * heads * _rounded(length, 128)
    workspace = 4 * padded_rows * (1 + _rounded(width, 32 if width <= 128 else 64))

    if key.shape[1] != heads:
        expanded = batch * heads * key.shape[2] * width * query.dtype.itemsize
        workspace += 2 * allocated_bytes(int(expanded), "cuda")

    return int(workspace) + sum(map(_copy_bytes, (gradient, call.argument("out"))))


def _copy_bytes(tensor: TensorSpec) -> int:
    """Returns the bytes of a copy in the order batch, length, heads, width, if there is one."""
    is_copied = not tensor.permuted(0, 2, 1, 3).is_contiguous
    return allocated_bytes(tensor.nbytes, "cuda") if is_copied else 0


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
