"""A traced step as Inductor runs it.

Elementwise operators are part of what reads them, and their values never exist.

Inductor fuses an elementwise operator into the elementwise operators and reductions that read it.
Here an operator whose readers all end up in one kernel is joined to it: an operator of the fused
graph is a kernel, reads what all its members read, and writes what its last one writes. Its cost is
that of the memory it moves, at the seconds a byte that its members take one by one.

Inductor fuses more than that (a value with two readers, a reduction with what follows it), and
frees memory in an order of its own: peaks predicted here err upwards as a rule, and the measured
one decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch._ops import OpOverload

from remat.core.graph import Graph, Operator, Value
from remat.core.schedule import Schedule
from remat.tracers.aot import TracedStep
from remat.tracers.recomputable import is_random

aten = torch.ops.aten
# by name: Inductor's own operators are there once it is imported, which takes seconds
_GENERATED = frozenset(
    {
        "prims.convert_element_type.default",
        "prims.inductor_random.default",
        "prims.inductor_lookup_seed.default",
    }
)
_REDUCTIONS = frozenset({
    aten.sum, aten.mean, aten.var_mean, aten.var, aten.amax, aten.amin, aten.prod, aten.any,
    aten.all, aten.argmax, aten.argmin,
})  # fmt: skip


@dataclass(frozen=True)
class FusedStep:
    """A step whose operators are kernels.

    Attributes:
        graph: kernels and the values that exist.
        step: the step operator by operator; nothing works in place, and nothing random is computed
            again.
        members: the operators of each kernel, in order.
    """

    graph: Graph
    step: TracedStep
    members: tuple[tuple[int, ...], ...]

    def unfused(self, schedule: Schedule) -> Schedule:
        """Returns the schedule of operators that a schedule of kernels is."""
        mark = schedule.num_forward_steps
        forward = [index for kernel in schedule.steps[:mark] for index in self.members[kernel]]
        backward = [index for kernel in schedule.steps[mark:] for index in self.members[kernel]]
        return Schedule((*forward, *backward), len(forward))


def fuse(step: TracedStep) -> FusedStep:
    """Returns the kernels of a step; O(E)."""
    step = _functional(step)
    kernel_of = _kernels(step)
    members: dict[int, list[int]] = {}
    for index, kernel in enumerate(kernel_of):
        members.setdefault(kernel, []).append(index)
    order = sorted(members)
    graph = step.graph
    inside = {
        v
        for kernel in order
        for i in members[kernel]
        if i != kernel
        for v in graph.operators[i].writes
    }
    kept = [v for v in range(len(graph.values)) if v not in inside]
    place = {value: number for number, value in enumerate(kept)}
    fused = Graph(
        values=tuple(graph.values[v] for v in kept),
        operators=tuple(_kernel(graph, members[kernel], place) for kernel in order),
        outputs=tuple(place[v] for v in graph.outputs),
        device=graph.device,
        costs=graph.costs,
    )
    return FusedStep(fused, step, tuple(tuple(members[kernel]) for kernel in order))


def _functional(step: TracedStep) -> TracedStep:
    """The step without operators that work in place.

    Random ones, which hand out seeds, run once.
    """
    operators = []
    for index, op in enumerate(step.graph.operators):
        pinned = op.pinned or (
            "it draws random numbers: seeds are saved" if index in step.generator_states else ""
        )
        operators.append(replace(op, reuses=(), pinned=pinned))
    return replace(step, graph=replace(step.graph, operators=tuple(operators)), in_place={})


def _kernels(step: TracedStep) -> list[int]:
    """For each operator, the last operator of its kernel: itself, or that of all its readers."""
    graph = step.graph
    kernel_of = list(range(graph.num_operators))
    mutated = set(step.snapshots.values()) | {step.value_of[node] for node in step.snapshots}
    for index in reversed(range(graph.num_operators)):
        op = graph.operators[index]
        if (
            op.pinned
            or len(op.writes) != 1
            or not _is_generated(step, index)
            or mutated & set(op.reads)
        ):
            continue
        value = op.writes[0]
        readers = graph.users_of[value]
        kernels = {kernel_of[reader] for reader in readers}
        if len(kernels) != 1 or value in graph.outputs:
            continue
        if all(_is_joined_to(step, op, reader) for reader in readers):
            kernel_of[index] = kernels.pop()
    return kernel_of


def _is_generated(step: TracedStep, index: int) -> bool:
    """True for an operator whose loop Inductor writes itself, element by element."""
    target = step.nodes[index].target
    if not isinstance(target, OpOverload) or step.graph.operators[index].target in (
        "tangent",
        "snapshot",
        "generator_state",
    ):
        return False
    return (torch.Tag.pointwise in target.tags or str(target) in _GENERATED) and not is_random(
        step.nodes[index]
    )


def _is_joined_to(step: TracedStep, op: Operator, reader: int) -> bool:
    user, target = step.graph.operators[reader], step.nodes[reader].target
    is_reduction = isinstance(target, OpOverload) and target.overloadpacket in _REDUCTIONS
    return user.phase is op.phase and (is_reduction or _is_generated(step, reader))


def _kernel(graph: Graph, members: Sequence[int], place: dict[int, int]) -> Operator:
    last = graph.operators[members[-1]]
    reads = tuple(
        dict.fromkeys(place[v] for i in members for v in graph.operators[i].reads if v in place)
    )
    if len(members) == 1:
        return replace(last, reads=reads, writes=tuple(place[v] for v in last.writes))
    operators = [graph.operators[i] for i in members]
    moved = _moved_bytes(
        graph.values, {v for op in operators for v in op.reads if v in place} | set(last.writes)
    )
    one_by_one = sum(_moved_bytes(graph.values, {*op.reads, *op.writes}) for op in operators)
    cost_s = sum(op.cost_s for op in operators) * moved / max(one_by_one, 1)
    workspace_bytes = max(op.workspace_bytes for op in operators)
    return replace(
        last,
        reads=reads,
        writes=tuple(place[v] for v in last.writes),
        cost_s=cost_s,
        workspace_bytes=workspace_bytes,
    )


def _moved_bytes(values: Sequence[Value], indices: set[int]) -> int:
    return sum(values[v].size_bytes for v in indices)
