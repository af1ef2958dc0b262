"""Oracles: slow, plain and exact answers that the fast code is compared with.

Nothing here shares code with the simulator, the validator or a solver.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from remat.core.graph import Graph

MAX_OPERATORS = 10
State = TypeVar("State")


def naive_bytes_at(graph: Graph, steps: Sequence[int]) -> list[int]:
    """Returns the bytes at every step; O(S^3).

    Asks at every step whether each computed value is still needed.
    """
    size = _sizes(graph, _repeated(steps))
    held = [graph.resident_bytes] * len(steps)
    for born, index in enumerate(steps):
        for value in graph.operators[index].writes:
            for step in range(born, min(_last_need(graph, steps, value, born) + 1, len(steps))):
                held[step] += size[value]

    for step, index in enumerate(steps):
        op = graph.operators[index]
        held[step] += op.workspace_bytes - max(
            (size[v] for v in op.reuses if _dies_at(graph, steps, v, step)), default=0
        )
    return held


def _repeated(steps: Sequence[int]) -> set[int]:
    return {index for index in steps if steps.count(index) > 1}


def _sizes(graph: Graph, repeated: set[int]) -> list[int]:
    """Sizes of values; a snapshot's is 0 unless a reader is computed more than once."""
    size = [value.size_bytes for value in graph.values]
    for op in graph.operators:
        if op.is_snapshot:
            for value in op.writes:
                if repeated.isdisjoint(graph.users_of[value]):
                    size[value] = 0
    return size


def _last_need(graph: Graph, steps: Sequence[int], value: int, born: int) -> int:
    """Returns the last step that needs the value computed at step `born`.

    One beyond the end for an output.
    """
    writer = steps[born]
    end = next((s for s in range(born + 1, len(steps)) if steps[s] == writer), None)
    if end is None and value in graph.outputs:
        return len(steps)

    return max(
        (
            s
            for s in range(born, len(steps) if end is None else end)
            if value in graph.operators[steps[s]].reads
        ),
        default=born,
    )


def _dies_at(graph: Graph, steps: Sequence[int], value: int, step: int) -> bool:
    """True where a computed value is needed at `step` for the last time."""
    if graph.values[value].is_resident:
        return False
    born = max(s for s in range(step) if value in graph.operators[steps[s]].writes)
    return _last_need(graph, steps, value, born) == step


def brute_force(graph: Graph, budget_bytes: int) -> float | None:
    """Returns the least cost of any schedule in fixed order within the budget.

    None where none fits.

    Searches all states (how far the first computations are, what is in memory) by cost. Small
    graphs of one region only. Snapshots are pinned; each is either paid for, or its readers are
    never computed again.
    """
    assert graph.num_operators <= MAX_OPERATORS
    snapshots = [i for i, op in enumerate(graph.operators) if op.is_snapshot]
    assert all(graph.operators[i].pinned for i in snapshots)

    costs = [
        cost
        for paid in itertools.chain.from_iterable(
            itertools.combinations(snapshots, k) for k in range(len(snapshots) + 1)
        )
        if (cost := _search(graph, budget_bytes, free=set(snapshots) - set(paid))) is not None
    ]
    return min(costs, default=None)


def _search(graph: Graph, budget_bytes: int, free: set[int]) -> float | None:
    """The least cost if snapshots of `free` take no memory and their readers run once."""
    size = [
        0 if graph.producer[v] in free else value.size_bytes for v, value in enumerate(graph.values)
    ]
    unrepeatable = {u for i in free for v in graph.operators[i].writes for u in graph.users_of[v]}
    unrepeatable |= {i for i, op in enumerate(graph.operators) if op.pinned}
    outputs = frozenset(v for v in graph.outputs if not graph.values[v].is_resident)

    if graph.resident_bytes > budget_bytes:
        return None
    return least_cost(
        (0, frozenset[int]()),
        lambda state: _moves(graph, budget_bytes, size, unrepeatable, *state),
        lambda state: state[0] == graph.num_operators and outputs <= state[1],
    )


def least_cost(
    start: State,
    moves: Callable[[State], Iterable[tuple[State, float]]],
    is_end: Callable[[State], bool],
) -> float | None:
    """Returns the least cost from `start` to an end, by Dijkstra; None if there is no path."""
    best = {start: 0.0}
    ticket = itertools.count(1)  # states are not ordered: ties go to the earlier one
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]

    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        if is_end(state):
            return cost

        for following, extra in moves(state):
            if cost + extra < best.get(following, math.inf):
                best[following] = cost + extra
                heapq.heappush(queue, (cost + extra, next(ticket), following))
    return None


def _moves(
    graph: Graph,
    budget_bytes: int,
    size: list[int],
    unrepeatable: set[int],
    done: int,
    memory: frozenset[int],
) -> Iterator[tuple[tuple[int, frozenset[int]], float]]:
    """Yields what can follow a state.

    A value dropped, the next operator, or an earlier one again.
    """
    for value in memory:
        yield (done, memory - {value}), 0.0

    for index in range(min(done + 1, graph.num_operators)):
        op = graph.operators[index]
        if index < done and index in unrepeatable:
            continue
        if not all(v in memory or graph.values[v].is_resident for v in op.reads):
            continue

        after = memory | set(op.writes)
        held = graph.resident_bytes + op.workspace_bytes + sum(size[v] for v in after)
        now_done = max(done, index + 1)
        if held <= budget_bytes:
            yield (now_done, after), op.cost_s
        for value in op.reuses:  # in place: the value's memory becomes the result's
            if not graph.values[value].is_resident and held - size[value] <= budget_bytes:
                yield (now_done, after - {value}), op.cost_s


def minimum_bytes(graph: Graph) -> int:
    """Returns the smallest budget that any fixed-order schedule fits, by bisection."""
    low, high = (
        -1,
        max(naive_bytes_at(graph, range(graph.num_operators)), default=graph.resident_bytes),
    )
    high = max(high, graph.resident_bytes)

    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if brute_force(graph, middle) is not None else (middle, high)
    return high


def revolve_advances(num_values: int, num_slots: int) -> int:
    """Returns the fewest advances that reverse `num_values` chain values (Bellman's equation)."""
    table = [[0] * (num_slots + 1) for _ in range(num_values + 1)]
    for values in range(2, num_values + 1):
        table[values][1] = values * (values - 1) // 2
        for slots in range(2, num_slots + 1):
            table[values][slots] = min(
                m + table[values - m][slots - 1] + table[m][slots] for m in range(1, values)
            )
    return table[num_values][num_slots]


def revolve_closed_form(num_values: int, num_slots: int) -> int:
    """Returns the fewest advances in closed form (Griewank and Walther 2000, proposition 1).

    They are r l - C(s + r, r - 1) with C(s + r - 1, s) < l <= C(s + r, s).
    """
    r = next(r for r in itertools.count() if math.comb(num_slots + r, num_slots) >= num_values)
    return r * num_values - (math.comb(num_slots + r, r - 1) if r else 0)


def sqrt_peak_bound(length: int) -> int:
    """Returns the peak that sqrt(n) segments of a unit chain can't exceed.

    Borders, one segment, and what a step holds.
    """
    root = math.isqrt(length - 1) + 1
    return 2 * root + 4
