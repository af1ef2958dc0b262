"""Counts the bytes of storages that operators make on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from remat.tracers.calls import Call


class CountStorages(TorchDispatchMode):
    """Counts the bytes of the storages that operators make and that are alive.

    Attributes:
        rounded_to: sizes are rounded up to its multiples, as the device's allocator does.
        device_type: the device type whose storages count; all of them count if empty.
        workspace_of: call of an operator -> the workspace that counts in the peak.
        makes_numbers_up: `tensor.item()` returns a made-up number; it is an error otherwise.
        held_bytes: the bytes alive now.
        peak_bytes: the most bytes alive at once.
    """

    def __init__(
        self,
        rounded_to: int,
        *,
        device_type: str = "",
        workspace_of: Callable[[Call], int] | None = None,
        makes_numbers_up: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounded_to, self.device_type = rounded_to, device_type
        self.workspace_of, self.makes_numbers_up = workspace_of, makes_numbers_up
        self.held_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self.makes_numbers_up:
            # stands for the value of `step.item()`, which sizes do not depend on, or for the answer
            # of a check, such as whether a tensor has NaNs
            if args[0].dtype is torch.bool:
                return False
            return 0.5 if args[0].is_floating_point() else 1

        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)

        # `prim` is how a fake tensor asks for its device; it takes no workspace
        if self.workspace_of and func.namespace != "prim":
            call = Call.made(func, args, kwargs or {}, result)
            self.peak_bytes = max(self.peak_bytes, self.held_bytes + self.workspace_of(call))
        return result

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Does not count the storages of these tensors."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        is_elsewhere = self.device_type not in ("", tensor.device.type)
        if is_elsewhere or storage._cdata in self._known:
            return
        size_bytes = -(-storage.nbytes() // self.rounded_to) * self.rounded_to
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._forget, storage._cdata, size_bytes)
        self.held_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _forget(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self.held_bytes -= size_bytes
