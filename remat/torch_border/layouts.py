"""The dense tensors that tensors of other layouts consist of.

Supported: torch 2.11 to 2.15; private names were checked with the version beside them.
"""

from __future__ import annotations

import torch

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_coo: ("_indices", "_values"),  # 2.13; the public ones need a coalesced tensor
}


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns a dense tensor itself, or the indices and values of a sparse one.

    It is empty for tensors whose memory only a library can reach, such as oneDNN's.
    """
    if tensor.layout is torch.strided:
        return [tensor]
    return [getattr(tensor, name)() for name in _COMPRESSED.get(tensor.layout, ())]
