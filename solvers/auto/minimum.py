"""The least budget: a schedule with a low peak, and a lower bound on every peak.

The bound is the larger of the largest working set (an operator's reads, writes and workspace are in
memory together) and the LP relaxation of the window model with the peak as objective. The
candidates for the schedule are: keep nothing; one segment per block (`per_block`); the other
closed-form families (`families`); and greedy eviction under the smallest budget at which it does
not get stuck. Each eviction rule tries ever finer budgets, and its schedules may cost at most
`MAX_FACTOR` times as much as keeping everything. The candidates with the lowest peaks are annealed,
and the one with the lowest peak is returned.

The result is cached for the latest graphs, so a budget once reported as the least can be met later
too, even in less time. A longer search starts again, and the better of both results is kept.

Neither is exact: finding the least peak with recomputation is PSPACE-complete (Gilbert, Lengauer,
Tarjan, 1980). Only graphs of a few operators are solved exactly, by exhaustive search
(`exhaustive`).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from remat.core.graph import Graph
from remat.core.schedule import Schedule, keep_all_peak, simulate
from remat.narration.stages import stage
from remat.solvers.baselines.families import Families
from remat.solvers.baselines.per_block import block_schedules
from remat.solvers.bounds.lazy_rows import LazyRows
from remat.solvers.bounds.window import WindowModel
from remat.solvers.core.accounting import Ints, working_set_bytes
from remat.solvers.core.compiled import COMPILER_S, IS_COMPILED
from remat.solvers.core.incumbent import keeps_regions
from remat.solvers.core.interrupt import is_interrupted, is_past, until
from remat.solvers.core.memory import leaving_out
from remat.solvers.core.on_demand import forward_length, steps_on_demand
from remat.solvers.core.pace import pace_s, work_of
from remat.solvers.exhaustive import states
from remat.solvers.search.annealing import LocalSearch, Round
from remat.solvers.search.greedy_eviction import (
    MAX_FACTOR,
    MOST_OPERATORS_TO_EVICT,
    Rule,
    steps_with_eviction,
)

# of the lowest peak so far; the search over budgets ends there (traced steps)
_PRECISION = 1 / 1_000
# limits of one round: on operators times budgets tried, and on budgets tried (traced steps)
_OPERATORS_TRIED, _MOST_BUDGETS = 16_000, 15
_LIMIT_S = 1.0  # seconds for the bound; a round number, not measured
# length of the longest part that does not check the clock, in passes over the graph (`pace`); with
# it a limit of 5 s holds on a chain of a million operators and a complete graph of 1,500
_BLIND_PASSES = 110
# annealing; no measurement of these numbers is on record
_CANDIDATES = 3  # schedules annealed, those with the lowest peaks
_MOVES = 30_000 if IS_COMPILED else 1_000  # in one run
_HOT, _COLD = 1e-3, 1e-5  # temperatures of a run, as shares of the cost of keeping everything
_FIRST_SHARE = 0.08  # share of the peak by which the first run tries to lower it
# the share is divided by this after a run that fails, and the last run is above the least share
_DIVISOR, _LAST_SHARE = 3, 0.01


@dataclass(frozen=True, slots=True)
class Minimum:
    """The lowest peak found, and a lower bound on every peak.

    Attributes:
        peak_bytes: simulated peak of `steps`, a budget that can be met.
        lower_bound_bytes: no schedule of the fixed order has a lower peak.
        steps: the schedule's operators.
    """

    peak_bytes: int
    lower_bound_bytes: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Searched:
    """The lowest peak found for a graph, and the time limit of its longest search.

    The limit is infinite once a search was not cut short.
    """

    least: Minimum
    seconds: float


_MOST_REMEMBERED = 32  # graphs; the steps of one with 100,000 operators take some 4 MB
_searched: OrderedDict[str, _Searched] = OrderedDict()  # the latest one is last


def minimum(
    graph: Graph, *, time_limit_s: float = math.inf, families: Families | None = None
) -> Minimum:
    """Returns the smallest budget for which a schedule is found, and a proved lower bound on it.

    A shorter search than an earlier one of this process returns what that one found.

    Args:
        graph: any graph.
        time_limit_s: ends the search early. Without it the answer depends only on the graph, unless
            an earlier search of this process found a lower peak.
        families: the graph's closed-form schedules, where they exist already.

    Complexity: about 50 runs of greedy eviction, up to 200 on small graphs, O(n E) each in compiled
    code; some 300 schedules of the families, O(E) each.
    """
    # parts that do not check the clock are started only before this
    deadline = time.perf_counter() + time_limit_s - _BLIND_PASSES * pace_s(graph)
    key = _key(graph)
    known = _searched.get(key)
    if known is not None and time_limit_s <= known.seconds:
        return known.least

    with stage(f"looking for the least budget of {graph.num_operators:,} operators"):
        found = _minimum(graph, deadline, families or Families(graph))

    if not is_past(deadline):
        time_limit_s = math.inf
    elif is_interrupted():
        time_limit_s = 0.0
    return _remember(key, found, time_limit_s)


def _remember(key: str, found: Minimum, seconds: float) -> Minimum:
    """Returns the better of what was found now and before."""
    if (known := _searched.pop(key, None)) is not None:
        bound_bytes = max(found.lower_bound_bytes, known.least.lower_bound_bytes)
        lowest = min(found, known.least, key=lambda least: least.peak_bytes)
        found = replace(lowest, lower_bound_bytes=bound_bytes)
        seconds = max(seconds, known.seconds)

    _searched[key] = _Searched(found, seconds)
    if len(_searched) > _MOST_REMEMBERED:
        _searched.popitem(last=False)
    return found


def _key(graph: Graph) -> str:
    """Returns a digest of everything that peaks depend on, and the costs."""
    numbers = (graph.arrays.workspace_bytes, graph.arrays.cost_s)
    digest = hashlib.sha256(b"".join(array.tobytes() for array in numbers))
    return graph.fingerprint + digest.hexdigest()


def _minimum(graph: Graph, deadline: float, families: Families) -> Minimum:
    if (exact := _exactly(graph, deadline)) is not None:
        return exact

    keep_all = keep_all_peak(graph)
    left_s = deadline - time.perf_counter()

    floor = min(working_set_bytes(graph), keep_all)
    if left_s > 0:
        with leaving_out("the bound on the least budget", lambda _: None):
            floor = peak_bound(graph, keep_all, time_limit_s=min(_LIMIT_S, left_s))

    candidates = _leanest_simple(graph, families, deadline)
    for rule in Rule if graph.num_operators <= MOST_OPERATORS_TO_EVICT else ():
        lean = _leanest_evicted(graph, rule, floor, min(peak for peak, _ in candidates), deadline)
        candidates += [lean] if lean else []
    candidates = sorted(candidates, key=lambda candidate: candidate[0])[:_CANDIDATES]

    peak, best_steps = min(
        (_compress(graph, steps, peak, floor, deadline) for peak, steps in candidates),
        key=lambda found: found[0],
    )
    return Minimum(peak, min(floor, peak), tuple(best_steps.tolist()))


def _exactly(graph: Graph, deadline: float) -> Minimum | None:
    """Returns the proved least budget of a graph of a few operators; None for larger graphs."""
    if not states.is_small(graph):
        return None

    found = states.leanest(graph, deadline=deadline, most_states=states.FEW_STATES)
    if found.steps is None:
        return None
    return Minimum(int(found.least), int(found.least), tuple(found.steps))


def _leanest_evicted(
    graph: Graph, rule: Rule, low: int, high: int, deadline: float
) -> tuple[int, Ints] | None:
    """Returns peak and steps of greedy eviction at the smallest budget where it does not get stuck.

    The budget lies between `low` and `high`. Greedy eviction may get stuck at one budget and not at
    a smaller one, so each round tries several, more of them on small graphs.
    """
    best, num_budgets = (
        None,
        min(max(_OPERATORS_TRIED // max(graph.num_operators, 1), 1), _MOST_BUDGETS),
    )

    while high - low > max(high * _PRECISION, 1) and not is_past(deadline):
        budgets = [
            low + (high - low) * part // (num_budgets + 1) for part in range(1, num_budgets + 1)
        ]

        for middle in budgets:
            steps = steps_with_eviction(
                graph, middle, rule, max_factor=MAX_FACTOR, left_s=deadline - time.perf_counter()
            )
            if steps is not None and keeps_regions(graph, steps.tolist()):
                high = min(middle, _peak_bytes(graph, steps.tolist()))
                best = high, steps
                break
            low = middle
            if is_past(deadline):
                break

    return best


def _leanest_simple(graph: Graph, families: Families, deadline: float) -> list[tuple[int, Ints]]:
    """Returns peaks and steps of schedules that need no search.

    The first is the one of lowest peak among the simplest schedules; schedules of the families with
    ever lower peaks follow.
    """
    others = chain([()], block_schedules(graph))
    simple = (steps or steps_on_demand(graph, ()) for steps in until(others, deadline))
    valid = [
        list(range(graph.num_operators)),
        *(steps for steps in simple if keeps_regions(graph, steps)),
    ]

    best = min(
        ((_peak_bytes(graph, steps), np.array(steps, np.int64)) for steps in valid),
        key=lambda candidate: candidate[0],
    )

    leaner = [
        steps
        for steps in families.leanest(best[0], deadline=deadline)
        if keeps_regions(graph, steps)
    ]
    return [best, *((_peak_bytes(graph, steps), np.array(steps, np.int64)) for steps in leaner)]


def _peak_bytes(graph: Graph, steps: Sequence[int]) -> int:
    return simulate(graph, Schedule.from_steps(graph, list(steps))).peak_bytes


def _compress(
    graph: Graph, steps: Ints, peak_bytes: int, floor: int, deadline: float
) -> tuple[int, Ints]:
    """Lowers the peak of a schedule by annealing under budgets below it; returns peak and steps.

    The budgets come closer to the peak where annealing finds nothing.
    """
    share = _FIRST_SHARE
    while share > _LAST_SHARE and peak_bytes > floor and not is_past(deadline):
        target = max(min(int(peak_bytes * (1 - share)), peak_bytes - 1), floor)
        local = LocalSearch(graph, budget_bytes=target, seed=0)
        if not local.is_ready and deadline - time.perf_counter() < COMPILER_S:
            break

        def should_stop(local: LocalSearch = local) -> bool:
            return local.best_steps is not None or is_past(deadline)

        local.run(steps, Round(_MOVES, _HOT, _COLD), should_stop=should_stop)
        leaner = (
            peak_bytes
            if local.best_steps is None
            else _peak_bytes(graph, local.best_steps.tolist())
        )
        if local.best_steps is None or leaner >= peak_bytes:
            share /= _DIVISOR
            continue

        peak_bytes, steps = leaner, local.best_steps
    return peak_bytes, steps


def peak_bound(
    graph: Graph, keep_all_bytes: int, *, time_limit_s: float, is_relaxed: bool = True
) -> int:
    """Returns a lower bound on the peak of every schedule of the fixed order.

    It is the larger of the working sets and the window model's bound (its LP where `is_relaxed`).
    On large graphs, where HiGHS takes seconds to read the model, only the memory rows of the
    backward are evaluated, with everything recomputed that can be: no schedule needs less there.
    """
    floor = min(working_set_bytes(graph), keep_all_bytes)
    boundary = forward_length(graph)
    if not 0 < boundary < graph.num_operators:
        return floor

    windows = [(0, boundary), (boundary, graph.num_operators)]
    model = WindowModel(graph, windows, priced=windows, budget_bytes=keep_all_bytes, is_peak=True)

    if work_of(graph) > MOST_OPERATORS_TO_EVICT:
        again = model.again[windows[1]]
        point = np.zeros(model.program.num_columns)
        point[again[again >= 0]] = 1.0
        needed = graph.resident_bytes + int(model.usage(point, windows[1]).max())
        return min(max(floor, needed), keep_all_bytes)

    outcome = LazyRows(model).solve(
        deadline=time.perf_counter() + time_limit_s, is_relaxed=is_relaxed
    )
    return min(max(floor, model.peak_bytes(outcome)), keep_all_bytes)
