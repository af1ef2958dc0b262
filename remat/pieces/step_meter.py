"""Measures the peak of a step that runs in pieces.

It measures the forward, each piece's backward, and the backward of each eager operator, including
those of a loss outside of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from remat.core.cuda_peaks import CudaPeaks
from remat.pieces.unplanned_memory import autograd_nodes, tensors_of
from remat.run.cuda_graphs import refuse_first_steps
from remat.run.cuda_mark import CudaMark, of_step
from remat.run.measure import from_events, garbage_left_alone
from remat.torch_border.allocator import (
    is_profiling,
    run_counting_allocations,
    start_counting_allocations,
    stop_counting_allocations,
)
from remat.torch_border.autograd import (
    at_end_of_backward,
    is_compiled_node,
    saved_tensors,
    sequence_number,
)
from remat.torch_border.backwards import (
    is_compiled_autograd_on,
    is_in_backward,
    nodes_behind,
    stop_watching_backwards,
    watch_backwards,
)
from remat.torch_border.kernels import StorageWeakRef
from remat.torch_border.sharded import local_part


@dataclass
class StepMeter:
    """Measures the first planned step of a model that runs in pieces.

    On CUDA, the peak is the allocator's over the whole step. If a step of another plan runs in
    between, there is no peak, since that plan has its own budget, and no later step is measured.

    On the CPU, allocations are counted in the forward, and in the backward of each autograd node,
    eager or compiled. What is held when a node begins is known from weak references to the tensors
    that autograd saved and to the gradients. Sums of gradients that autograd makes between two
    nodes are seen when they reach a node.

    Attributes:
        device: `cpu` or `cuda`.
        resident_bytes: what the step holds throughout; it is added to what is measured.
        peak_bytes: the measured peak of the step; None until forward and backward ran.
        cuda_peaks: the peak on CUDA, counted in three ways.
        num_unmeasured: how many forwards still run before one is measured.
        owner: what all steps of one module have in common.
        is_disturbed: another plan ran during the step, so that it was not measured.
    """

    device: str
    resident_bytes: int
    peak_bytes: int | None = None
    cuda_peaks: CudaPeaks | None = None
    num_unmeasured: int = 0
    owner: object = field(default_factory=object, repr=False)
    is_disturbed: bool = False
    _mark: CudaMark | None = field(default=None, repr=False)  # before the forward, on CUDA
    # "waiting" for a forward; "forward": it was measured; "backward": its backward has begun
    _state: str = field(default="waiting", repr=False)
    _step: int = field(default=0, repr=False)  # which forward is measured
    _peak_bytes: int = field(default=0, repr=False)
    # held at the end of the forward, in storages that are not in `_followed`
    _other_bytes: int = field(default=0, repr=False)
    _followed: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict, repr=False)
    _leaves: list[torch.Tensor] = field(default_factory=list, repr=False)  # they get gradients
    # held when the node that is measured now began; None while no eager node is measured
    _begun_bytes: int | None = field(default=None, repr=False)
    # a node of the forward that is measured, and the number of its last node
    _node: weakref.ref[Any] | None = field(default=None, repr=False)
    _last_number: int = field(default=0, repr=False)

    @property
    def tensor_bytes(self) -> int | None:
        """What tensors held at the peak, as plans count them; on CUDA the blocks are larger.

        It is None before the step was measured, and 0 if it can't be measured.
        """
        if self.is_disturbed:
            return 0
        return self.cuda_peaks.requested_bytes if self.cuda_peaks else self.peak_bytes

    def forward(self, run: Callable[[], Any], inputs: Iterable[Any]) -> Any:
        """Runs a forward, and measures it until one step has been measured.

        Args:
            run: the forward.
            inputs: its arguments; the backward of what made them is not measured.
        """
        if self.peak_bytes is not None or self.is_disturbed or is_profiling():
            return run()
        if self.num_unmeasured:
            refuse_first_steps()
            self.num_unmeasured -= 1
            return run()

        stop_watching_backwards(self._around)
        self._followed.clear()
        self._state, self._step = "forward", self._step + 1
        if self.device == "cuda":
            self._mark = CudaMark.now(self.owner)
            return run()

        with garbage_left_alone():
            result, events = run_counting_allocations(run)
        measured = from_events(events, "cpu")
        self._peak_bytes = measured.peak_bytes
        results = tensors_of(result)
        self._follow(results)

        self._leaves = []
        nodes = list(autograd_nodes(results, inputs))
        self._watch(nodes)
        self._other_bytes = measured.end_bytes - self._followed_bytes()
        self._await_backward(nodes)
        return result

    def _watch(self, nodes: Iterable[Any]) -> None:
        """Follows what nodes saved, and measures their backward."""
        leaves: dict[int, torch.Tensor] = {}
        for node in nodes:
            self._follow(saved_tensors(node))
            leaves |= {
                id(parent.variable): parent.variable
                for parent, _ in node.next_functions
                if hasattr(parent, "variable")
            }

            if not is_compiled_node(node):
                node.register_prehook(partial(self._begin_node, self._step))
                node.register_hook(self._end_node)

        self._leaves += leaves.values()
        self._follow(leaf.grad for leaf in self._leaves)

    def _await_backward(self, nodes: Sequence[Any]) -> None:
        """Watches backwards until the one through `nodes`, which also runs what came after them."""
        node = next(filter(is_compiled_node, nodes), None)
        if node is not None:
            self._last_number = max(map(sequence_number, nodes))
            self._node = weakref.ref(node, lambda _: stop_watching_backwards(self._around))
            watch_backwards(self._around)

    def _around(
        self, roots: Sequence[Any], gradients: Sequence[Any], run: Callable[[], Any]
    ) -> Any:
        """Runs a backward; if it is this step's, what ran after the forward is measured too."""
        if self._state == "forward" and not is_in_backward() and not is_compiled_autograd_on():
            # a method of its own: local variables would keep nodes alive while the backward runs
            self._watch_later(roots, gradients)
        return run()

    def _watch_later(self, roots: Sequence[Any], gradients: Sequence[Any]) -> None:
        node, behind = self._node() if self._node else None, list(nodes_behind(roots))
        if node not in behind:
            return

        stop_watching_backwards(self._around)
        later = [
            other
            for other in behind
            if not hasattr(other, "variable") and sequence_number(other) > self._last_number
        ]
        # a compiled node among them belongs to another plan, which has its own budget
        if not any(map(is_compiled_node, later)):
            self._follow([*roots, *gradients])
            self._watch(later)

    def forget(self) -> None:
        """Drops the measurement of a forward whose backward did not follow."""
        self._state = "waiting"
        stop_watching_backwards(self._around)

    def saved(self, token: torch.Tensor, tensors: Iterable[Any]) -> None:
        """Follows what a piece's forward saves for its backward.

        Args:
            token: a tensor that only this forward saves.
            tensors: what else it saves.
        """
        if self._state == "forward":
            self._follow([token, *(tensors if self.device == "cpu" else ())])

    def backward(
        self,
        run: Callable[[list[Any]], Any],
        args: list[Any],
        num_tangents: int,
        token: torch.Tensor,
    ) -> Any:
        """Runs the backward of a piece, and measures it where its forward was measured.

        Args:
            run: the backward.
            args: what the forward saved, then `num_tangents` gradients that arrive.
            num_tangents: how many gradients arrive.
            token: the tensor that the forward gave to `saved`.
        """
        if self._state == "waiting" or self.peak_bytes is not None or is_profiling():
            return run(args)
        if token.untyped_storage()._cdata not in self._followed:
            self.forget()  # the backward of an earlier forward
            return run(args)

        self._begin_backward()
        if self.device == "cuda":
            return run(args)

        held_bytes = self._held_bytes(args[len(args) - num_tangents :])
        with garbage_left_alone():
            result, events = run_counting_allocations(lambda: run(args))
        self._note(held_bytes, events, result)
        return result

    def _begin_node(self, step: int, gradients: Sequence[Any]) -> None:
        self._begun_bytes = None
        if step != self._step or self._state == "waiting" or is_profiling():
            return
        self._begin_backward()
        self._begun_bytes = self._held_bytes(gradients)
        start_counting_allocations()

    def _end_node(self, made: Sequence[Any], _: Sequence[Any]) -> None:
        if self._begun_bytes is not None:
            self._note(self._begun_bytes, stop_counting_allocations(), made)

    def _begin_backward(self) -> None:
        if self._state == "forward":
            self._state = "backward"
            at_end_of_backward(partial(self._end_backward, self._step))

    def _end_backward(self, step: int) -> None:
        if step != self._step or self._state != "backward":
            return

        if self._mark is not None and self._mark.turn.is_over:
            self.is_disturbed = True
            self.forget()
        elif self._mark is not None:
            self.cuda_peaks = of_step(self._mark.peaks(), self.resident_bytes)
            self.peak_bytes = self.cuda_peaks.allocated_bytes
        else:
            self.peak_bytes = self.resident_bytes + self._peak_bytes

        self._followed.clear()
        self._leaves.clear()

    def _held_bytes(self, gradients: Iterable[Any]) -> int:
        """Returns what is held when a node begins with `gradients` as inputs."""
        self._follow(gradients)
        self._follow(leaf.grad for leaf in self._leaves)
        return self._other_bytes + self._followed_bytes()

    def _note(self, held_bytes: int, events: list[tuple[float, int]], made: Iterable[Any]) -> None:
        self._peak_bytes = max(self._peak_bytes, held_bytes + from_events(events, "cpu").peak_bytes)
        self._follow(made)

    def _follow(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                storage = local_part(tensor).untyped_storage()
                if storage._cdata not in self._followed:
                    self._followed[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def _followed_bytes(self) -> int:
        self._followed = {
            key: entry for key, entry in self._followed.items() if not entry[0].expired()
        }
        return sum(size_bytes for _, size_bytes in self._followed.values())
