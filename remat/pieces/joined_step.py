"""A step that `torch.compile` cuts into pieces, as one graph under one budget.

The forward runs pieces 1 to k, the backward k to 1. A piece may run several times in a step (blocks
of one class share their code); each run is a region of the graph, recomputed only in its own
backward. What plain Python and eager operators do between two runs is a *gap*: it is not planned,
but the tensors that pass through it are values of the graph, written and read by pinned operators
of no cost:

- tensors passed from one run to another stay until the end of the forward (Python's frames hold
  them), and as long as a backward reads them;
- what eager operators save for their backward stays until that has run (`eager_backward`), and the
  gradients that they pass to each other are values of the graph;
- a gradient that several runs contribute to, or that eager operators pass on to a run, is a value
  of its own.

Where it is not known whether two tensors share memory, both are counted, so the predicted peak may
be too high.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from remat.core.budget import describe_bytes
from remat.core.graph import Graph
from remat.core.operators import Phase, ValueKind
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.tracers.phases import is_backward_input

_LOG = logging.getLogger(__name__)


class PieceStep(Protocol):
    """A piece as it is planned: its operators, or kernels of several operators."""

    @property
    def graph(self) -> Graph:
        """Its operators and storages."""

    @property
    def module(self) -> fx.GraphModule:
        """The joint graph."""

    @property
    def num_forward_outputs(self) -> int:
        """How many of the joint graph's results belong to the forward."""

    @property
    def value_of(self) -> Mapping[fx.Node, int]:
        """Tensor node -> the value of its storage, where that is in the graph."""


class Place(NamedTuple):
    """Where a tensor lies: its storage, and how it is laid out in it."""

    storage: int
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        """Returns where a strided tensor lies.

        The storage is identified by its address, which is unique while something refers to it.
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
        inputs: where each input of its forward lies; None where it is not a strided tensor.
        outputs: the same for each result of its forward.
    """

    step: PieceStep
    inputs: tuple[Place | None, ...]
    outputs: tuple[Place | None, ...]

    def parameter_gradients(self) -> Iterator[int]:
        """Yields the piece's values that are gradients of parameters."""
        for node, gradient in zip(inputs_of(self.step), gradients_of(self.step), strict=True):
            value = self.step.value_of.get(node)
            is_parameter = (
                value is not None and self.step.graph.values[value].kind is ValueKind.PARAMETER
            )
            if is_parameter and isinstance(gradient, fx.Node) and gradient in self.step.value_of:
                yield self.step.value_of[gradient]


@dataclass(frozen=True)
class JoinedStep:
    """The graph of a step in pieces, and which run each operator belongs to.

    Attributes:
        graph: all runs, one region each.
        runs: in the order of the forward.
        origin: operator -> (run, operator of its piece); operators of gaps have no entry.
        value_of: for each run, value of its piece -> value of `graph`.
    """

    graph: Graph
    runs: tuple[Run, ...]
    origin: Mapping[int, tuple[int, int]]
    value_of: tuple[Mapping[int, int], ...]

    def schedules(self, schedule: Schedule) -> list[Schedule]:
        """Splits a schedule of the whole step into one schedule per run."""
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


def composed(joined: JoinedStep, schedules: Sequence[Schedule]) -> Schedule:
    """Returns the schedule of the whole step, given one schedule per run."""
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


def inputs_of(step: PieceStep) -> list[fx.Node]:
    """Returns the inputs of a piece's forward."""
    return [
        node
        for node in step.module.graph.find_nodes(op="placeholder")
        if not is_backward_input(node)
    ]


def results_of(step: PieceStep) -> Sequence[Any]:
    """Returns the results of a piece's forward."""
    results = step.module.graph.output_node().args[0]
    assert isinstance(results, Sequence)
    return results[: step.num_forward_outputs]


def gradients_of(step: PieceStep) -> Sequence[Any]:
    """Returns the gradient of each input, or None; effect tokens, the first inputs, have none."""
    results = step.module.graph.output_node().args[0]
    assert isinstance(results, Sequence)
    gradients = results[step.num_forward_outputs :]
    return [*[None] * (len(inputs_of(step)) - len(gradients)), *gradients]


def tangents_of(run: Run) -> Iterator[tuple[int, Place | None, tuple[Any, ...]]]:
    """Yields, for each gradient that arrives: its value, the place of its result, its layout."""
    step = run.step
    described = step.module.graph.output_node().meta.get("desc", ())
    places = dict(zip(described, run.outputs, strict=False))

    for node in step.module.graph.find_nodes(op="placeholder"):
        if is_backward_input(node) and node in step.value_of:
            yield (
                step.value_of[node],
                places.get(getattr(node.meta.get("desc"), "output", None)),
                layout_of(node),
            )


def layout_of(node: fx.Node) -> tuple[Any, ...]:
    """Returns shape, strides and dtype of a node's tensor."""
    tensor = node.meta["val"]
    return (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def warn_of_first_step(planned: Solution, first: JoinedStep, schedules: Sequence[Schedule]) -> None:
    """Warns if the step that found the pieces held more than the budget."""
    peak_bytes = simulate(first.graph, composed(first, schedules)).peak_bytes
    if peak_bytes > planned.budget_bytes:
        _LOG.warning(
            "the first step, which found the pieces, held about %s, above the budget of %s; "
            "later steps run planned",
            describe_bytes(peak_bytes),
            describe_bytes(planned.budget_bytes),
        )
