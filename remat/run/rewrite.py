"""Turns a schedule into two `torch.fx` graphs: a forward that saves, a backward that recomputes.

Both run the operators in exactly the schedule's order. Views are made again from their storage,
right before the operator that reads them. Values that the backward reads from the forward are saved
as whole storages; parameters and inputs are saved as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_arg

from remat.core.errors import ScheduleError
from remat.core.operators import Phase
from remat.core.schedule import Schedule, lifetimes
from remat.core.validate import validate
from remat.run.random_state import draw, replay, take_state
from remat.torch_border.scalars import is_symbol
from remat.tracers.phases import is_backward_input
from remat.tracers.step_values import is_part
from remat.tracers.traced_step import CPU_GENERATOR_BYTES, TracedStep


@dataclass(frozen=True)
class SplitStep:
    """The rewritten step.

    Attributes:
        forward: takes the joint graph's inputs, returns its forward results, then what is saved.
        backward: takes the numbers among the inputs (AOTAutograd passes them first), what is saved,
            then the gradients that arrive; returns the gradients.
        saved: what is saved, in order: nodes of the joint graph, and values of snapshots. The
            numbers follow them.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[fx.Node | int, ...]


def split(step: TracedStep, schedule: Schedule, *, is_free_order: bool = False) -> SplitStep:
    """Returns the forward and backward graph modules that run `schedule`.

    `is_free_order` allows first computations in another order than the step's, which is correct
    only where no operator is random or changes its inputs.

    Raises:
        ScheduleError: the schedule is not valid for the step's graph.
    """
    violations = validate(step.graph, schedule, is_free_order=is_free_order)
    if violations:
        raise ScheduleError(
            f"the schedule does not fit the step: {violations[0].rule} ({violations[0].detail})"
        )

    plan = _Plan(step, schedule)
    inputs = step.module.graph.find_nodes(op="placeholder")
    results = step.module.graph.output_node().args[0]
    assert isinstance(results, Sequence)

    backward = _Writer(plan, is_forward=False)
    tangents = [node for node in inputs if is_backward_input(node)]
    numbers = [node for node in inputs if is_symbol(node.meta.get("val"))]
    backward.open(numbers, tangents)
    backward.run(schedule.num_forward_steps, len(schedule.steps))
    gradients = [
        backward.read(node) if isinstance(node, fx.Node) else node
        for node in results[step.num_forward_outputs :]
    ]
    saved = tuple(backward.saved)

    forward = _Writer(plan, is_forward=True)
    forward.open([node for node in inputs if not is_backward_input(node)], [])
    forward.run(0, schedule.num_forward_steps)
    outputs = [
        forward.read(node) if isinstance(node, fx.Node) else node
        for node in results[: step.num_forward_outputs]
    ]
    outputs += [forward.hand_over(node) for node in (*saved, *numbers)]

    return SplitStep(
        fx.GraphModule(step.module, forward.close(outputs)),
        fx.GraphModule(step.module, backward.close(gradients)),
        saved,
    )


class _Plan:
    """Facts about the schedule that both halves need."""

    def __init__(self, step: TracedStep, schedule: Schedule) -> None:
        self.step, self.schedule = step, schedule
        steps = schedule.array
        self.is_repeated = np.bincount(steps, minlength=step.graph.num_operators) > 1
        self.is_first = np.zeros(len(steps), np.bool_)
        self.is_first[np.unique(steps, return_index=True)[1]] = True
        lives = lifetimes(step.graph, steps)
        self.dying = set(zip(lives.last.tolist(), lives.value.tolist(), strict=True))

    def is_idle(self, index: int) -> bool:
        """True for a snapshot that no recomputation reads."""
        graph = self.step.graph
        if not graph.operators[index].is_snapshot:
            return False
        return not any(
            self.is_repeated[user]
            for value in graph.operators[index].writes
            for user in graph.users_of[value]
        )


