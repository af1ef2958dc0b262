"""Counts the memory that operators take on fake tensors, where nothing is allocated."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from remat.tracers.calls import Call
from remat.tracers.workspace import workspace_bytes


class CountStorages(TorchDispatchMode):
    """Counts the bytes of all storages that operators make, while they live.

    Attributes:
        rounded_to: sizes are rounded up to multiples of it, as the device's allocator does.
        workspace_of: the device type whose operators' workspace counts in the peak; none if empty.
        makes_numbers_up: `tensor.item()` returns some number, which is an error otherwise.
        held_bytes: of storages that live.
        peak_bytes: the most that lived at once.
    """

    def __init__(
        self, rounded_to: int, *, workspace_of: str = "", makes_numbers_up: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounded_to, self.workspace_of = rounded_to, workspace_of
        self.makes_numbers_up = makes_numbers_up
        self.held_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self.makes_numbers_up:
            # the value of `step.item()`: only sizes matter
            return 0.5 if args[0].is_floating_point() else 1
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        if (
            self.workspace_of and func.namespace != "prim"
        ):  # a fake tensor's question for its device
            call = Call.made(func, args, kwargs or {}, result)
            peak_bytes = self.held_bytes + workspace_bytes(call, self.workspace_of)
            self.peak_bytes = max(self.peak_bytes, peak_bytes)
        return result

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Leaves out tensors that were there before."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        size_bytes = -(-storage.nbytes() // self.rounded_to) * self.rounded_to
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._forget, storage._cdata, size_bytes)
        self.held_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _forget(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self.held_bytes -= size_bytes
