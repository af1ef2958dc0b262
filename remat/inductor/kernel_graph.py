"""A traced step as Inductor runs it.

Elementwise operators are part of the kernels that read them, and their results are never stored.

Inductor fuses an elementwise operator into the elementwise operators and reductions that read it.
Here an operator whose readers all end up in one kernel joins that kernel. An operator of the fused
graph is a kernel: it reads what its members read, and writes what its last member writes. Its cost
is that of moving this memory, at the seconds per byte of its members run one by one, plus that of
drawing random numbers.

A value with several readers becomes part of each of them if its sources are not larger than the
value, so that this costs no memory. It is then not saved for the backward: the kernels that read it
there compute it again (on a GPU the hyperbolic tangent of a GELU, the exponentials of a softmax).

Inductor fuses more than that (a reduction with what follows it), frees memory in its own order, and
pads matrix products on a GPU. So the peaks predicted here are near those of the kernels, above or
below them; only the compiled kernels tell the actual peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from remat.core.graph import Graph
from remat.core.operators import Operator, Phase, Value
from remat.core.schedule import Schedule
from remat.inductor.byte_masks import is_stored_mask
from remat.tracers.recomputable import is_random
from remat.tracers.traced_step import TracedStep

aten = torch.ops.aten
# by name: Inductor's own operators exist only once it is imported, which takes seconds
_RANDOM = "prims.inductor_random.default"
_GENERATED = frozenset({
    "prims.convert_element_type.default", _RANDOM, "prims.inductor_lookup_seed.default",
    "aten.constant_pad_nd.default",  # pads matrix products on a GPU
})  # fmt: skip
REDUCTIONS = frozenset({
    aten.sum, aten.mean, aten.var_mean, aten.var, aten.amax, aten.amin, aten.prod, aten.any,
    aten.all, aten.argmax, aten.argmin,
})  # fmt: skip
_INLINING = frozenset({aten.gather})  # compute the elements they read, at indices of their own

# On a CPU, Inductor stores the results of these if they have several readers in one half, as
# computing them again takes longer than reading them.
_SLOW_ON_CPU = frozenset({
    aten.exp, aten.log, aten.log10, aten.log1p, aten.log2, aten.sigmoid, aten.tanh,
})  # fmt: skip
_MOST_INLINED = 30  # operators; Inductor stores the result of a loop that computes more
# bytes of a value's sources over its own: one tensor of its size, and some statistics and masks
_SLACK = 1.125


@dataclass(frozen=True)
class FusedStep:
    """A step whose operators are kernels.

    Attributes:
        graph: kernels, and the values that they store.
        step: the step, operator by operator; no operator works in place, and no random one is
            recomputed.
        members: the operators of each kernel, in order. An operator may be in several kernels.
        value_of: tensor node -> the value of its storage, where that is in the graph.
    """

    graph: Graph
    step: TracedStep
    members: tuple[tuple[int, ...], ...]
    value_of: dict[fx.Node, int]

    @property
    def module(self) -> fx.GraphModule:
        """The cleaned joint graph."""
        return self.step.module

    @property
    def num_forward_outputs(self) -> int:
        """How many of the joint graph's results belong to the forward."""
        return self.step.num_forward_outputs

    def unfused(self, schedule: Schedule) -> Schedule:
        """Returns a schedule of kernels as a schedule of operators.

        It leaves out a computation if nothing reads its results before it is repeated. A plan has
        such computations where it computes a gradient, frees it for a while and computes it again.
        Inductor would leave out the computation only: values that it alone reads would still be
        saved, and held to the end.
        """
        mark = schedule.num_forward_steps
        is_used = _used_computations(self.graph, schedule)
        forward, backward = (
            [
                index
                for position in positions
                if is_used[position]
                for index in self.members[schedule.steps[position]]
            ]
            for positions in (range(mark), range(mark, len(schedule.steps)))
        )

        operators = self.step.graph.operators
        # only the backward computes these; a schedule's forward lists every forward operator, and
        # Inductor drops them
        idle = {
            index
            for index in set(backward) - set(forward)
            if operators[index].phase is Phase.FORWARD
        }

        return Schedule((*forward, *sorted(idle), *backward), len(forward) + len(idle))


def _used_computations(graph: Graph, schedule: Schedule) -> list[bool]:
    """Returns, for each step, whether it is its operator's last one or its results are read.

    O(E) for E reads of all steps.
    """
    needed, seen = set(graph.outputs), set[int]()
    is_used = []
    for index in reversed(schedule.steps):
        op = graph.operators[index]
        is_used.append(index not in seen or not needed.isdisjoint(op.writes))
        seen.add(index)
        if is_used[-1]:
            needed -= set(op.writes)
            needed.update(op.reads)
    return is_used[::-1]


