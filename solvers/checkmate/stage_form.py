"""A graph as the stage models see it: one stage per operator, recomputations first.

A schedule in fixed order falls into *stages*: stage t is everything after the first computation
of operator t - 1, up to and including the first computation of operator t. A schedule is then
described by the values it *keeps* across the start of each stage and the operators it *recomputes*
inside. (Jain et al., "Checkmate", MLSys 2020, section 4.3, frontier-advancing stages.)

This module brings a `Graph` into that form: resident values are taken off the budget, outputs are
read by a last operator without cost (the *sink*), and what can never be useful is ruled out. Bytes
are exact integers; nothing here depends on the MILP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.operators import Phase

MAX_OPERATORS = 2_000  # larger graphs are refused; a round number, not measured


@dataclass(frozen=True)
class StageForm:
    """The normal form: operators 0..n-1, the sink last if there is one; values keep their numbers.

    Attributes:
        num_steps: operators of the graph; `num_operators` is one more where there is a sink.
        reads, writes, reuses: values of each operator, without resident ones.
        users: operators that read each value.
        size_bytes: of each value; 0 for resident values and for snapshots that nothing can need.
        is_snapshot: values that take memory only where a reader is recomputed.
        may_recompute: [t, i]: recomputing i in stage t is allowed and can be useful.
        may_keep: [t, v]: keeping v across the start of stage t can be useful; row n is empty.
        capacity_bytes: the budget less the resident bytes.
    """

    num_steps: int
    cost_s: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    reuses: tuple[tuple[int, ...], ...]
    users: tuple[tuple[int, ...], ...]
    producer: tuple[int, ...]
    size_bytes: tuple[int, ...]
    is_snapshot: tuple[bool, ...]
    may_recompute: NDArray[np.bool_]
    may_keep: NDArray[np.bool_]
    capacity_bytes: int

    @property
    def num_operators(self) -> int:
        """Number of stages: the graph's operators, and the sink where there is one."""
        return len(self.cost_s)

    @property
    def num_values(self) -> int:
        """Number of values, resident ones included."""
        return len(self.size_bytes)

    def working_bytes(self, operator: int) -> int:
        """Returns the least memory in which the operator can run: its reads, writes and workspace.

        Snapshots do not count, and the largest value that it may reuse in place is reused.
        """
        held = sum(
            self.size_bytes[v]
            for v in (*self.reads[operator], *self.writes[operator])
            if not self.is_snapshot[v]
        )
        return held + self.workspace_bytes[operator] - self.reusable_bytes(operator)

    @property
    def fits_every_operator(self) -> bool:
        """False where an operator's working memory exceeds the capacity, so no schedule fits."""
        return self.capacity_bytes >= max(
            (self.working_bytes(i) for i in range(self.num_operators)), default=0
        )

    def reusable_bytes(self, operator: int, candidates: Sequence[int] | None = None) -> int:
        """Returns the size of the largest value that the operator can reuse in place.

        `candidates` limits the choice; None allows all of its reuses.
        """
        return max(
            (
                self.size_bytes[v]
                for v in (self.reuses[operator] if candidates is None else candidates)
            ),
            default=0,
        )

    def num_nonzeros(self) -> int:
        """Returns the approximate number of nonzeros of the stage model."""
        readers = np.array([len(r) for r in self.reads])
        return int(3 * (self.may_recompute @ readers).sum() + 4 * self.may_keep.sum())


