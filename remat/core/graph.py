"""The computation graph: operators in execution order, and the values they read and write.

This module imports neither torch nor a solver.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

from remat.core import limits, serialize
from remat.core.arrays import Arrays
from remat.core.errors import GraphError
from remat.core.limits import shown
from remat.core.operators import Operator, Phase, Value

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Graph:
    """Operators in execution order, and their values; checked when it is built.

    Attributes:
        values: every storage of the step.
        operators: in the order in which the plain step runs them; an operator reads only
            resident values and values written before it.
        outputs: values that must be in memory when the step ends (results, gradients).
        device: the device type that the sizes hold for, `cpu` or `cuda`; empty if unknown.
        costs: the cost model that filled `cost_s`; empty if unknown.
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
                raise GraphError(
                    f"output {shown(value)} is not a value; values are 0..{len(self.values) - 1}"
                )

    def _check_together(self) -> None:
        """Checks totals, and rules that are faster to check for all values at once."""
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
                        f"operator {shown(operator.name)} names value {shown(value)}; values are "
                        f"0..{len(self.values) - 1}"
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
                        f"{shown(self.values[value].name)}, which is resident or already written"
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
            first_backward: the first node of the backward pass, if the graph has one.

        Raises:
            GraphError: the arrays do not describe a DAG in execution order, or a cost or size is
                out of range.

        >>> Graph.from_arrays([1, 1], [8, 8], [(0, 1)]).num_operators
        2
        """
        count = len(cost)
        if len(size) != count:
            raise GraphError(
                f"{count} costs and {len(size)} sizes were given; one of each per node is needed"
            )
        reads = _reads(edges, count)

        boundary = count if first_backward is None else first_backward
        if not 0 <= boundary <= count:
            raise GraphError(
                f"first_backward {shown(boundary)} is not a node; nodes are 0..{count - 1}"
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
        """The number of operators."""
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
        """For each value, the operator that writes it; -1 if it is resident."""
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
        return Arrays.of(self.operators, self.values, self.producer, self.outputs)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of operators, values and sizes, without costs, workspaces and names."""
        digest = hashlib.sha256()
        for value in self.values:
            digest.update(f"{value.size_bytes},{value.kind};".encode())

        text_of = {phase: repr(phase) for phase in Phase}  # repr() of an enum member is slow
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
        """Returns this graph with other costs (and workspaces), one per operator."""
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
            GraphError: the file is not a graph of this version; the message says why in one line.
        """
        return serialize.load(cls, path, GraphError)


def _reads(edges: Iterable[tuple[int, int]], count: int) -> list[set[int]]:
    """Returns the nodes that each of `count` nodes reads."""
    reads: list[set[int]] = [set() for _ in range(count)]
    for u, v in edges:
        if not (0 <= u < count and 0 <= v < count):
            raise GraphError(f"edge ({shown(u)}, {shown(v)}) is outside the nodes 0..{count - 1}")
        if u >= v:
            raise GraphError(
                f"edge ({u}, {v}) goes backwards; nodes must be numbered in execution order (u < v)"
            )
        reads[v].add(u)
    return reads
