"""Builds the graph of a step in pieces from the runs of the pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from remat.core.graph import Graph
from remat.core.operators import Operator, Phase, Value, ValueKind
from remat.pieces.eager_backward import EagerBackward, EagerNode
from remat.pieces.joined_step import (
    JoinedStep,
    Place,
    Run,
    gradients_of,
    inputs_of,
    layout_of,
    results_of,
    tangents_of,
)


def join(
    runs: Sequence[Run],
    results: frozenset[int],
    resident: Mapping[int, Value],
    eager: EagerBackward,
) -> JoinedStep:
    """Returns the graph of a step that ran `runs`.

    Args:
        runs: in the order of the forward.
        results: storages of what the model returned.
        resident: storage -> value of the model's parameters, buffers and inputs.
        eager: the backward of the eager operators between the runs.
    """
    return _Joiner(runs, results, resident, eager).join()


class _Joiner:
    """Builds the joined graph: forwards with the gaps between them, then backwards with theirs."""

    def __init__(
        self,
        runs: Sequence[Run],
        results: frozenset[int],
        resident: Mapping[int, Value],
        eager: EagerBackward,
    ) -> None:
        self.runs, self.results, self.eager = tuple(runs), results, eager
        self.values = list(resident.values())
        self.value_of_storage = {storage: value for value, storage in enumerate(resident)}

        self.operators: list[Operator] = []
        self.origin: dict[int, tuple[int, int]] = {}
        # for each run: value of its piece -> value of the joined graph
        self.value_of: list[dict[int, int]] = [{} for _ in runs]
        self.gap_of: dict[int, int] = {}  # storage made in a gap -> the gap
        self.maker_of: dict[Place, tuple[int, int]] = {}  # -> run, index among its results
        self.handed_over: dict[int, None] = {}  # storages passed between runs

        # gap -> gradients consumed in it: place of the input, value, layout
        self.pending: dict[int, list[tuple[Place, int, tuple[Any, ...]]]] = {}
        self.gradients_of: dict[int, list[int]] = {}  # resident value -> its gradients
        self.outputs: dict[int, None] = {}
        # gradient of an eager operator, as `eager` numbers it -> value
        self.value_of_eager: dict[int, int] = {}

    def join(self) -> JoinedStep:
        for index in range(len(self.runs)):
            self._add_gap(index)
            self._add_forward(index)
        self._add_gap(len(self.runs))
        self._add_holding()
        self._add_outside_gradients()
        self._add_arriving_gradients()

        for index in reversed(range(len(self.runs))):
            self._add_gap_backward(index + 1)
            self._add_backward(index)
        self._add_gap_backward(0)
        self._note_eager_leaves()
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
        """Adds a pinned operator of no cost, in a region of its own."""
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
        """Adds what eager operators make before run `gap`: its new inputs, and what they save."""
        nodes = reversed(self.eager.before(gap))  # in the order of the forward
        made = {storage: size for node in nodes for storage, size in node.saved.items()}
        made |= self._unknown_inputs(gap) if gap < len(self.runs) else self.eager.returned
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
        for node, place in zip(inputs_of(run.step), run.inputs, strict=True):
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
        for node, place in zip(inputs_of(run.step), run.inputs, strict=True):
            if place is None or node not in run.step.value_of:
                continue
            value = run.step.value_of[node]
            if place.storage not in self.value_of_storage:
                self.value_of_storage[place.storage] = self._copy_value(index, value)
            own[value] = self.value_of_storage[place.storage]

        self._add_operators(index, Phase.FORWARD)
        for number, (node, place) in enumerate(zip(results_of(run.step), run.outputs, strict=True)):
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
        """Adds a read of all tensors that runs passed to each other, at the end of the forward.

        Python's frames hold these tensors until the model returns.
        """
        held = [
            v
            for s in self.handed_over
            if not self.values[v := self.value_of_storage[s]].is_resident
        ]
        if held:
            self._add_between("model returns", held, (), phase=Phase.FORWARD)

    def _add_outside_gradients(self) -> None:
        for index, run in enumerate(self.runs):
            for value, place, _ in tangents_of(run):
                if place is not None and place.storage in self.results:
                    made = self._fresh_tangent(index, value)
                    if run.step.graph.values[value].shape == ():
                        # `loss.backward()` itself holds the gradient of 1.0 that it starts from
                        self.outputs[made] = None

    def _fresh_tangent(self, index: int, value: int) -> int:
        made = self.value_of[index][value] = self._copy_value(index, value)
        self._add_between(self.values[made].name, (), [made], phase=Phase.BACKWARD)
        return made

    def _add_arriving_gradients(self) -> None:
        """Adds the gradients of what eager operators returned as the model's results."""
        for gradient, is_scalar in self.eager.arriving.items():
            made = self._eager_gradient(gradient)
            self._add_between(self.values[made].name, (), [made], phase=Phase.BACKWARD)
            if is_scalar:
                self.outputs[made] = None  # held by `loss.backward()`

    def _eager_gradient(self, gradient: int) -> int:
        if gradient not in self.value_of_eager:
            value = Value(f"eager_gradient_{gradient}", self.eager.sizes[gradient])
            self.value_of_eager[gradient] = self._add_value(value)
        return self.value_of_eager[gradient]

    def _add_gap_backward(self, gap: int) -> None:
        """Adds the backward of a gap: eager operators run, gradients are summed and passed on.

        Gradients from the run after the gap are held until the last node that reads one of them;
        those for the run before it are made by the first node that makes one.
        """
        arrived = self.pending.pop(gap, [])
        writes = [] if gap == 0 else self._tangents_of(gap - 1, arrived)
        used = [gradient for _, gradient, _ in arrived]

        nodes = self.eager.before(gap)
        readers = [place for place, node in enumerate(nodes) if node.is_from_run]
        makers = [place for place, node in enumerate(nodes) if node.is_to_run]
        for place, node in enumerate(nodes):
            self._add_node(
                gap,
                node,
                used if readers and place <= readers[-1] else (),
                writes if makers and place == makers[0] else (),
            )

        left, made = () if readers else used, () if makers else writes
        if left or made:
            self._add_between(f"gap{gap}_backward", left, made, phase=Phase.BACKWARD)

    def _add_node(
        self, gap: int, node: EagerNode, used: Sequence[int], writes: Sequence[int]
    ) -> None:
        """Adds the backward of an eager operator, which also reads and writes gradients of runs."""
        saved = [self.value_of_storage[storage] for storage in node.saved]
        takes = [self._eager_gradient(gradient) for gradient in node.takes]
        makes = [self._eager_gradient(gradient) for gradient in node.makes]
        if saved or makes or used or writes:
            self._add_between(
                f"gap{gap}.{node.name}.{len(self.operators)}",
                (*saved, *takes, *used),
                (*makes, *writes),
                phase=Phase.BACKWARD,
            )

    def _note_eager_leaves(self) -> None:
        """Notes the gradients that eager operators make for the model's parameters and inputs."""
        for storage, gradient in self.eager.of_leaves.items():
            value, made = self.value_of_storage.get(storage), self.value_of_eager.get(gradient)
            if value is not None and made is not None and self.values[value].is_resident:
                self.gradients_of.setdefault(value, []).append(made)

    def _tangents_of(
        self, index: int, arrived: list[tuple[Place, int, tuple[Any, ...]]]
    ) -> list[int]:
        """Returns the gradients of run `index` that are made in the gap after it.

        Its other gradients are passed on as a later run returned them.
        """
        fresh = []
        for value, place, layout in tangents_of(self.runs[index]):
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
        # recomputation for the backward's first operator comes after this one, so in its region
        begin = f"{index}.backward"

        self.operators.append(
            Operator(
                begin,
                0.0,
                (),
                (),
                phase=Phase.BACKWARD,
                region=index,
                pinned="it is not a computation",
                target="between",
            )
        )

        self._add_operators(index, Phase.BACKWARD)
        for place, node in zip(run.inputs, gradients_of(run.step), strict=True):
            if place is None or not isinstance(node, fx.Node) or node not in run.step.value_of:
                continue

            gradient = self.value_of[index][run.step.value_of[node]]
            gap = self._gap_of(place)
            if gap < 0:
                self.gradients_of.setdefault(self.value_of_storage[place.storage], []).append(
                    gradient
                )
            else:
                self.pending.setdefault(gap, []).append((place, gradient, layout_of(node)))

    def _gap_of(self, place: Place) -> int:
        """Returns the gap that consumes the gradient of an input; -1 for resident values."""
        if place in self.maker_of:
            return self.maker_of[place][0] + 1
        views = (
            run + 1 for made, (run, _) in self.maker_of.items() if made.storage == place.storage
        )
        return self.gap_of.get(place.storage, next(views, -1))

    def _add_sums(self) -> None:
        """Sums the gradients of each resident value that several runs read.

        All of them are held until the last one is computed.
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