def stage_form(graph: Graph, budget_bytes: int) -> StageForm:
    """Returns the normal form of `graph` under a budget. Complexity: O(n^2) set operations.

    Raises:
        SolverError: the graph has more than `MAX_OPERATORS` operators.
    """
    if graph.num_operators > MAX_OPERATORS:
        raise SolverError(
            f"a stage model of {graph.num_operators:,} operators has some "
            f"{graph.num_operators**2:,} columns; "
            f"more than {MAX_OPERATORS:,} operators are too many for a MILP solver; use "
            "solver='auto'"
        )
    resident = {i for i, value in enumerate(graph.values) if value.is_resident}
    outputs = tuple(map(int, graph.arrays.output))
    sink = [()] if outputs else []  # a last operator, which reads what the step returns

    def not_resident(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(v for v in values if v not in resident)

    reads = [*(not_resident(op.reads) for op in graph.operators), *(outputs for _ in sink)]
    writes = [*(op.writes for op in graph.operators), *sink]
    users = _users(reads, len(graph.values))

    may_recompute, may_keep = _useful(_allowed(graph, len(reads)), reads, writes, len(graph.values))
    is_snapshot, is_void = _snapshots(graph, users, may_recompute)
    return StageForm(
        num_steps=graph.num_operators,
        cost_s=(*(op.cost_s for op in graph.operators), *(0.0 for _ in sink)),
        workspace_bytes=(*(op.workspace_bytes for op in graph.operators), *(0 for _ in sink)),
        reads=tuple(reads),
        writes=tuple(writes),
        reuses=(*(not_resident(op.reuses) for op in graph.operators), *sink),
        users=tuple(map(tuple, users)),
        producer=graph.producer,
        size_bytes=tuple(
            0 if v in resident or is_void[v] else value.size_bytes
            for v, value in enumerate(graph.values)
        ),
        is_snapshot=tuple(s and not void for s, void in zip(is_snapshot, is_void, strict=True)),
        may_recompute=may_recompute,
        may_keep=may_keep,
        capacity_bytes=budget_bytes - graph.resident_bytes,
    )


def _users(reads: Sequence[tuple[int, ...]], num_values: int) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in range(num_values)]
    for index, values in enumerate(reads):
        for value in values:
            users[value].append(index)
    return users


def _snapshots(
    graph: Graph, users: Sequence[Sequence[int]], may_recompute: NDArray[np.bool_]
) -> tuple[list[bool], list[bool]]:
    """Returns which values are snapshots, and which of these need no memory.

    A snapshot needs none where its readers can never run again.
    """
    is_snapshot = [
        producer >= 0 and graph.operators[producer].is_snapshot for producer in graph.producer
    ]
    can_repeat = [bool(column.any()) for column in may_recompute.T]
    is_void = [
        is_snapshot[v] and not any(can_repeat[u] for u in users[v])
        for v in range(len(graph.values))
    ]
    return is_snapshot, is_void


def _allowed(graph: Graph, num_stages: int) -> NDArray[np.bool_]:
    """Returns [t, i]: pins and regions allow recomputing operator i in stage t."""
    allowed: NDArray[np.bool_] = np.tril(np.ones((num_stages, num_stages), np.bool_), -1)
    allowed[:, [i for i, op in enumerate(graph.operators) if not op.is_recomputable]] = False

    spans: dict[tuple[int, Phase], tuple[int, int]] = {}
    for index, op in enumerate(graph.operators):
        spans[op.region, op.phase] = (spans.get((op.region, op.phase), (index, index))[0], index)

    if len({region for region, _ in spans}) > 1:
        stage = np.arange(num_stages)
        for index, op in enumerate(graph.operators):
            own = [spans[op.region, phase] for phase in Phase if (op.region, phase) in spans]
            inside = np.array([(first < stage) & (stage <= last) for first, last in own])
            allowed[:, index] &= inside.any(axis=0)
    return allowed


def _useful(
    allowed: NDArray[np.bool_],
    reads: Sequence[tuple[int, ...]],
    writes: Sequence[tuple[int, ...]],
    num_values: int,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns where recomputing and keeping can be useful: something later reads the value.

    Sets of values are bit masks.
    """
    count = len(reads)
    read, written = ([sum(1 << v for v in values) for values in lists] for lists in (reads, writes))
    may_recompute = np.zeros((count, count), np.bool_)
    may_keep = np.zeros((count + 1, num_values), np.bool_)
    wanted = 0

    for stage in range(count - 1, -1, -1):
        wanted = wanted & ~written[stage] | read[stage]
        useful = []
        for operator in np.flatnonzero(allowed[stage])[::-1].tolist():
            if wanted & written[operator]:
                useful.append(operator)
                wanted |= read[operator]

        may_recompute[stage, useful] = True
        packed = np.frombuffer(wanted.to_bytes((num_values + 7) // 8, "little"), np.uint8)
        may_keep[stage] = np.unpackbits(packed, count=num_values, bitorder="little")
    return may_recompute, may_keep