def fuse(step: TracedStep) -> FusedStep:
    """Returns the kernels of a step; O(E)."""
    step = _functional(step)
    graph = step.graph
    inlined = _inlined(step)

    members: dict[int, set[int]] = {}
    for index, kernel in enumerate(_kernels(step, inlined)):
        if index not in inlined:
            read = {graph.producer[v] for v in graph.operators[index].reads}
            chains = (inlined[producer] for producer in read & inlined.keys())
            members.setdefault(kernel, set()).update({index}, *chains)

    order = sorted(members)
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
        operators=tuple(_kernel(graph, sorted(members[kernel]), place) for kernel in order),
        outputs=tuple(place[v] for v in graph.outputs),
        device=graph.device,
        costs=graph.costs,
    )

    return FusedStep(
        fused,
        step,
        tuple(tuple(sorted(members[kernel])) for kernel in order),
        {node: place[value] for node, value in step.value_of.items() if value in place},
    )


def _functional(step: TracedStep) -> TracedStep:
    """Returns the step without in-place operators.

    Random operators, which hand out seeds, run once.
    """
    operators = []
    for index, op in enumerate(step.graph.operators):
        pinned = op.pinned or (
            "it draws random numbers: seeds are saved" if index in step.generator_states else ""
        )
        operators.append(replace(op, reuses=(), pinned=pinned))
    return replace(step, graph=replace(step.graph, operators=tuple(operators)), in_place={})


def _inlined(step: TracedStep) -> dict[int, frozenset[int]]:
    """Returns the operators that are inlined into each of their readers.

    Each is mapped to all inlined operators that its result is computed from, itself included.
    """
    graph = step.graph
    chains: dict[int, frozenset[int]] = {}
    sources: dict[int, frozenset[int]] = {}  # stored values that each is made from
    for index in _candidates(step):
        op = graph.operators[index]
        readers = graph.users_of[op.writes[0]]
        node = step.nodes[index]
        if str(node.target) == _RANDOM or is_stored_mask(node) or not readers:
            continue
        if not all(_inlines(step, reader) for reader in readers):
            continue

        read = {value: graph.producer[value] for value in op.reads}
        chain = frozenset({index}).union(*(chains[p] for p in read.values() if p in chains))
        made_of = frozenset(v for v, producer in read.items() if producer not in chains).union(
            *(sources[p] for p in read.values() if p in chains)
        )
        is_slow = graph.device == "cpu" and any(_is_of(step, i, _SLOW_ON_CPU) for i in chain)
        in_backward = sum(graph.operators[reader].phase is Phase.BACKWARD for reader in readers)
        is_reused = max(in_backward, len(readers) - in_backward) > 1
        if is_slow and is_reused:
            continue

        held = sum(graph.values[v].size_bytes for v in made_of if not graph.values[v].is_resident)
        own = graph.values[op.writes[0]].size_bytes
        if len(chain) <= _MOST_INLINED and held <= _SLACK * own:
            chains[index], sources[index] = chain, made_of
    return chains


def _candidates(step: TracedStep) -> list[int]:
    """Returns elementwise operators whose results need no storage, if their readers allow it."""
    graph = step.graph
    mutated = set(step.snapshots.values()) | {step.value_of[node] for node in step.snapshots}
    outputs = set(graph.outputs)

    return [
        index
        for index, op in enumerate(graph.operators)
        if not op.pinned
        and len(op.writes) == 1
        and op.writes[0] not in outputs
        and _is_generated(step, index)
        and not mutated & set(op.reads)
    ]


def _kernels(step: TracedStep, inlined: Mapping[int, Set[int]]) -> list[int]:
    """Returns, for each operator, the last operator of its kernel.

    That is the operator itself, or the last operator of the kernel that all its readers are in.
    """
    graph = step.graph
    kernel_of = list(range(graph.num_operators))
    readers_of: dict[int, set[int]] = {}  # an inlined reader is replaced by its own readers
    for index in reversed(range(graph.num_operators)):
        readers = {reader for v in graph.operators[index].writes for reader in graph.users_of[v]}
        through = (readers_of[reader] for reader in readers & inlined.keys())
        readers_of[index] = (readers - inlined.keys()).union(*through)

    for index in reversed(_candidates(step)):
        kernels = {kernel_of[reader] for reader in readers_of[index]}
        op = graph.operators[index]
        if len(kernels) == 1 and all(_is_joined_to(step, op, r) for r in readers_of[index]):
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
    return step.graph.operators[reader].phase is op.phase and (
        _is_of(step, reader, REDUCTIONS) or _is_generated(step, reader)
    )


def _inlines(step: TracedStep, reader: int) -> bool:
    """True for an operator that computes what it reads element by element."""
    return _is_of(step, reader, REDUCTIONS | _INLINING) or _is_generated(step, reader)


def _is_of(step: TracedStep, index: int, packets: Set[Any]) -> bool:
    target = step.nodes[index].target
    return isinstance(target, OpOverload) and target.overloadpacket in packets


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

    others = [op for op in operators if op.target != _RANDOM]
    one_by_one = sum(_moved_bytes(graph.values, {*op.reads, *op.writes}) for op in others)
    cost_s = sum(op.cost_s for op in others) * min(1.0, moved / max(one_by_one, 1))
    # drawing numbers takes longer than moving them
    cost_s += sum(op.cost_s for op in operators if op.target == _RANDOM)

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
