"""Measures a whole step, including what the loss and other calls hold outside of the plan.

A planned forward waits for the backward of its step. While one waits, backwards are intercepted
(`watch_backwards`): if a backward runs through the forward's node, all that its graph holds is
counted, and the backward is measured, on the CPU node by node. No profiler runs between the calls,
and none after the step was measured. A step with calls of several plans is not measured, since each
plan has its own budget. On a GPU, no other plan may run between forward and backward either.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from remat.run.measure import FirstStepMeter, from_events, garbage_left_alone
from remat.run.measured_forward import (
    MeasuredForward,
    Storages,
    WholeStep,
    note_peak,
    storages_of,
)
from remat.torch_border.allocator import (
    is_profiling,
    no_node_runs,
    start_counting_node,
    stop_counting_node,
)
from remat.torch_border.autograd import sequence_number
from remat.torch_border.backwards import (
    compiled_class,
    held_tensors,
    is_compiled_autograd_on,
    is_in_backward,
    is_parameter,
    nodes_behind,
    stop_watching_backwards,
    watch_backwards,
)

_MOST_PASSES = 64  # backwards of other steps, after which a forward no longer waits for its own


@dataclass(eq=False)
class _Waiting:
    """A planned forward whose backward has not run yet.

    Attributes:
        meter: meter of the planned step.
        forward: the measured forward.
        node: its node in autograd's graph, which is freed with the graph.
        number: sequence number of the node, which rises along forwards.
        owner: identifies the planned call.
        num_passes: number of backwards of other steps since then.
    """

    meter: FirstStepMeter
    forward: MeasuredForward
    node: weakref.ref[Any]
    number: int
    owner: weakref.ref[Any]
    num_passes: int = 0


_LOCK = threading.RLock()  # reentrant: the garbage collector may drop a forward at any time
_WAITING: list[_Waiting] = []
# the class of a compiled node -> the planned call that it belongs to
_OWNERS: weakref.WeakKeyDictionary[type, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def await_backward(
    meters: Iterable[FirstStepMeter],
    results: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor],
    owner: Any,
) -> None:
    """Registers a planned forward that just ran, so that its whole step is measured.

    Args:
        meters: meters of the steps that `owner` has planned; at most one measured the forward.
        results: what the module returned.
        inputs: the module's inputs; the graph that made them is not part of this call.
        owner: identifies the planned call.
    """
    made_inputs = {tensor.grad_fn for tensor in inputs}
    nodes = [
        node for node in nodes_behind(results) if node not in made_inputs and compiled_class(node)
    ]
    node = max(nodes, key=sequence_number, default=None)  # the newest, behind views of its results
    if node is None:
        return

    cls = compiled_class(node)
    assert cls is not None
    _OWNERS[cls] = weakref.ref(owner)

    for meter in meters:
        forward = meter.waiting
        if forward is None or not forward.is_new:
            continue

        forward.is_new = False
        dies = weakref.ref(node, _forget)
        waiting = _Waiting(meter, forward, dies, sequence_number(node), weakref.ref(owner))
        with _LOCK:
            _WAITING.append(waiting)
            watch_backwards(_around)


def note_planned(node: Any, owner: weakref.ref[Any]) -> None:
    """Notes which plan a compiled piece's node belongs to, so that no other plan counts it."""
    cls = compiled_class(node)
    if cls is not None:
        _OWNERS.setdefault(cls, owner)


def _forget(node: weakref.ref[Any]) -> None:
    _drop(lambda waiting: waiting.node is node)


def _drop(is_over: Callable[[_Waiting], bool]) -> None:
    with _LOCK:
        _WAITING[:] = [waiting for waiting in _WAITING if not is_over(waiting)]
        if not _WAITING:
            stop_watching_backwards(_around)


