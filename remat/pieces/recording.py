"""One forward of a step in pieces: which pieces ran, and on which tensors.

A joined plan belongs to one path, which is the sequence of pieces that a forward ran.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.core.solution import Solution
from remat.pieces.captured_piece import Copied, Piece
from remat.pieces.joined_step import JoinedStep, Place
from remat.pieces.step_meter import StepMeter
from remat.plan.distributed import Agreement
from remat.torch_border.kernels import StorageWeakRef

Path = tuple[Piece, ...]  # the pieces that a forward ran, in order


@dataclass
class JoinedPlan:
    """The plan of one path.

    Attributes:
        step: the joined step.
        solution: its solution.
        numbers: for each run, the number of the halves it uses.
        copies: for each run, the tensors it copies, since code outside of the piece changes them.
        gradient_bytes: reserved for the gradients of earlier steps.
        unplanned_bytes: reserved for what runs between the pieces.
        meter: measures the first step that runs the plan.
        excess: by how much that step exceeded its budget; the ranks agree on it.
        kernels_peak_bytes: the peak of fused kernels, known before they run.
        kernels_room_bytes: how far the plan's budget is below the step's, because kernels hold more
            than planned.
    """

    step: JoinedStep
    solution: Solution
    numbers: tuple[int, ...]
    copies: tuple[Copied, ...]
    gradient_bytes: int
    unplanned_bytes: int
    meter: StepMeter
    excess: Agreement
    kernels_peak_bytes: int | None = None
    kernels_room_bytes: int = 0

    @property
    def allowed_bytes(self) -> int:
        """What the step may hold, including what runs between its pieces."""
        return self.solution.budget_bytes + self.unplanned_bytes + self.kernels_room_bytes


class Session:
    """One forward: which pieces ran, their inputs and their results."""

    def __init__(self, plan: JoinedPlan | None, path: Path) -> None:
        self.plan, self.path = plan, path
        self.has_turned = False  # it left the plan's path after a piece that ran as planned
        self.expects_pieces = True  # False while a forward may end without calling any piece

        self.pieces: list[Piece] = []
        self.numbers: list[int] = []
        self.places: list[tuple[tuple[Place | None, ...], tuple[Place | None, ...]]] = []
        # run, "input" or "result", its index, the tensor, its version
        self.versions: list[tuple[int, str, int, Callable[[], torch.Tensor | None], int]] = []

        self._given: list[tuple[str, int, Callable[[], torch.Tensor | None]]] = []
        # weak references: while they exist, no other storage gets the same address
        self.storages: list[Any] = []
        self._inputs: tuple[Place | None, ...] = ()

    def begin(self, piece: Piece, args: Sequence[Any]) -> int:
        """Notes that a piece begins to run, and returns the number of the halves to run."""
        turn = len(self.pieces)
        if self.plan is not None and (turn >= len(self.path) or self.path[turn] is not piece):
            self.has_turned |= turn > 0  # with other shapes, even the first piece differs
            self.plan = None  # not the last path: the rest runs with the least memory

        number = piece.provisional(args) if self.plan is None else self.plan.numbers[turn]
        self.pieces.append(piece)
        self.numbers.append(number)

        self._given = [
            ("input", place, self._reference(tensor))
            for place, tensor in enumerate(args)
            if _is_watched(tensor)
        ]
        self._inputs = self._places(args)
        return number

    def end(self, results: Sequence[Any]) -> None:
        """Notes the results of the run, and the versions of its inputs and results after it."""
        turn = len(self.pieces) - 1
        made = [
            ("result", place, self._reference(tensor))
            for place, tensor in enumerate(results)
            if _is_watched(tensor)
        ]

        for kind, place, reference in (*self._given, *made):
            tensor = reference()
            if tensor is not None:
                self.versions.append((turn, kind, place, reference, tensor._version))
        self.places.append((self._inputs, self._places(results)))

    def returned(self, tensors: Iterable[Any]) -> None:
        """Notes the versions of the tensors that the caller of the run got.

        They may be other tensors over the memory of the run's results, with their own versions.
        """
        turn, (_, results) = len(self.pieces) - 1, self.places[-1]
        for tensor in filter(_is_watched, tensors):
            storage, reference = tensor.untyped_storage()._cdata, self._reference(tensor)
            self.versions += [
                (turn, "result", place, reference, tensor._version)
                for place, result in enumerate(results)
                if result is not None and result.storage == storage
            ]

    def _reference(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
        return weakref.ref(tensor) if self.plan else lambda: tensor

    def _places(self, tensors: Sequence[Any]) -> tuple[Place | None, ...]:
        found = [
            tensor if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided else None
            for tensor in tensors
        ]
        self.storages += [
            StorageWeakRef(tensor.untyped_storage()) for tensor in found if tensor is not None
        ]
        return tuple(None if tensor is None else Place.of(tensor) for tensor in found)

    def changed(self) -> list[Copied]:
        """Returns, for each run, which of its inputs and results were changed after it."""
        found: list[set[tuple[str, int]]] = [set() for _ in self.pieces]
        for turn, kind, place, reference, version in self.versions:
            tensor = reference()
            first = self.pieces[turn].first
            if (
                tensor is not None
                and tensor._version != version
                and first
                and (kind, place) in first[0]
            ):
                found[turn].add((kind, place))
        return list(map(frozenset, found))


def _is_watched(tensor: Any) -> bool:
    """True for tensors that eager code may change between runs; parameters change between steps."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and not isinstance(tensor, nn.Parameter)
    )
