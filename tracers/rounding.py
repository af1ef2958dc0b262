"""Refuses recurrent cells that would round differently once captured.

A planned step gives the same bits as the plain one, or is refused. Plain PyTorch overwrites the
parts of an `unsafe_split` in place, with gaps between their rows; the captured operators write to
contiguous memory. CPU kernels compute whole vectors with other instructions than the rest at the
end of a row (ATen/native/cpu/Loops.h, `vectorized_inner_loop`, torch 2.13), so the last bit of a
`sigmoid` can differ between the plain and the captured step.
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
# Two AVX-512 registers, which one pass of a kernel's loop computes. Smaller vectors divide it.
_VECTORS_BYTES = 128


def refuse_uneven_gates(graph: fx.Graph) -> None:
    """Refuses recurrent cells on the CPU whose gates are not a whole number of vectors.

    Gates smaller than one vector are accepted, since both steps run scalar code for them.

    Raises:
        TraceError: the number of units is not a multiple of the number that the message gives.
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
                    f"recurrent cells on the CPU have gates of {part.shape[-1]} units, not a whole "
                    "number of vectors: captured, they would round differently from plain "
                    f"PyTorch; use a multiple of {_VECTORS_BYTES // part.itemsize} units, or train "
                    "on a GPU"
                )
