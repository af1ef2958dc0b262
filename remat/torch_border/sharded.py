"""Private names of `torch.distributed`: sharded tensors and modules, DDP, the ranks' store.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree


def is_fully_sharded(module: nn.Module) -> bool:
    """True for a module that `fully_shard` was called on (2.13)."""
    library = sys.modules.get("torch.distributed.fsdp")
    return library is not None and isinstance(module, library.FSDPModule)


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a tensor of which each rank has a part (`DTensor`, 2.13)."""
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(tensor, library.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, or all of a tensor that is not sharded.

    It uses `DTensor._local_tensor` (2.13).
    """
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def largest_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of the largest part of any rank, so that all ranks agree (2.13).

    For a tensor that is not sharded it is its own shape.
    """
    shape = list(tensor.shape)
    placements = tensor.placements if is_sharded(tensor) else ()  # type: ignore[attr-defined]
    for place, placement in enumerate(placements):
        if placement.is_shard():
            num_parts = tensor.device_mesh.size(place)  # type: ignore[attr-defined]
            shape[placement.dim] = -(-shape[placement.dim] // num_parts)
    return tuple(shape)


def held_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of the storage of a tensor; if it is sharded, of the largest part."""
    if not is_sharded(tensor):
        return tensor.untyped_storage().nbytes()
    return math.prod(largest_shape(tensor)) * tensor.element_size()


def rank_store(prefix: str) -> Any:
    """Returns the key-value store that all ranks share (`_get_default_store`, 2.13)."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    return PrefixStore(prefix, _get_default_store())


def active_ddps() -> list[nn.Module]:
    """Returns each `DistributedDataParallel` running its forward or wrapping a step function.

    It uses `_get_active_ddp_module` (2.13).
    """
    inner = DistributedDataParallel._get_active_ddp_module()
    found = {id(ddp): ddp for ddp in (*_AROUND_STEPS, inner) if ddp is not None}
    return list(found.values())


_AROUND_STEPS: list[nn.Module] = []


def ddps_in(module: nn.Module) -> list[DistributedDataParallel]:
    """Returns the `DistributedDataParallel` modules inside of a module."""
    return [part for part in module.modules() if isinstance(part, DistributedDataParallel)]


@contextmanager
def called_directly(ddps: list[DistributedDataParallel]) -> Iterator[None]:
    """Makes each DDP call its module directly, so that dynamo captures it with the code around."""
    for ddp in ddps:
        vars(ddp)["forward"] = MethodType(_forward_alone, ddp)
    try:
        yield
    finally:
        for ddp in ddps:
            vars(ddp).pop("forward", None)


def _forward_alone(ddp: Any, /, *args: Any, **kwargs: Any) -> Any:
    if ddp.device_ids:  # DDP moves its inputs to its device
        device = torch.device(ddp.device_type, ddp.device_ids[0])
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), (args, kwargs))
    return ddp.module(*args, **kwargs)


def inside_ddp(ddp: Any, run: Callable[[], Any]) -> Any:
    """Does around `run()` what DDP does around its module's forward.

    It sends buffers and prepares to reduce gradients (`_pre_forward` and `_post_forward`, 2.13).
    """
    ddp._pre_forward(None)
    _AROUND_STEPS.append(ddp)
    try:
        with ddp._inside_ddp_forward():
            result = run()
    finally:
        _AROUND_STEPS.remove(ddp)
    return ddp._post_forward(result)


def is_first_fsdp(module: nn.Module) -> bool:
    """True for `FullyShardedDataParallel`, the first generation (2.13)."""
    library = sys.modules.get("torch.distributed.fsdp")
    return library is not None and isinstance(module, library.FullyShardedDataParallel)
