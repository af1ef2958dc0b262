"""The least budget: a schedule with a small peak, and a proof of how small no peak can be.

The bound is the larger of the largest working set (an operator's reads, writes and workspace are in memory together)
and the LP relaxation of the window model with the peak as objective. The schedule is the leanest of these, annealed: keep
nothing; one segment a block (`per_block`); and greedy recomputation with eviction under the smallest budget at which it
does not get stuck, found by bisection for each of its rules, at a cost of at most `MAX_FACTOR` times that of keeping all.

Neither is exact: finding the least peak with recomputation is PSPACE-complete (Gilbert, Lengauer, Tarjan, 1980).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from ..graph import Graph
from ..schedule import Schedule, simulate
from .accounting import Accounting, Ints
from .compiled import COMPILER_S, IS_COMPILED
from .eviction import Rule, steps_with_eviction
from .interrupt import is_past
from .lazy_rows import LazyRows
from .local_search import LocalSearch, Round
from .on_demand import forward_length, steps_on_demand
from .per_block import block_schedules
from .search import keeps_regions
from .window import WindowModel

MAX_FACTOR = 8.0
MOST_OPERATORS_TO_EVICT = 20_000  # it takes O(n E)
_PRECISION = 1 / 512  # of the keep-all peak, where the bisection ends
_LIMIT_S = 1.0
_FIRST_SHARE, _LAST_SHARE = 0.08, 0.01
_MOVES = 30_000 if IS_COMPILED else 1_000


@dataclass(frozen=True, slots=True)
class Minimum:
    """The smallest peak that is known to be possible, and the largest that is known not to be beaten.

    Attributes:
        peak_bytes: simulated peak of `steps`; a budget of so much can be met.
        lower_bound_bytes: proved: no schedule of the fixed order has a smaller peak.
        steps: the schedule's operators.
    """

    peak_bytes: int
    lower_bound_bytes: int
    steps: tuple[int, ...]


def minimum(graph: Graph, *, time_limit_s: float = math.inf) -> Minimum:
    """Returns the smallest budget for which a schedule is found, and a proven lower bound on it.

    Args:
        graph: any graph.
        time_limit_s: ends the bisection early; without it the answer depends on the graph alone.

    Complexity: about 30 runs of the greedy, O(n E) each in compiled code.
    """
    deadline = time.perf_counter() + time_limit_s
    keep_all = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    floor = peak_bound(graph, keep_all, time_limit_s=min(_LIMIT_S, time_limit_s))
    best_peak, best_steps = _leanest_simple(graph)
    step = max(int(keep_all * _PRECISION), 1)
    for rule in Rule if graph.num_operators <= MOST_OPERATORS_TO_EVICT else ():
        low, high = floor, best_peak
        while high - low > step and not is_past(deadline):
            middle = (low + high) // 2
            steps = steps_with_eviction(graph, middle, rule, max_factor=MAX_FACTOR, left_s=deadline - time.perf_counter())
            if steps is None or not keeps_regions(graph, steps.tolist()):
                low = middle
                continue
            high = min(middle, simulate(graph, Schedule.from_steps(graph, steps.tolist())).peak_bytes)
            best_peak, best_steps = high, steps
    best_steps = _compress(graph, best_steps, best_peak, floor, deadline)
    peak = simulate(graph, Schedule.from_steps(graph, best_steps.tolist())).peak_bytes
    return Minimum(peak, min(floor, peak), tuple(best_steps.tolist()))


def _leanest_simple(graph: Graph) -> tuple[int, Ints]:
    """Returns peak and steps of the schedule with the least peak of those that take no search."""
    candidates = [list(range(graph.num_operators)), steps_on_demand(graph, ()), *block_schedules(graph)]
    peaks = [simulate(graph, Schedule.from_steps(graph, steps)).peak_bytes for steps in candidates]
    best = min((k for k, steps in enumerate(candidates) if k == 0 or keeps_regions(graph, steps)), key=lambda k: peaks[k])
    return peaks[best], np.array(candidates[best], np.int64)


def _compress(graph: Graph, steps: Ints, peak_bytes: int, floor: int, deadline: float) -> Ints:
    """Returns steps with a smaller peak, by annealing under budgets ever closer below the least one so far."""
    share = _FIRST_SHARE
    while share > _LAST_SHARE and peak_bytes > floor and not is_past(deadline):
        target = max(min(int(peak_bytes * (1 - share)), peak_bytes - 1), floor)
        local = LocalSearch(graph, budget_bytes=target, seed=0)
        if not local.is_ready and deadline - time.perf_counter() < COMPILER_S:
            break

        def should_stop(local: LocalSearch = local) -> bool:
            return local.best_steps is not None or is_past(deadline)

        local.run(steps, Round(_MOVES, 1e-3, 1e-5), should_stop=should_stop)
        if local.best_steps is None:
            share /= 3
            continue
        steps = local.best_steps
        peak_bytes = simulate(graph, Schedule.from_steps(graph, steps.tolist())).peak_bytes
    return steps


def working_set_bytes(graph: Graph) -> int:
    """The largest working set: what one operator reads, writes and works with, or all results, and what is resident; O(E)."""
    accounting, arrays = Accounting(graph), graph.arrays
    taken = np.zeros(graph.num_operators)
    np.maximum.at(taken, np.repeat(np.arange(graph.num_operators), np.diff(arrays.reuse_start)), accounting.size[arrays.reuse])
    own = accounting.own - taken
    results = accounting.size[np.unique(arrays.output)].sum()
    return graph.resident_bytes + int(max(own.max(initial=0.0), results))


def peak_bound(graph: Graph, keep_all_bytes: int, *, time_limit_s: float, is_relaxed: bool = True) -> int:
    """A lower bound on the peak of every schedule of the fixed order: working sets, and the window model (its LP).

    On large graphs the memory rows of the backward alone, with all that can be recomputed: none can be met with less.
    """
    floor = min(working_set_bytes(graph), keep_all_bytes)
    boundary = forward_length(graph)
    if not 0 < boundary < graph.num_operators:
        return floor
    windows = [(0, boundary), (boundary, graph.num_operators)]
    model = WindowModel(graph, windows, priced=windows, budget_bytes=keep_all_bytes, is_peak=True)
    if graph.num_operators > MOST_OPERATORS_TO_EVICT:
        again = model.again[windows[1]]
        point = np.zeros(model.program.num_columns)
        point[again[again >= 0]] = 1.0
        needed = graph.resident_bytes + int(model.usage(point, windows[1]).max())
        return min(max(floor, needed), keep_all_bytes)
    outcome = LazyRows(model).solve(deadline=time.perf_counter() + time_limit_s, is_relaxed=is_relaxed)
    return min(max(floor, model.peak_bytes(outcome)), keep_all_bytes)
