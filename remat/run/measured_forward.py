"""A planned forward that was measured and waits for its backward, and what a whole step held."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.run.cuda_mark import CudaMark
from remat.torch_border.kernels import StorageWeakRef


@dataclass(frozen=True)
class Storage:
    """A storage that is followed: the reference keeps its address from being given to another one,
    not its memory.
    """

    reference: StorageWeakRef
    size_bytes: int
    device: str

    def is_gone(self) -> bool:
        """True once its memory was released."""
        return bool(self.reference.expired())


Storages = dict[int, Storage]  # by address


def storages_of(tensors: Iterable[Any]) -> Storages:
    """Returns the storages of the dense tensors among these."""
    found: Storages = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            with suppress(NotImplementedError):  # it has none, as within `torch.func`
                storage = tensor.untyped_storage()
                followed = Storage(StorageWeakRef(storage), storage.nbytes(), tensor.device.type)
                found[storage._cdata] = followed
    return found


@dataclass(eq=False)
class MeasuredForward:
    """A forward that was measured, and had no backward yet.

    Attributes:
        args: what it was given.
        mark: on CUDA, what was held when it began.
        peak_bytes: the most it held. On CUDA the most that was allocated while it or its backward
            ran.
        outside_bytes: on CUDA, the most that was allocated since, while neither ran.
        held_bytes: what it left behind.
        saved: what it saved for its backward.
        results: what the model returns of it, and what it saved, but for what it was given.
        returned: the storages that the model returns.
        span: which part of a measurement it is that runs already, which then knows the bytes.
        is_new: nobody asked yet which step it is part of.
    """

    args: Storages
    mark: CudaMark | None = None
    peak_bytes: int = 0
    outside_bytes: int = 0
    held_bytes: int = 0
    saved: Storages = field(default_factory=dict)
    results: Storages = field(default_factory=dict)
    returned: Set[int] = frozenset()
    span: tuple[Any, tuple[str, str]] | None = None
    is_new: bool = True

    def end(self, results: Sequence[Any], num_results: int) -> None:
        """Notes what it returned and saved."""
        self.returned = storages_of(results[:num_results]).keys()
        self.saved = storages_of(results[num_results:])
        self.results = {k: s for k, s in storages_of(results).items() if k not in self.args}

    @property
    def begun_bytes(self) -> int:
        """What was allocated on CUDA when it began."""
        return self.mark.allocated_bytes if self.mark else 0

    @property
    def saved_bytes(self) -> int:
        """Bytes of what it made and saved, and did not return."""
        made = self.saved.keys() & self.results.keys() - self.returned
        return sum(self.saved[key].size_bytes for key in made)


@dataclass(frozen=True)
class WholeStep:
    """A step that was measured from its first planned forward to the end of the backward.

    Attributes:
        planned_bytes: the most it held while a planned forward or backward ran, the module's
            parameters, buffers and inputs included.
        outside_bytes: the most it held otherwise, without what one planned forward saved.
        saved_bytes: what that saved.
        num_calls: how many planned forwards it had.
    """

    planned_bytes: int
    outside_bytes: int
    saved_bytes: int
    num_calls: int

    @property
    def peak_bytes(self) -> int:
        """The most it held."""
        return max(self.planned_bytes, self.outside_bytes + self.saved_bytes)


_ON_CUDA: weakref.WeakSet[MeasuredForward] = weakref.WeakSet()


def keep_peak_for(forward: MeasuredForward) -> None:
    """Notes peaks of CUDA's allocator in a forward from now on."""
    _ON_CUDA.add(forward)


def note_peak(planned: MeasuredForward | None = None) -> None:
    """Notes a new peak of CUDA's allocator in the forwards that wait for their backward.

    Its statistics are reset where a forward begins only, for others read them as well: what is not
    above the peak before is not known, and not needed.

    Args:
        planned: the one that ran since the last time, or whose backward did.
    """
    peak_bytes = torch.cuda.memory_stats().get("allocated_bytes.all.peak", 0)
    for forward in _ON_CUDA:
        if peak_bytes <= max(forward.peak_bytes, forward.outside_bytes):
            continue
        if forward is planned:
            forward.peak_bytes = peak_bytes
        else:
            forward.outside_bytes = peak_bytes
