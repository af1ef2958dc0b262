"""A planned forward that was measured and waits for its backward; the result for a whole step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.core.cuda_peaks import CudaPeaks
from remat.run.cuda_mark import CudaMark
from remat.torch_border.kernels import StorageWeakRef


@dataclass(frozen=True)
class Storage:
    """A storage that is followed by a weak reference.

    While the reference exists, no other storage gets its address; its memory may be released.
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
            with suppress(NotImplementedError):  # inside of `torch.func` tensors have no storage
                storage = tensor.untyped_storage()
                followed = Storage(StorageWeakRef(storage), storage.nbytes(), tensor.device.type)
                found[storage._cdata] = followed
    return found


@dataclass(eq=False)
class MeasuredForward:
    """A forward that was measured, and whose backward has not run yet.

    Attributes:
        args: storages of its inputs.
        mark: on CUDA, what was held when it began.
        cuda_peaks: on CUDA, its own peaks.
        cuda_held: on CUDA, the requested and allocated bytes that it held at its end.
        peak_bytes: its peak. On CUDA, the most that tensors held while it or its backward ran.
        outside_bytes: on CUDA, the most that tensors held since then, while neither ran.
        held_bytes: what it held at its end.
        saved: storages that it saved for its backward.
        results: storages that it returned or saved, without those of its inputs.
        returned: the storages that the model returns.
        span: inside of `measure`, which part of that measurement it is.
        is_new: it is not registered yet as part of a whole step.
    """

    args: Storages
    mark: CudaMark | None = None
    cuda_peaks: CudaPeaks | None = None
    cuda_held: tuple[int, int] = (0, 0)
    peak_bytes: int = 0
    outside_bytes: int = 0
    held_bytes: int = 0
    saved: Storages = field(default_factory=dict)
    results: Storages = field(default_factory=dict)
    returned: Set[int] = frozenset()
    span: tuple[Any, tuple[str, str]] | None = None
    is_new: bool = True

    def end(self, results: Sequence[Any], num_results: int) -> None:
        """Notes the forward's results: those that the model returns, then those that are saved."""
        self.returned = storages_of(results[:num_results]).keys()
        self.saved = storages_of(results[num_results:])
        self.results = {k: s for k, s in storages_of(results).items() if k not in self.args}

    @property
    def is_disturbed(self) -> bool:
        """True if a step of another plan ran on the GPU since it began."""
        return self.mark is not None and self.mark.turn.is_over

    @property
    def begun_bytes(self) -> int:
        """What tensors held on CUDA when it began."""
        return self.mark.requested_bytes if self.mark else 0

    @property
    def saved_bytes(self) -> int:
        """Bytes that it made and saved, without those that it returned."""
        made = self.saved.keys() & self.results.keys() - self.returned
        return sum(self.saved[key].size_bytes for key in made)


@dataclass(frozen=True)
class WholeStep:
    """A step that was measured from its first planned forward to the end of the backward.

    Attributes:
        planned_bytes: the most it held while a planned forward or backward ran, including the
            module's parameters, buffers and inputs.
        outside_bytes: the most it held at other times, without `saved_bytes`.
        saved_bytes: what the first planned forward saved.
        num_calls: number of planned forwards in the step.
    """

    planned_bytes: int
    outside_bytes: int
    saved_bytes: int
    num_calls: int

    @property
    def peak_bytes(self) -> int:
        """The most that the step held."""
        return max(self.planned_bytes, self.outside_bytes + self.saved_bytes)


_ON_CUDA: weakref.WeakSet[MeasuredForward] = weakref.WeakSet()


def keep_peak_for(forward: MeasuredForward) -> None:
    """Makes `note_peak` note peaks of CUDA's allocator in this forward from now on."""
    _ON_CUDA.add(forward)


def note_peak(planned: MeasuredForward | None = None) -> None:
    """Notes a new peak of CUDA's allocator in the forwards that wait for their backward.

    The sizes of tensors are counted, as plans count them, and not the blocks that hold them. It is
    called before each half of a measured step, which resets the allocator's statistics.

    Args:
        planned: the forward that ran, or whose backward ran, since the last call.
    """
    peak_bytes = torch.cuda.memory_stats().get("requested_bytes.all.peak", 0)
    for forward in _ON_CUDA:
        if peak_bytes <= max(forward.peak_bytes, forward.outside_bytes):
            continue
        if forward is planned:
            forward.peak_bytes = peak_bytes
        else:
            forward.outside_bytes = peak_bytes
