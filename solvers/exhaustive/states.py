"""The search: visits states in order of cost, or of peak, until one is the end of the step.

Other names: uniform-cost search (Dijkstra) over the configurations of a pebble game. A move
computes the next operator, recomputes an earlier one, or drops one value. A value is dropped only
where a computation does not fit beside it; otherwise it can be dropped later. First computations
cost the same in every schedule, so only recomputations count. The first final state visited is the
best; where none is reached, no schedule fits.

Optimal over all schedules of the fixed order, in-place work, snapshots and regions included. O(2^n)
states of n operators, twice as many for each snapshot; in practice some thousands for 14 operators.
Imperfections: it holds all states that it has seen, and uses no bound on the remaining cost.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from remat.core.graph import Graph
from remat.solvers.core.interrupt import is_past
from remat.solvers.exhaustive.rules import Computation, Ledger, Rules, each_bit

# operators, snapshots and visited states up to which `auto` uses this search: a few tenths of a
# second at most; 14 operators took less than 0.1 s, of the limits no measurement is on record
_FEW_OPERATORS, _FEW_SNAPSHOTS, FEW_STATES = 16, 4, 20_000
_STATES_PER_LOOK = 256  # states visited between two looks at the clock; round, not measured


class State(NamedTuple):
    """A ledger's number, the number of operators done, and the values in memory as bits."""

    ledger: int
    done: int
    held: int


_Key = tuple[float, int]  # cost or peak, then minus the operators done: ties prefer the furthest


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        steps: the best schedule; None where there is none, or a limit ended the search first.
        is_finished: False where a limit ended the search.
        least: proved lower bound on extra cost in seconds, or on the peak in bytes; infinite where
            no schedule fits.
    """

    steps: list[int] | None
    is_finished: bool
    least: float


def is_small(graph: Graph) -> bool:
    """True where the search takes a few tenths of a second at most."""
    num_snapshots = sum(op.is_snapshot for op in graph.operators)
    return graph.num_operators <= _FEW_OPERATORS and num_snapshots <= _FEW_SNAPSHOTS


def cheapest(graph: Graph, *, budget_bytes: int, deadline: float, most_states: int) -> Found:
    """Returns the schedule with the least extra cost within the budget.

    Args:
        graph: any graph; meant for small ones.
        budget_bytes: resident bytes included.
        deadline: in `time.perf_counter` seconds.
        most_states: ends the search, as the deadline does.
    """
    return _ByCost(graph, budget_bytes).run(deadline, most_states)


def leanest(graph: Graph, *, deadline: float, most_states: int) -> Found:
    """Returns the schedule with the lowest peak; arguments as in `cheapest`."""
    return _ByPeak(graph).run(deadline, most_states)


class _States(ABC):
    """All states seen, with the best key of each and how it was reached."""

    def __init__(self, graph: Graph, start: float) -> None:
        self._rules = Rules(graph)
        self._best: dict[State, _Key] = {}
        self._reached: dict[State, tuple[State, int]] = {}  # from where, by which operator
        self._queue: list[tuple[_Key, State]] = []
        if graph.resident_bytes <= self._limit(start):
            for number in range(len(self._rules.ledgers)):
                self._reach(State(number, 0, 0), start, None, -1)

    @abstractmethod
    def _limit(self, value: float) -> float:
        """Returns the bytes that a computation may need without raising its state's value."""

    @abstractmethod
    def _next(self, value: float, need_bytes: int, cost_s: float) -> float:
        """Returns the value after a computation; infinite where it is not allowed."""

    def run(self, deadline: float, most_states: int) -> Found:
        """Visits the best state until it is final, none is left, or a limit is reached."""
        num_taken, value = 0, 0.0
        while self._queue:
            key, state = heapq.heappop(self._queue)
            if key > self._best[state]:
                continue

            value, num_taken = key[0], num_taken + 1
            if self._is_end(state):
                return Found(self._steps_to(state), True, value)
            is_late = num_taken % _STATES_PER_LOOK == 1 and is_past(deadline)
            if is_late or len(self._best) > most_states:
                return Found(None, False, value)

            self._follow(state, value)
        return Found(None, True, math.inf)

    def _is_end(self, state: State) -> bool:
        outputs = self._rules.outputs
        return state.done == self._rules.graph.num_operators and state.held & outputs == outputs

    def _follow(self, state: State, value: float) -> None:
        """Reaches all states that may follow a state."""
        ledger, limit = self._rules.ledgers[state.ledger], self._limit(value)
        dropped = 0
        for computation, cost_s, done in self._computations(state, ledger):
            after = state.held | computation.writes
            need = computation.base_bytes + ledger.bytes_of(after)
            self._compute(state, value, computation, cost_s, done, after, need)
            if need <= limit:
                continue

            for reused in computation.reuses:
                less = need - ledger.bytes_of(reused)
                self._compute(state, value, computation, cost_s, done, after & ~reused, less)
            dropped |= state.held & ~computation.reads & ledger.weighs

        for bit in each_bit(dropped):
            self._reach(state._replace(held=state.held & ~bit), value, state, -1)

    def _computations(
        self, state: State, ledger: Ledger
    ) -> Iterator[tuple[Computation, float, int]]:
        """Yields the possible computations, with extra cost and number of operators then done."""
        rules, done = self._rules, state.done
        missing = rules.useful[done] & ~state.held
        if done < rules.graph.num_operators:
            following = rules.computations[done]
            if not following.reads & ~state.held:
                yield following, 0.0, done + 1

        for computation in rules.again[done]:
            is_of_use = computation.writes & missing and not computation.reads & ~state.held
            if is_of_use and ledger.allows_again(computation.index):
                yield computation, computation.cost_s, done

    def _compute(
        self,
        state: State,
        value: float,
        computation: Computation,
        cost_s: float,
        done: int,
        after: int,
        need_bytes: int,
    ) -> None:
        """Reaches the state after a computation, where it is allowed."""
        following = self._next(value, need_bytes, cost_s)
        if following < math.inf:
            held = after & self._rules.useful[done]
            self._reach(State(state.ledger, done, held), following, state, computation.index)

    def _reach(self, state: State, value: float, before: State | None, index: int) -> None:
        """Records a way to a state if it is better than those known."""
        key = value, -state.done
        if state not in self._best or key < self._best[state]:
            self._best[state] = key
            heapq.heappush(self._queue, (key, state))
            if before is not None:
                self._reached[state] = before, index

    def _steps_to(self, state: State) -> list[int]:
        steps = []
        while state in self._reached:
            state, index = self._reached[state]
            steps += [index] if index >= 0 else []

        return steps[::-1]


class _ByCost(_States):
    """States in order of extra cost, within a budget."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        super().__init__(graph, 0.0)

    def _limit(self, value: float) -> float:
        return self._budget_bytes

    def _next(self, value: float, need_bytes: int, cost_s: float) -> float:
        return value + cost_s if need_bytes <= self._budget_bytes else math.inf


class _ByPeak(_States):
    """States in order of the peak so far."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph, float(graph.resident_bytes))

    def _limit(self, value: float) -> float:
        return value

    def _next(self, value: float, need_bytes: int, cost_s: float) -> float:
        return max(value, float(need_bytes))
