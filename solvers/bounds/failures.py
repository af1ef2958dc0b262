"""Where a schedule of the fixed order exceeds the budget in the backward, and what it pays there.

This says where a model needs more stages (`refinement`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate

_TOLERANCE = 1e-9  # of the cost of keeping everything


@dataclass(frozen=True)
class Failures:
    """Bytes over the budget and cost paid, by original operator of the backward.

    Attributes:
        before: bytes over the budget right before it, where they are more than at it.
        at: bytes over the budget at it.
        paid_s: cost of the recomputations right before it.
        tolerance_s: costs that differ by no more count as equal.
    """

    before: Mapping[int, float]
    at: Mapping[int, float]
    paid_s: Mapping[int, float]
    tolerance_s: float

    @classmethod
    def of(cls, graph: Graph, steps: list[int], *, budget_bytes: int, first: int) -> Self:
        """Simulates `steps`; the backward begins at operator `first`."""
        held = simulate(graph, Schedule.from_steps(graph, steps)).bytes_at
        before, at, paid_s = dict[int, float](), dict[int, float](), dict[int, float]()
        for position, again in _bursts(steps):
            op, excess = steps[position], float(held[position]) - budget_bytes
            if op < first:
                continue

            most = max(held[position - len(again) : position].tolist(), default=budget_bytes)
            over = float(most - budget_bytes)
            cost_s = sum(graph.operators[j].cost_s for j in again)
            before.update({op: over} if over > max(excess, 0.0) else {})
            at.update({op: excess} if excess > 0 else {})
            paid_s.update({op: cost_s} if cost_s > 0 else {})

        return cls(before, at, paid_s, _TOLERANCE * graph.cost_s)

    @cached_property
    def worst(self) -> dict[int, float]:
        """The larger of the bytes over the budget before and at each operator."""
        both = {*self.before, *self.at}
        return {v: max(self.before.get(v, 0.0), self.at.get(v, 0.0)) for v in both}

    def surplus(self, boundaries: Sequence[int], priced_s: Sequence[float]) -> dict[int, float]:
        """Returns by how much stages cost more than a model says (`priced_s`), where they do.

        A stage's key is the operator in it before which most is paid.
        """
        surplus = {}
        for (a, b), priced in zip(pairwise(boundaries), priced_s, strict=True):
            inside = {v: cost for v, cost in self.paid_s.items() if a <= v < b}
            paid = sum(inside.values())
            if inside and b > a + 1 and paid > priced + self.tolerance_s:
                surplus[max(inside, key=lambda v: inside[v])] = paid - priced
        return surplus

    def worst_single(self, boundaries: Collection[int]) -> int:
        """Returns the operator most over the budget that is not a stage yet, -1 if none."""
        known = {*boundaries}
        found = (v for v in sorted(self.worst) if not {v, v + 1} <= known)
        return max(found, key=lambda v: self.worst[v], default=-1)

    def worst_cut(self, boundaries: Collection[int]) -> int:
        """Returns the operator of `at` most over the budget that begins no stage, -1 if none."""
        return max(
            (v for v in self.at if v not in boundaries), key=lambda v: self.at[v], default=-1
        )


def repeated_s(graph: Graph, steps: Sequence[int], boundaries: Collection[int]) -> dict[int, float]:
    """Returns what is paid right before each operator for what its stage recomputed earlier.

    A window counts each operator once.
    """
    again, cost_s = set[int](), graph.arrays.cost_s
    repeated = dict[int, float]()

    for position, before in _bursts(steps):
        op = steps[position]
        if op in boundaries:
            again.clear()
        repeated[op] = sum(float(cost_s[j]) for j in before if j in again)
        again.update(before)
    return repeated


def _bursts(steps: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Yields each operator's first position in `steps`, and the recomputations right before it."""
    seen, begin = set[int](), 0
    for position, op in enumerate(steps):
        if op not in seen:
            seen.add(op)
            yield position, steps[begin:position]
            begin = position + 1