def _around(roots: Sequence[Any], gradients: Sequence[Any], run: Callable[[], Any]) -> Any:
    """Runs a backward, and measures it if a waiting forward is part of its graph."""
    if not _WAITING or is_in_backward() or is_profiling() or is_compiled_autograd_on():
        return run()

    nodes = list(nodes_behind(roots))
    met = _met_by(set(nodes))
    if not met:
        return run()

    try:
        is_disturbed = any(w.forward.span or w.forward.is_disturbed for w in met)
        if is_disturbed or not _is_of_one_plan(nodes, met[0]):
            return run()
        step = _Step(met, nodes, [*roots, *gradients])
        del nodes  # so that nodes are freed as soon as the engine releases them
        return step.run(run)
    finally:
        done = {waiting.meter for waiting in met}
        _drop(
            lambda waiting: (
                waiting in met or (waiting.meter in done and waiting.meter.whole is not None)
            )
        )


def _met_by(nodes: set[Any]) -> list[_Waiting]:
    """Returns the waiting forwards in a backward's graph, in the order in which they ran.

    For each other forward, it counts one more backward of another step.
    """
    with _LOCK:
        met = [waiting for waiting in _WAITING if waiting.node() in nodes]
        for waiting in _WAITING:
            waiting.num_passes += waiting not in met
        _drop(lambda waiting: waiting.num_passes >= _MOST_PASSES)
    return sorted(met, key=lambda waiting: waiting.number)


def _is_of_one_plan(nodes: Iterable[Any], waiting: _Waiting) -> bool:
    classes = [compiled_class(node) for node in nodes]
    owners = {_OWNERS[cls]() for cls in classes if cls is not None and cls in _OWNERS}
    return owners <= {waiting.owner()}


class _Step:
    """The backward of a step with planned forwards."""

    def __init__(self, met: list[_Waiting], nodes: list[Any], roots: list[Any]) -> None:
        self.met, self.nodes = met, nodes
        self.num_before = self._num_backwards()
        self.held = _Held(met, nodes, roots) if met[0].meter.device == "cpu" else None

    def run(self, run: Callable[[], Any]) -> Any:
        """Runs the backward, and passes what the whole step held to the meters."""
        if self.held is None:
            self.nodes.clear()
            result = run()
            torch.cuda.synchronize()
            note_peak()
            first = self.met[0].forward
            peaks, begun_bytes = (first.peak_bytes, first.outside_bytes), first.begun_bytes
            planned_bytes, outside_bytes = (max(0, peak - begun_bytes) for peak in peaks)
        else:
            with self.held.counting(self.nodes), garbage_left_alone():
                result = run()
            planned_bytes, outside_bytes = self.held.planned_bytes, self.held.outside_bytes

        if self._num_backwards() - self.num_before == len(self.met):  # not where it ran plain
            self._is_measured(planned_bytes, outside_bytes)
        return result

    def _num_backwards(self) -> int:
        return sum(meter.num_backwards for meter in {waiting.meter for waiting in self.met})

    def _is_measured(self, planned_bytes: int, outside_bytes: int) -> None:
        resident_bytes = self.met[0].meter.resident_bytes
        saved_bytes = self.met[0].forward.saved_bytes
        whole = WholeStep(
            resident_bytes + planned_bytes,
            resident_bytes + outside_bytes - saved_bytes,
            saved_bytes,
            len(self.met),
        )

        for waiting in self.met:
            waiting.meter.whole = whole


