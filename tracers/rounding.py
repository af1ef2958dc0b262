"""What rounds otherwise once it is captured, and is refused.

A planned step is the plain one to the bit, or none.

`unsafe_split` gives parts that plain PyTorch writes over in place, where they lie with gaps between
their rows; captured, the same operators write next to each other. CPU kernels compute whole vectors
with other instructions than what is left over at the end of a row (ATen/native/cpu/Loops.h,
`vectorized_inner_loop`, torch 2.13), so `sigmoid` of the two can differ in the last bit.
"""

from __future__ import annotations

import torch
from torch import fx

from remat.core.errors import TraceError

from .storages import tensors_of

_SPLITS = frozenset({
    torch.ops.aten.unsafe_split.Tensor, torch.ops.aten.unsafe_split_with_sizes.default,
    torch.ops.aten.unsafe_chunk.default,
})  # fmt: skip
# two AVX-512 registers: what one turn of a kernel's loop takes; smaller ones divide it
_VECTORS_BYTES = 128


def refuse_uneven_gates(graph: fx.Graph) -> None:
    """Refuses recurrent cells on the CPU whose gates are no whole vectors.

    Where no vector fits at all, both run the scalar code.

    Raises:
        TraceError: with the number of units that would do.
    """
    for node in graph.nodes:
        for part in tensors_of(node) if node.target in _SPLITS else ():
            row_bytes = part.shape[-1] * part.itemsize
            is_uneven = (
                row_bytes % _VECTORS_BYTES and part.numel() * part.itemsize >= _VECTORS_BYTES
            )
            if (
                part.device.type == "cpu"
                and part.is_floating_point()
                and not part.is_contiguous()
                and is_uneven
            ):
                raise TraceError(
                    f"recurrent cells on the CPU have gates of {part.shape[-1]} units, no "
                    "whole vectors: captured, they would round "
                    "otherwise than plain PyTorch does; take a multiple of "
                    f"{_VECTORS_BYTES // part.itemsize} units, or train on a GPU"
                )
