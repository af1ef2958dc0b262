"""A step that `torch.compile` cuts into pieces, as one graph: one budget over all of them.

The forward runs pieces 1 to k, the backward k to 1. A piece may run several times in a step (blocks
of one class share their code); each run is a region of the graph, recomputed only in its own
backward. What plain Python and eager operators do between two runs is a *gap*: it is not planned,
but the tensors that pass through it are values of the graph, written and read by pinned operators
of no cost:

- what runs hand to each other stays to the end of the forward (Python's frames hold it), and as
  long as a backward reads it;
- what eager operators keep for their own backward stays until that has run;
- a gradient that several runs contribute to, or that eager operators pass on, is a value of its
  own.

Where it is not known whether memory is shared it is counted twice: the predicted peak errs upwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import fx

from remat.core.graph import Graph, Operator, Phase, Value, ValueKind
from remat.core.schedule import Schedule
from remat.tracers.aot import TracedStep
from remat.tracers.phases import is_backward_input


class Place(NamedTuple):
    """Where a tensor lies: its storage, and how it is laid out in it."""

    storage: int
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        """Returns where a strided tensor lies.

        The storage's address tells it from others as long as somebody refers to it.
        """
        layout = (
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.storage_offset(),
            tensor.dtype,
        )
        return cls(tensor.untyped_storage()._cdata, layout)


@dataclass(frozen=True)
class Run:
    """One run of a piece in a step.

    Attributes:
        step: the captured piece.
        inputs: where each input of its forward lies; None for what is no tensor.
        outputs: where each result of its forward lies.
    """

    step: TracedStep
    inputs: tuple[Place | None, ...]
    outputs: tuple[Place | None, ...]

    def parameter_gradients(self) -> Iterator[int]:
        """Yields the values, of the piece, that are gradients of parameters."""
        for node, gradient in zip(_inputs(self.step), _gradients(self.step), strict=True):
            value = self.step.value_of.get(node)
            is_parameter = (
                value is not None and self.step.graph.values[value].kind is ValueKind.PARAMETER
            )
            if is_parameter and isinstance(gradient, fx.Node) and gradient in self.step.value_of:
                yield self.step.value_of[gradient]


@dataclass(frozen=True)
class Kept:
    """A tensor that an eager operator keeps for its backward.

    Attributes:
        gap: between which runs the operator ran: `gap` runs came before it.
        storage: which memory.
        size_bytes: of the memory.
    """

    gap: int
    storage: int
    size_bytes: int


@dataclass(frozen=True)
class JoinedStep:
    """The graph of a step in pieces, and which run each operator belongs to.

    Attributes:
        graph: all runs, one region each.
        runs: in the order of the forward.
        origin: operator -> (run, operator of its piece); operators of gaps have none.
        value_of: for each run, value of its piece -> value here.
    """

    graph: Graph
    runs: tuple[Run, ...]
    origin: Mapping[int, tuple[int, int]]
    value_of: tuple[Mapping[int, int], ...]

    def schedules(self, schedule: Schedule) -> list[Schedule]:
        """Returns the schedule of each run's own piece."""
        forward: list[list[int]] = [[] for _ in self.runs]
        backward = [
            [i for i, op in enumerate(run.step.graph.operators) if op.target == "tangent"]
            for run in self.runs
        ]
        for position, index in enumerate(schedule.steps):
            if index in self.origin:
                run, own = self.origin[index]
                (forward if position < schedule.num_forward_steps else backward)[run].append(own)
        return [
            Schedule((*first, *second), len(first))
            for first, second in zip(forward, backward, strict=True)
        ]


def join(
    runs: Sequence[Run],
    results: frozenset[int],
    resident: Mapping[int, Value],
    kept: Sequence[Kept],
) -> JoinedStep:
    """Returns the graph of a step that ran `runs`.

    Args:
        runs: in the order of the forward.
        results: storages of what the model returned.
        resident: storage -> value of the model's parameters, buffers and inputs.
        kept: what eager operators between the runs keep for their backward.
    """
    return _Joiner(runs, results, resident, kept).join()