class _Writer:
    """Writes one half: an `fx.Graph` under construction, and the copy of each joint node in it."""

    def __init__(self, plan: _Plan, *, is_forward: bool) -> None:
        self.plan, self.step, self.is_forward = plan, plan.step, is_forward
        self.graph = fx.Graph()
        self.where: dict[fx.Node, fx.Node] = {}
        # value -> views of its latest computation
        self.views_of: dict[int, list[fx.Node]] = {}
        # value of a snapshot or generator state -> its node
        self.snapshot_at: dict[int, fx.Node] = {}
        self.saved: dict[fx.Node | int, fx.Node] = {}
        # the first gradient that arrives: saved inputs come before it
        self.head: fx.Node | None = None

    def open(self, inputs: Sequence[fx.Node], tangents: Sequence[fx.Node]) -> None:
        for node in (*inputs, *tangents):
            self.where[node] = self._placeholder(node.name, node.meta)
        self.head = self.where[tangents[0]] if tangents else None

    def run(self, start: int, stop: int) -> None:
        for position in range(start, stop):
            index = self.plan.schedule.steps[position]
            op = self.step.graph.operators[index]
            if op.target == "tangent" or self.plan.is_idle(index):
                continue

            if op.target in ("snapshot", "generator_state"):
                self._take_snapshot(index)
            else:
                self._compute(position, index)

    def close(self, results: list[Any]) -> fx.Graph:
        self.graph.output(tuple(results))
        self.graph.lint()
        return self.graph

    def _placeholder(self, name: str, meta: dict[str, Any]) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta = dict(meta)
        return node

    def _take_snapshot(self, index: int) -> None:
        op, node = self.step.graph.operators[index], self.step.nodes[index]
        if op.target == "snapshot":
            taken = self.graph.call_function(torch.ops.aten.clone.default, (self.read(node),))
            taken.meta["val"] = node.meta["val"]
        else:
            taken = self.graph.call_function(take_state, (_device_of(node),))
            taken.meta["val"] = _state_of(node)
        self.snapshot_at[op.writes[0]] = taken

    def _snapshot(self, value: int) -> fx.Node:
        if value not in self.snapshot_at:
            self.snapshot_at[value] = self._receive(
                value, self.step.graph.values[value].name, self._snapshot_meta(value)
            )
        return self.snapshot_at[value]

    def _snapshot_meta(self, value: int) -> dict[str, Any]:
        index = self.step.graph.producer[value]
        node = self.step.nodes[index]
        return {
            "val": node.meta["val"]
            if self.step.graph.operators[index].target == "snapshot"
            else _state_of(node)
        }

    def _receive(self, key: Any, name: str, meta: dict[str, Any]) -> fx.Node:
        """Returns an input of the backward for something that the forward saves."""
        assert not self.is_forward, f"the forward reads {name} before it is computed"
        with self.graph.inserting_before(self.head):
            received = self._placeholder(name, meta)
        self.saved[key] = received
        return received

    def hand_over(self, key: Any) -> fx.Node:
        return self._snapshot(key) if isinstance(key, int) else self.read(key)

    def read(self, node: fx.Node) -> fx.Node:
        """Returns the copy of `node` in this half; adds views and inputs for what was saved."""
        if node in self.where:
            return self.where[node]
        if node.op == "get_attr":
            self.where[node] = self.graph.get_attr(str(node.target))
            self.where[node].meta = dict(node.meta)
            return self.where[node]

        if node.op == "placeholder" or not self._is_view(node):
            self.where[node] = self._receive(node, node.name, node.meta)
            return self.where[node]

        made = self.graph.node_copy(node, self.read)
        self.where[node] = made
        if node in self.step.value_of:  # a symbol belongs to no storage
            self.views_of.setdefault(self.step.value_of[node], []).append(node)
        return made

    def _is_view(self, node: fx.Node) -> bool:
        """True for a node that is made again from a storage: no operator, nor a part of one."""
        operators = self.step.operator_of
        return node not in operators and not (is_part(node) and node.args[0] in operators)

    def _compute(self, position: int, index: int) -> None:
        op, node = self.step.graph.operators[index], self.step.nodes[index]
        is_first = bool(self.plan.is_first[position])
        target, args, kwargs = self._call(position, index)
        before = self._replacements(index, is_first)

        def place(argument: fx.Node) -> fx.Node:
            return before[argument] if argument in before else self.read(argument)

        new_args, new_kwargs = map_arg(args, place), map_arg(kwargs, place)
        if index in self.step.generator_states and self.plan.is_repeated[index]:
            state = self._snapshot(self.step.generator_states[index])
            new_args, target = (
                (target, state, _device_of(node), *new_args),
                draw if is_first else replay,
            )

        made = self.graph.call_function(target, new_args, new_kwargs)
        made.meta = dict(node.meta)
        for value in op.writes:
            for view in self.views_of.pop(value, []):
                self.where.pop(view, None)

        self.where[node] = made
        for part in node.users:
            if is_part(part):
                self.where[part] = self.graph.node_copy(part, self.read)

    def _call(self, position: int, index: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Returns the call: in place if it may reuse an input whose last use is here."""
        node = self.step.nodes[index]
        for value in self.step.graph.operators[index].reuses:
            if (position, value) in self.plan.dying:
                form = self.step.in_place[index, value]
                return form.target, form.args, form.kwargs
        return node.target, node.args, dict(node.kwargs)

    def _replacements(self, index: int, is_first: bool) -> dict[fx.Node, fx.Node]:
        """Returns, for inputs that the step changes, the snapshots to read instead.

        The first forward run of an operator reads the inputs themselves.
        """
        op = self.step.graph.operators[index]
        if is_first and op.phase is Phase.FORWARD:
            return {}

        sources = {
            self.step.value_of[source]: value
            for source, value in self.step.snapshots.items()
            if value in op.reads
        }

        found = {}
        for argument in self.step.nodes[index].all_input_nodes:
            resident = self.step.value_of.get(argument)
            if resident in sources:
                found[argument] = self._from_snapshot(argument, self._snapshot(sources[resident]))
        return found

    def _from_snapshot(self, node: fx.Node, snapshot: fx.Node) -> fx.Node:
        if node not in self.step.value_of:
            return self.read(node)  # an index or a size
        if node.op == "placeholder":
            return snapshot
        return self.graph.node_copy(node, lambda source: self._from_snapshot(source, snapshot))


def _device_of(node: fx.Node) -> torch.device:
    value = node.meta["val"]
    tensor = (
        value
        if isinstance(value, torch.Tensor)
        else next(item for item in value if isinstance(item, torch.Tensor))
    )
    return tensor.device


def _state_of(node: fx.Node) -> torch.Tensor:
    return torch.empty(
        CPU_GENERATOR_BYTES if _device_of(node).type == "cpu" else 16,
        dtype=torch.uint8,
        device="meta",
    )
