"""What a schedule does with each value (saved, recomputed, short-lived), and why.

The price of dropping a value is the cost of recomputing it per MiB that it frees. The reason of
each value states its price, so that values can be compared: a good schedule mostly drops values
with a low price.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from remat.core.graph import Graph
from remat.core.operators import Phase
from remat.core.schedule import Schedule, lifetimes
from remat.core.units import Units

_LONGEST_CHAIN = 2000  # operators counted at most; the cost of a longer chain is understated


class Fate(StrEnum):
    """What becomes of a value."""

    SAVED = "saved"  # kept from the forward to the backward
    RECOMPUTED = "recomputed"  # freed, and recomputed when it is needed
    SHORT = "short-lived"  # freed before the forward ends, and not needed later
    RESULT = "result"  # returned by the step, and read by no operator
    GRADIENT = "gradient"  # computed in the backward


@dataclass(frozen=True, slots=True)
class Decision:
    """What the schedule does with one value.

    Attributes:
        value: its index in the graph.
        operator: the operator that writes it.
        fate: what the schedule does with it.
        times: how often it is computed.
        again_s: cost of recomputing it from saved values; 0 unless it is saved or recomputed.
        num_again: how many operators that takes.
        reason: why, in a few words.
    """

    value: int
    operator: int
    fate: Fate
    times: int
    again_s: float
    num_again: int
    reason: str


def decide(graph: Graph, schedule: Schedule) -> list[Decision]:
    """Returns a decision for each value that the step computes, in the order of the graph.

    Complexity: O(V c) for chains of c dropped operators between saved values.

    Raises:
        ScheduleError: the schedule does not fit the graph.
    """
    reader = _Reader(graph, schedule)
    return [reader.decision(value) for op in graph.operators for value in op.writes]


class _Reader:
    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph, self.units = graph, Units.of(graph)
        self.has_recomputations = schedule.num_recomputations > 0
        value, first, last = lifetimes(graph, schedule.array)
        self.times = np.bincount(value, minlength=len(graph.values))

        earliest = np.full(len(graph.values), len(schedule.steps))
        np.minimum.at(earliest, value, first)
        is_again = (first > earliest[value]) & (last > first)
        is_saved = (first < schedule.num_forward_steps) & (last >= schedule.num_forward_steps)

        self.recomputed = set(value[is_again].tolist())
        self.saved = set(value[is_saved].tolist())
        self.outputs = set(graph.outputs)

    def decision(self, value: int) -> Decision:
        operator = self.graph.producer[value]
        fate = self._fate(value, operator)
        chain = list(self._chain(operator)) if fate in (Fate.SAVED, Fate.RECOMPUTED) else []
        again_s = sum(self.graph.operators[i].cost_s for i in chain)
        reason = self._reason(value, fate, again_s, len(chain))
        return Decision(value, operator, fate, int(self.times[value]), again_s, len(chain), reason)

    def _fate(self, value: int, operator: int) -> Fate:
        if value in self.outputs and not self.graph.users_of[value]:
            return Fate.RESULT
        if self.graph.operators[operator].phase is Phase.BACKWARD:
            return Fate.GRADIENT
        if value in self.recomputed:
            return Fate.RECOMPUTED
        return Fate.SAVED if value in self.saved else Fate.SHORT

    def _chain(self, operator: int) -> Iterator[int]:
        """Yields the operators that have to run to recompute one from saved values."""
        seen, waiting = {operator}, [operator]
        while waiting and len(seen) <= _LONGEST_CHAIN:
            current = waiting.pop()
            yield current
            for read in self.graph.operators[current].reads:
                source = self.graph.producer[read]
                if source >= 0 and source not in seen and read not in self.saved:
                    seen.add(source)
                    waiting.append(source)

    def _reason(self, value: int, fate: Fate, again_s: float, num_again: int) -> str:
        op = self.graph.operators[self.graph.producer[value]]
        if fate is Fate.RESULT:
            return "the step returns it"
        if fate is Fate.GRADIENT:
            return "computed in the backward"
        if fate is Fate.SHORT:
            return "nothing after the forward reads it"
        if fate is Fate.SAVED and op.is_snapshot:
            return "recomputing starts from this state"
        if fate is Fate.SAVED and op.pinned:
            return f"never recomputed: {op.pinned}"
        if fate is Fate.SAVED and not self.has_recomputations:
            return "nothing has to be recomputed"

        operators = f"{num_again} operators" if num_again != 1 else "1 operator"
        price = f"{self.units.cost_text(again_s)} ({operators}){self._price(value, again_s)}"
        return (
            f"recomputed in {price}"
            if fate is Fate.RECOMPUTED
            else f"recomputing it would take {price}"
        )

    def _price(self, value: int, again_s: float) -> str:
        size = self.graph.values[value].size_bytes
        if not size or self.units.size != "B":
            return ""
        return f", {self.units.cost_text(again_s * 2**20 / size)} per MiB"
