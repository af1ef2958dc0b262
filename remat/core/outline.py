"""What differs between a graph and the one that a plan was made for.

A plan names its graph by a fingerprint, which only says whether two graphs are the same. Its
outline has a number for each operator, made of one-byte digests of what it computes, how large its
results are, which values it reads, which it overwrites, whether it may be recomputed, and whether
its results outlive the step.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence, Set

from remat.core.graph import Graph
from remat.core.operators import Operator

_OF_INPUTS = (
    "there are more or fewer inputs or parameters",
    "an input has another size",
    "in only one of the two, a parameter is frozen or is passed as an input",
)
_OF_OPERATORS = (
    "is a different operator",
    "has results of another size",
    "reads other values",
    "overwrites another value",
    "may be recomputed in only one of the two",
    "has a result that outlives the step in only one of the two",
)


def outline(graph: Graph) -> tuple[int, ...]:
    """Returns a number for the inputs and parameters of a graph, and one per operator; O(E)."""
    given = [value for value in graph.values if value.is_resident]
    sizes, kinds = [value.size_bytes for value in given], [str(value.kind) for value in given]
    outputs = frozenset(graph.outputs)

    numbers = [_number([str(len(given)), str(sizes), str(kinds)])]
    numbers += [_number(_aspects(graph, op, outputs)) for op in graph.operators]
    return tuple(numbers)


def first_difference(planned: Sequence[int], graph: Graph) -> str:
    """Returns the first difference between the graph with the outline `planned` and `graph`.

    Empty if it can't be told.
    """
    if not planned:
        return ""

    for place, (then, now) in enumerate(zip(planned, outline(graph), strict=False)):
        if then == now:
            continue
        if place == 0:
            return _OF_INPUTS[_first_digest(then ^ now, len(_OF_INPUTS))]

        op = graph.operators[place - 1]
        where = f" of {op.module}" if op.module else ""
        what = _OF_OPERATORS[_first_digest(then ^ now, len(_OF_OPERATORS))]
        return f"operator {place - 1}, {op.target}{where}, {what}"
    return "" if len(planned) == graph.num_operators + 1 else "one of the two has more operators"


def _aspects(graph: Graph, op: Operator, outputs: Set[int]) -> Iterator[str]:
    yield f"{op.target} {op.phase!r}"
    yield str([graph.values[value].size_bytes for value in op.writes])
    yield f"{op.reads} {op.writes}"
    yield str(op.reuses)
    yield f"{op.pinned} {op.region} {op.is_snapshot}"
    yield str([value in outputs for value in op.writes])


def _number(texts: Sequence[str] | Iterator[str]) -> int:
    return int.from_bytes(bytes(zlib.crc32(text.encode()) & 0xFF for text in texts))


def _first_digest(difference: int, count: int) -> int:
    """Returns the place of the first digest that differs."""
    return next(i for i, byte in enumerate(difference.to_bytes(count)) if byte)