class _Held:
    """What a step holds on the CPU during its backward, without what it holds throughout.

    At first, this is what autograd's graph holds and what the planned forwards returned. Then the
    allocations in each node are counted; weak references show what was freed between two nodes. The
    first forward's parameters and inputs are left out, since the step holds them throughout. So are
    parameters of other modules, and gradients that existed before. What nodes from before the first
    forward saved is subtracted, so that only its release counts.

    Attributes:
        planned_bytes: the most so far in planned forwards, and in their nodes.
        outside_bytes: the most so far at other times.
    """

    def __init__(self, met: list[_Waiting], nodes: list[Any], roots: list[Any]) -> None:
        self._leaves = [node.variable for node in nodes if hasattr(node, "variable")]
        present = [*self._leaves, *(leaf.grad for leaf in self._leaves)]
        self._left_out = storages_of(present) | met[0].forward.args
        self._planned = {waiting.node() for waiting in met}
        self._counted: set[int] = set()  # storages whose release the profiler sees
        self._kept: list[torch.Tensor] = []  # kept alive while a node runs
        self._followed: Storages = {}
        self._births: dict[int, int] = {}  # storage -> number of the first node that holds it

        for forward, number in ((waiting.forward, waiting.number) for waiting in met):
            self._note(forward.args | forward.results, number)
            self._counted |= forward.results.keys()
        for node in nodes:
            if not hasattr(node, "variable"):
                held = [tensor for tensor in held_tensors(node) if not is_parameter(tensor)]
                self._note(storages_of(held), sequence_number(node))

        first = met[0].number
        self._old_bytes = self._bytes_born(0, first)
        self.planned_bytes = max(
            w.forward.peak_bytes + self._bytes_born(first, w.number) for w in met
        )
        self.outside_bytes = self._held_bytes(roots)
        self._begun_bytes = 0  # held when the node that is measured now began

    @contextmanager
    def counting(self, nodes: list[Any]) -> Iterator[None]:
        """Counts what the nodes allocate inside of a `with` block; empties the list of nodes."""
        handles = []
        while nodes:
            node = nodes.pop()
            if not hasattr(node, "variable"):
                # only nodes in Python may release what they saved before they end
                in_python = weakref.ref(node) if isinstance(node, FunctionCtx) else None
                is_planned = node in self._planned
                handles.append(node.register_prehook(partial(self._begin, in_python, is_planned)))
                if not is_planned:
                    handles.append(node.register_hook(self._end))
            del node

        self._planned.clear()
        try:
            yield
            self.outside_bytes = max(self.outside_bytes, self._held_bytes())
        finally:
            for handle in handles:
                handle.remove()
            no_node_runs()

    def _begin(
        self, node: weakref.ref[Any] | None, is_planned: bool, gradients: Sequence[Any]
    ) -> None:
        if is_planned and all(gradient is None for gradient in gradients):
            return  # its backward does not run
        self._begun_bytes = self._held_bytes(gradients)
        # the profiler warns of the release of memory whose allocation it did not see
        found = [*gradients, *(held_tensors(node()) if node is not None else ())]
        self._kept = [tensor for tensor in found if not self._is_counted(tensor)]
        start_counting_node(self._end_planned if is_planned else None)

    def _end_planned(self, made: Sequence[Any]) -> None:
        self.planned_bytes = max(self.planned_bytes, self._ended_bytes(made))

    def _end(self, made: Sequence[Any], _: Sequence[Any]) -> None:
        self.outside_bytes = max(self.outside_bytes, self._ended_bytes(made))

    def _ended_bytes(self, made: Sequence[Any]) -> int:
        """Returns the most that was held during the node that ends."""
        counted = from_events(stop_counting_node(), "cpu")
        self._counted |= storages_of(made).keys()
        self._follow(storages_of(made))
        self._kept = []
        return self._begun_bytes + counted.peak_bytes

    def _is_counted(self, tensor: Any) -> bool:
        return not isinstance(tensor, torch.Tensor) or (
            storages_of([tensor]).keys() <= self._counted
        )

    def _held_bytes(self, arrived: Iterable[Any] = ()) -> int:
        self._follow(storages_of([*arrived, *(leaf.grad for leaf in self._leaves)]))
        self._followed = {
            key: storage for key, storage in self._followed.items() if not storage.is_gone()
        }
        return sum(s.size_bytes for s in self._followed.values()) - self._old_bytes

    def _note(self, storages: Storages, number: int) -> None:
        self._follow(storages)
        for key in storages:
            self._births[key] = min(number, self._births.get(key, number))

    def _follow(self, storages: Storages) -> None:
        for key, storage in storages.items():
            if key not in self._left_out and storage.device == "cpu":
                self._followed.setdefault(key, storage)

    def _bytes_born(self, first: int, last: int) -> int:
        """Returns the bytes still held that nodes from `first` to before `last` held first."""
        return sum(
            storage.size_bytes
            for key, storage in self._followed.items()
            if first <= self._births[key] < last and not storage.is_gone()
        )
