"""Private names of `torch.distributed`: sharded tensors and modules, DDP, the ranks' store.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import nn


def is_fully_sharded(module: nn.Module) -> bool:
    """True for a module that `fully_shard` was called on (2.13)."""
    library = sys.modules.get("torch.distributed.fsdp")
    return library is not None and isinstance(module, library.FSDPModule)


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a tensor of which each rank has a part (`DTensor`, 2.13)."""
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(tensor, library.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank has of a tensor, all of it where it is not sharded
    (`DTensor._local_tensor`, 2.13).
    """
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def held_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the memory behind a tensor.

    Of a sharded one the largest part that a rank has, so that all ranks agree (`DTensor`, 2.13).
    """
    if not is_sharded(tensor):
        return tensor.untyped_storage().nbytes()
    sizes: list[int] = list(tensor.shape)
    for place, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if placement.is_shard():
            sizes[placement.dim] = -(-sizes[placement.dim] // tensor.device_mesh.size(place))  # type: ignore[attr-defined]
    return math.prod(sizes) * tensor.element_size()


def rank_store(prefix: str) -> Any:
    """Returns the key-value store that all ranks share (`_get_default_store`, 2.13)."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    return PrefixStore(prefix, _get_default_store())


def active_ddp() -> nn.Module | None:
    """Returns the `DistributedDataParallel` whose forward runs now (`_get_active_ddp_module`,
    2.13).
    """
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-any-return]


def is_first_fsdp(module: nn.Module) -> bool:
    """True for `FullyShardedDataParallel`, the first generation (2.13)."""
    library = sys.modules.get("torch.distributed.fsdp")
    return library is not None and isinstance(module, library.FullyShardedDataParallel)