def composed(joined: JoinedStep, schedules: Sequence[Schedule]) -> Schedule:
    """Returns the schedule of the whole step whose runs follow `schedules`, one each."""
    index_of = {place: index for index, place in joined.origin.items()}
    steps: list[int] = []
    mark = 0
    for (region, phase), group in groupby(
        enumerate(joined.graph.operators), key=lambda item: (item[1].region, item[1].phase)
    ):
        if region < len(joined.runs):
            own, first = schedules[region].steps, schedules[region].num_forward_steps
            half = own[:first] if phase is Phase.FORWARD else own[first:]
            steps += [index_of[region, number] for number in half if (region, number) in index_of]
        else:
            steps += [index for index, _ in group]
        mark = len(steps) if phase is Phase.FORWARD else mark
    return Schedule(tuple(steps), mark)


class _Joiner:
    """Appends run after run: the forwards and their gaps, then the backwards and theirs."""

    def __init__(
        self,
        runs: Sequence[Run],
        results: frozenset[int],
        resident: Mapping[int, Value],
        kept: Sequence[Kept],
    ) -> None:
        self.runs, self.results, self.kept = tuple(runs), results, kept
        self.values = list(resident.values())
        self.value_of_storage = {storage: value for value, storage in enumerate(resident)}
        self.operators: list[Operator] = []
        self.origin: dict[int, tuple[int, int]] = {}
        # of each run: value of its piece -> value here
        self.value_of: list[dict[int, int]] = [{} for _ in runs]
        self.gap_of: dict[int, int] = {}  # storage made in a gap -> the gap
        self.maker_of: dict[Place, tuple[int, int]] = {}  # -> run and place among its results
        self.handed_over: dict[int, None] = {}
        # gap -> gradients consumed in it
        self.pending: dict[int, list[tuple[Place, int, tuple[Any, ...]]]] = {}
        self.gradients_of: dict[int, list[int]] = {}  # resident value -> its gradients
        self.outputs: dict[int, None] = {}

    def join(self) -> JoinedStep:
        for index in range(len(self.runs)):
            self._add_gap(index)
            self._add_forward(index)
        self._add_gap(len(self.runs))
        self._add_holding()
        self._add_outside_gradients()
        for index in reversed(range(len(self.runs))):
            self._add_gap_backward(index + 1)
            self._add_backward(index)
        self._add_gap_backward(0)
        self._add_sums()
        self.outputs |= dict.fromkeys(
            self.value_of_storage[s] for s in self.results if s in self.value_of_storage
        )
        kept = tuple(sorted(v for v in self.outputs if not self.values[v].is_resident))
        first = self.runs[0].step.graph
        graph = Graph(
            tuple(self.values), tuple(self.operators), kept, device=first.device, costs=first.costs
        )
        return JoinedStep(graph, self.runs, self.origin, tuple(self.value_of))

    def _add_value(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _add_between(
        self, name: str, reads: Sequence[int], writes: Sequence[int], *, phase: Phase
    ) -> None:
        """A pinned operator of no cost, in a region of its own."""
        pinned = "it runs between compiled pieces, and is not planned"
        region = len(self.runs) + len(self.operators)
        own = tuple(dict.fromkeys(v for v in reads if v not in writes))
        self.operators.append(
            Operator(
                name,
                0.0,
                own,
                tuple(writes),
                phase=phase,
                region=region,
                pinned=pinned,
                target="between",
            )
        )

    def _add_gap(self, gap: int) -> None:
        """What eager operators make before run `gap`: what it reads, and what they keep."""
        made = {kept.storage: kept.size_bytes for kept in self.kept if kept.gap == gap}
        if gap < len(self.runs):
            made |= self._unknown_inputs(gap)
        made = {
            storage: size for storage, size in made.items() if storage not in self.value_of_storage
        }
        for storage, size_bytes in made.items():
            self.value_of_storage[storage] = self._add_value(
                Value(f"gap{gap}_{len(self.values)}", size_bytes)
            )
            self.gap_of[storage] = gap
        if made:
            self._add_between(
                f"gap{gap}", (), [self.value_of_storage[s] for s in made], phase=Phase.FORWARD
            )

    def _unknown_inputs(self, index: int) -> dict[int, int]:
        run, unknown = self.runs[index], {}
        for node, place in zip(_inputs(run.step), run.inputs, strict=True):
            value = (
                run.step.graph.values[run.step.value_of[node]]
                if place and node in run.step.value_of
                else None
            )
            if place and value and value.kind is ValueKind.INPUT:
                unknown[place.storage] = value.size_bytes
                self.handed_over[place.storage] = None
        return unknown

    def _add_forward(self, index: int) -> None:
        run, own = self.runs[index], self.value_of[index]
        for node, place in zip(_inputs(run.step), run.inputs, strict=True):
            if place is None or node not in run.step.value_of:
                continue
            value = run.step.value_of[node]
            if place.storage not in self.value_of_storage:
                self.value_of_storage[place.storage] = self._copy_value(index, value)
            own[value] = self.value_of_storage[place.storage]
        self._add_operators(index, Phase.FORWARD)
        for number, (node, place) in enumerate(zip(_results(run.step), run.outputs, strict=True)):
            if place is not None and isinstance(node, fx.Node) and node in run.step.value_of:
                self.value_of_storage.setdefault(place.storage, own[run.step.value_of[node]])
                self.maker_of[place] = (index, number)
                self.handed_over[place.storage] = None

    def _copy_value(self, index: int, value: int) -> int:
        made = self.runs[index].step.graph.values[value]
        return self._add_value(replace(made, name=f"{index}.{made.name}"))

    def _add_operators(self, index: int, phase: Phase) -> None:
        step, own = self.runs[index].step, self.value_of[index]
        leaves = set(step.graph.outputs)
        for number, op in enumerate(step.graph.operators):
            if op.phase is not phase or op.target == "tangent":
                continue
            for value in (*op.reads, *op.writes):
                if value not in own:
                    own[value] = self._copy_value(index, value)
            self.origin[len(self.operators)] = (index, number)
            self.operators.append(
                replace(
                    op,
                    name=f"{index}.{op.name}",
                    reads=tuple(dict.fromkeys(own[v] for v in op.reads)),
                    writes=tuple(own[v] for v in op.writes),
                    reuses=tuple(own[v] for v in op.reuses if v not in leaves),
                    region=index,
                )
            )

    def _add_holding(self) -> None:
        """Python's frames hold what runs hand to each other until the model returns."""
        held = [
            v
            for s in self.handed_over
            if not self.values[v := self.value_of_storage[s]].is_resident
        ]
        if held:
            self._add_between("model returns", held, (), phase=Phase.FORWARD)

    def _add_outside_gradients(self) -> None:
        for index, run in enumerate(self.runs):
            for value, place, _ in _tangents(run):
                if place is not None and place.storage in self.results:
                    made = self._fresh_tangent(index, value)
                    if run.step.graph.values[value].shape == ():
                        # `loss.backward()` itself holds the 1.0 it starts from
                        self.outputs[made] = None

    def _fresh_tangent(self, index: int, value: int) -> int:
        made = self.value_of[index][value] = self._copy_value(index, value)
        self._add_between(self.values[made].name, (), [made], phase=Phase.BACKWARD)
        return made

    def _add_gap_backward(self, gap: int) -> None:
        """Between two backwards.

        Eager operators run theirs, and gradients are summed and passed on.
        """
        arrived = self.pending.pop(gap, [])
        used = [self.value_of_storage[kept.storage] for kept in self.kept if kept.gap == gap]
        writes = [] if gap == 0 else self._tangents_of(gap - 1, arrived)
        used += [gradient for _, gradient, _ in arrived]
        if writes or used:
            self._add_between(f"gap{gap}_backward", used, writes, phase=Phase.BACKWARD)

    def _tangents_of(
        self, index: int, arrived: list[tuple[Place, int, tuple[Any, ...]]]
    ) -> list[int]:
        """Returns the fresh gradients that run `index` is given.

        The others are gradients that later runs returned.
        """
        fresh = []
        for value, place, layout in _tangents(self.runs[index]):
            if value in self.value_of[index]:
                continue  # it came from outside
            sources = [(made, gradient) for at, gradient, made in arrived if at == place]
            if len(sources) == 1 and sources[0][0] == layout:
                self.value_of[index][value] = sources[0][1]
            else:
                self.value_of[index][value] = self._copy_value(index, value)
                fresh.append(self.value_of[index][value])
        return fresh

    def _add_backward(self, index: int) -> None:
        run = self.runs[index]
        # what is recomputed for the first operator comes after it, and so within the region
        begin = f"{index}.backward"
        self.operators.append(
            Operator(
                begin,
                0.0,
                (),
                (),
                phase=Phase.BACKWARD,
                region=index,
                pinned="it is no computation",
                target="between",
            )
        )
        self._add_operators(index, Phase.BACKWARD)
        for place, node in zip(run.inputs, _gradients(run.step), strict=True):
            if place is None or not isinstance(node, fx.Node) or node not in run.step.value_of:
                continue
            gradient = self.value_of[index][run.step.value_of[node]]
            gap = self._gap_of(place)
            if gap < 0:
                self.gradients_of.setdefault(self.value_of_storage[place.storage], []).append(
                    gradient
                )
            else:
                self.pending.setdefault(gap, []).append((place, gradient, _layout(node)))

    def _gap_of(self, place: Place) -> int:
        """The gap in which the gradient of an input is consumed.

        -1 for parameters and the model's inputs.
        """
        if place in self.maker_of:
            return self.maker_of[place][0] + 1
        views = (
            run + 1 for made, (run, _) in self.maker_of.items() if made.storage == place.storage
        )
        return self.gap_of.get(place.storage, next(views, -1))

    def _add_sums(self) -> None:
        """A parameter that several runs read.

        Its gradients are held until all are there, then summed.
        """
        for value, gradients in self.gradients_of.items():
            several = list(dict.fromkeys(gradients))
            if len(several) > 1:
                total = self._add_value(
                    replace(self.values[several[0]], name=f"{self.values[value].name}_gradient")
                )
                self._add_between(self.values[total].name, several, [total], phase=Phase.BACKWARD)
                several = [total]
            self.outputs[several[0]] = None


def _inputs(step: TracedStep) -> list[fx.Node]:
    return [
        node
        for node in step.module.graph.find_nodes(op="placeholder")
        if not is_backward_input(node)
    ]


def _results(step: TracedStep) -> Sequence[Any]:
    results = step.module.graph.output_node().args[0]
    assert isinstance(results, Sequence)
    return results[: step.num_forward_outputs]


def _gradients(step: TracedStep) -> Sequence[Any]:
    """Returns one for each input; the orders of effects, which come first, have none."""
    results = step.module.graph.output_node().args[0]
    assert isinstance(results, Sequence)
    gradients = results[step.num_forward_outputs :]
    return [*[None] * (len(_inputs(step)) - len(gradients)), *gradients]


def _tangents(run: Run) -> Iterator[tuple[int, Place | None, tuple[Any, ...]]]:
    """Yields each gradient that arrives.

    Its value, where the result lies that it belongs to, and its layout.
    """
    step = run.step
    described = step.module.graph.output_node().meta.get("desc", ())
    places = dict(zip(described, run.outputs, strict=False))
    for node in step.module.graph.find_nodes(op="placeholder"):
        if is_backward_input(node) and node in step.value_of:
            yield (
                step.value_of[node],
                places.get(getattr(node.meta.get("desc"), "output", None)),
                _layout(node),
            )


def _layout(node: fx.Node) -> tuple[Any, ...]:
    tensor = node.meta["val"]
    return (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
