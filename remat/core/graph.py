"""The computation graph: operators in execution order, and the storages they read and write.

A *value* is a storage. A view belongs to its base and is no value of its own; an operator with
several outputs writes several values, which are freed one by one. *Resident* values (parameters,
buffers, inputs) hold their memory from beginning to end and have no operator that writes them.

This module knows neither torch nor a solver.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remat.core import limits, serialize
from remat.core.errors import GraphError
from remat.core.limits import shown

FORMAT_VERSION = 1


class Phase(StrEnum):
    """The half of a training step that an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


class ValueKind(StrEnum):
    """What a value is. Every kind but `INTERMEDIATE` is resident."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    INTERMEDIATE = "intermediate"


@dataclass(frozen=True, slots=True)
class Value:
    """A storage: `size_bytes` of memory, and what a report says about it."""

    name: str
    size_bytes: int
    kind: ValueKind = ValueKind.INTERMEDIATE
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def __post_init__(self) -> None:
        if fault := limits.size_fault(self.size_bytes):
            raise GraphError(f"value {shown(self.name)} has {fault}")

    @property
    def is_resident(self) -> bool:
        """True where the value holds its memory for the whole step."""
        return self.kind is not ValueKind.INTERMEDIATE


@dataclass(frozen=True, slots=True)
class Operator:
    """One computation.

    Attributes:
        name: unique in its graph.
        cost_s: time of computing it once, in seconds (or in the unit of the instance).
        reads: indices of the values it needs in memory, without repetition.
        writes: indices of the values it produces, one storage each.
        workspace_bytes: memory it holds while it runs, beyond what it reads and writes.
        phase: forward or backward.
        region: the compiled piece it belongs to; it is computed again only in the piece's
            own forward or backward.
        pinned: why it must never be computed again; empty where it may be.
        reuses: values among `reads` whose memory the one output may take over when the
            value is not needed after this computation (the operator then works in place).
        is_snapshot: its values exist for later recomputations only (the state of a random
            generator, a buffer before it is changed). They take memory only where a reader
            is computed more than once.
        target: the operator that runs, `aten.mm.default`.
        module: the module it comes from, `blocks.0.attn`.
        source: the line of code it comes from, `model.py:31`.
    """

    name: str
    cost_s: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    workspace_bytes: int = 0
    phase: Phase = Phase.FORWARD
    region: int = 0
    pinned: str = ""
    reuses: tuple[int, ...] = ()
    is_snapshot: bool = False
    target: str = ""
    module: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        fault = (
            limits.cost_fault(self.cost_s)
            or limits.size_fault(self.workspace_bytes).replace("the size", "the workspace", 1)
            or (limits.index_fault(self.region) and f"the region {limits.index_fault(self.region)}")
        )
        if fault:
            raise GraphError(f"operator {shown(self.name)} has {fault}")
        if len(set(self.reads)) != len(self.reads) or len(set(self.writes)) != len(self.writes):
            raise GraphError(f"operator {shown(self.name)} names a value twice")
        if not set(self.reuses) <= set(self.reads):
            raise GraphError(f"operator {shown(self.name)} reuses a value that it does not read")
        if self.reuses and len(self.writes) != 1:
            raise GraphError(
                f"operator {shown(self.name)} works in place and writes {len(self.writes)} values; "
                "one is needed"
            )

    @property
    def is_recomputable(self) -> bool:
        """True where the operator may be computed more than once."""
        return not self.pinned


@dataclass(frozen=True)
class Arrays:
    """A graph as arrays, for hot loops. Lists of lists are in CSR form: `*_start` and `*`.

    Resident values do not occur in `read`: they are always there.
    """

    cost_s: NDArray[np.float64]
    size_bytes: NDArray[np.int64]
    workspace_bytes: NDArray[np.int64]
    producer: NDArray[np.int64]  # value -> operator, -1 where resident
    write_rank: NDArray[np.int64]  # value -> its place among its operator's writes
    read_start: NDArray[np.int64]
    read: NDArray[np.int64]
    write_start: NDArray[np.int64]
    write: NDArray[np.int64]
    reuse_start: NDArray[np.int64]
    reuse: NDArray[np.int64]
    is_pinned: NDArray[np.bool_]
    is_backward: NDArray[np.bool_]
    is_snapshot: NDArray[np.bool_]
    output: NDArray[np.int64]  # values that outlive the graph and are not resident


@dataclass(frozen=True)
class Graph:
    """Operators in execution order over values, checked when it is built.

    Attributes:
        values: every storage of the step.
        operators: in the order in which the plain step runs them; an operator reads only
            resident values and values written before it.
        outputs: values that must be in memory when the step ends (results, gradients).
        device: the device type the sizes were taken for, `cpu` or `cuda`; empty if unknown.
        costs: the cost model that filled `cost_s`, for the report.
    """

    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    outputs: tuple[int, ...] = ()
    device: str = ""
    costs: str = ""
    version: int = field(default=FORMAT_VERSION)

    def __post_init__(self) -> None:
        if self.version != FORMAT_VERSION:
            raise GraphError(
                f"this graph has format version {shown(self.version)}; this remat reads "
                f"version {FORMAT_VERSION}"
            )
        self._check_operators()
        self._check_together()
        for value in self.outputs:
            if not 0 <= value < len(self.values):
                raise GraphError(f"output {shown(value)} is no value of 0..{len(self.values) - 1}")

    def _check_together(self) -> None:
        """Checks what is cheaper for all values and operators at once, or only holds for all."""
        workspace = max((op.workspace_bytes for op in self.operators), default=0)
        total = sum(value.size_bytes for value in self.values) + workspace
        if total > limits.MOST_BYTES:
            raise GraphError(
                f"sizes and the largest workspace add up to {shown(total)}, and at most "
                f"{limits.MOST_BYTES:,} (2**53 - 1) can be counted exactly; use a larger unit"
            )
        dimensions = chain.from_iterable(value.shape for value in self.values)
        if fault := next(filter(None, map(limits.size_fault, set(dimensions))), ""):
            raise GraphError(f"a value's shape has {fault}")

        texts = [self.device, self.costs]
        for value in self.values:
            texts += (value.name, value.dtype)
        for op in self.operators:
            texts += (op.name, op.pinned, op.target, op.module, op.source)
        if fault := limits.texts_fault(texts):
            raise GraphError(f"the graph has {fault}")

    def _check_operators(self) -> None:
        if len({operator.name for operator in self.operators}) != len(self.operators):
            raise GraphError("two operators have the same name")
        is_written = [value.is_resident for value in self.values]
        for operator in self.operators:
            for value in (*operator.reads, *operator.writes):
                if not 0 <= value < len(self.values):
                    raise GraphError(
                        f"operator {shown(operator.name)} names value {shown(value)}, which is "
                        f"none of 0..{len(self.values) - 1}"
                    )
            for value in operator.reads:
                if not is_written[value]:
                    raise GraphError(
                        f"operator {shown(operator.name)} reads "
                        f"{shown(self.values[value].name)} before it is written"
                    )
            for value in operator.writes:
                if is_written[value]:
                    raise GraphError(
                        f"operator {shown(operator.name)} writes "
                        f"{shown(self.values[value].name)}, which is resident or written before"
                    )
                is_written[value] = True
        if not all(is_written):
            raise GraphError(
                f"value {shown(self.values[is_written.index(False)].name)} is neither resident nor "
                "written by an operator"
            )

    @classmethod
    def from_arrays(
        cls,
        cost: Sequence[float],
        size: Sequence[int],
        edges: Iterable[tuple[int, int]],
        *,
        first_backward: int | None = None,
    ) -> Graph:
        """Returns the graph of a plain DAG.

        Node i costs `cost[i]` and writes one value of `size[i]`.

        Args:
            cost: time of each node, in any unit.
            size: bytes (or any other unit) of each node's output.
            edges: pairs `(u, v)` with `u < v`: v reads the output of u.
            first_backward: the first node of the backward pass, where the graph has one.

        Raises:
            GraphError: the arrays do not describe a DAG in execution order.

        >>> Graph.from_arrays([1, 1], [8, 8], [(0, 1)]).num_operators
        2
        """
        count = len(cost)
        if len(size) != count:
            raise GraphError(
                f"{count} costs and {len(size)} sizes were given; one of each a node is needed"
            )
        reads: list[set[int]] = [set() for _ in range(count)]
        for u, v in edges:
            if not (0 <= u < count and 0 <= v < count):
                raise GraphError(f"edge ({shown(u)}, {shown(v)}) leaves the nodes 0..{count - 1}")
            if u >= v:
                raise GraphError(
                    f"edge ({u}, {v}) goes backwards; nodes must be numbered in execution "
                    "order (u < v)"
                )
            reads[v].add(u)
        boundary = count if first_backward is None else first_backward
        if not 0 <= boundary <= count:
            raise GraphError(
                f"first_backward {shown(boundary)} is none of the nodes 0..{count - 1}"
            )
        for node in range(count):
            if fault := limits.cost_fault(cost[node]) or limits.size_fault(size[node]):
                raise GraphError(f"node {node} has {fault}")
        return cls(
            values=tuple(Value(str(i), int(size[i])) for i in range(count)),
            operators=tuple(
                Operator(
                    str(i),
                    float(cost[i]),
                    tuple(sorted(reads[i])),
                    (i,),
                    phase=Phase.FORWARD if i < boundary else Phase.BACKWARD,
                )
                for i in range(count)
            ),
        )

    @property
    def num_operators(self) -> int:
        """Returns the number of operators."""
        return len(self.operators)

    @cached_property
    def cost_s(self) -> float:
        """Cost of computing every operator once: the cost of keeping everything."""
        return math.fsum(operator.cost_s for operator in self.operators)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes that parameters, buffers and inputs hold for the whole step."""
        return sum(value.size_bytes for value in self.values if value.is_resident)

    @cached_property
    def num_forward(self) -> int:
        """Number of operators up to and including the last one of the forward pass."""
        return max(
            (i + 1 for i, op in enumerate(self.operators) if op.phase is Phase.FORWARD), default=0
        )

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """For each value, the operator that writes it; -1 where it is resident."""
        producer = [-1] * len(self.values)
        for index, operator in enumerate(self.operators):
            for value in operator.writes:
                producer[value] = index
        return tuple(producer)

    @cached_property
    def parents_of(self) -> tuple[tuple[int, ...], ...]:
        """For each operator, the operators whose values it reads, in order and once each."""
        producer = self.producer
        return tuple(tuple(sorted({producer[v] for v in op.reads} - {-1})) for op in self.operators)

    @cached_property
    def users_of(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the operators that read it, in order."""
        users: list[list[int]] = [[] for _ in self.values]
        for index, operator in enumerate(self.operators):
            for value in operator.reads:
                users[value].append(index)
        return tuple(map(tuple, users))

    @cached_property
    def arrays(self) -> Arrays:
        """The graph as arrays, for hot loops."""
        read_start, read = _csr(
            [[v for v in op.reads if not self.values[v].is_resident] for op in self.operators]
        )
        write_start, write = _csr([list(op.writes) for op in self.operators])
        reuse_start, reuse = _csr(
            [[v for v in op.reuses if not self.values[v].is_resident] for op in self.operators]
        )
        write_rank = np.zeros(len(self.values), np.int64)
        write_rank[write] = np.arange(len(write)) - np.repeat(
            write_start[:-1], np.diff(write_start)
        )
        return Arrays(
            cost_s=np.array([op.cost_s for op in self.operators], np.float64),
            size_bytes=np.array([value.size_bytes for value in self.values], np.int64),
            workspace_bytes=np.array([op.workspace_bytes for op in self.operators], np.int64),
            producer=np.array(self.producer, np.int64),
            write_rank=write_rank,
            read_start=read_start,
            read=read,
            write_start=write_start,
            write=write,
            reuse_start=reuse_start,
            reuse=reuse,
            is_pinned=np.array([not op.is_recomputable for op in self.operators], np.bool_),
            is_backward=np.array([op.phase is Phase.BACKWARD for op in self.operators], np.bool_),
            is_snapshot=np.array([op.is_snapshot for op in self.operators], np.bool_),
            output=np.array([v for v in self.outputs if not self.values[v].is_resident], np.int64),
        )

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what a schedule depends on.

        Operators, values and their sizes, not costs or names.
        """
        digest = hashlib.sha256()
        for value in self.values:
            digest.update(f"{value.size_bytes},{value.kind};".encode())
        text_of = {phase: repr(phase) for phase in Phase}  # an enum's own takes most of the time
        for op in self.operators:
            digest.update(
                f"({op.target!r}, {op.reads!r}, {op.writes!r}, {text_of[op.phase]}, {op.region!r}, "
                f"{op.pinned!r}, {op.reuses!r}, {op.is_snapshot!r})".encode()
            )
        digest.update(repr(self.outputs).encode())
        return digest.hexdigest()[:32]

    def with_costs(
        self,
        cost_s: Sequence[float],
        workspace_bytes: Sequence[int] | None = None,
        *,
        costs: str = "",
    ) -> Graph:
        """Returns this graph with other costs (and workspaces), one an operator."""
        workspace = (
            [op.workspace_bytes for op in self.operators]
            if workspace_bytes is None
            else workspace_bytes
        )
        operators = tuple(
            replace(op, cost_s=float(c), workspace_bytes=int(w))
            for op, c, w in zip(self.operators, cost_s, workspace, strict=True)
        )
        return replace(self, operators=operators, costs=costs or self.costs)

    def save(self, path: str | Path) -> None:
        """Writes the graph as JSON, whole or not at all."""
        serialize.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """Reads a graph that `save` wrote.

        Raises:
            GraphError: the file is not a graph of this version; one line says why.
        """
        return serialize.load(cls, path, GraphError)


def _csr(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    start = np.zeros(len(rows) + 1, np.int64)
    start[1:] = np.cumsum([len(row) for row in rows])
    flat: list[Any] = [item for row in rows for item in row]
    return start, np.array(flat, np.int64)
