"""Which fake tensors share memory, even after cleaning has replaced nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


class Storages:
    """Keys of storages: fake tensors of one traced graph share memory if their keys are equal."""

    def __init__(self) -> None:
        self._merged: dict[int, int] = {}

    def key(self, value: Any) -> int | None:
        """Returns the key of a fake tensor's storage; None for anything else."""
        if not isinstance(value, torch.Tensor):
            return None
        key: int = value.untyped_storage()._cdata
        while key in self._merged:
            key = self._merged[key]
        return key

    def of(self, node: fx.Node) -> int | None:
        """Returns the key of a node's tensor; None where it has none or several."""
        return self.key(node.meta.get("val"))

    def merge(self, gone: fx.Node, kept: fx.Node) -> None:
        """Notes that `gone` was replaced by `kept`, so that their storages are the same."""
        for old, new in zip(tensors_of(gone), tensors_of(kept), strict=True):
            old_key, new_key = self.key(old), self.key(new)
            if old_key is not None and new_key is not None and old_key != new_key:
                self._merged[old_key] = new_key


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Returns the tensors that a node returns."""
    value = node.meta.get("val")
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]
