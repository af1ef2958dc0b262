"""Schedules that take no search, offered to one.

The closed-form families, plans of models mended, and the greedy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from remat.solvers.auto.reuse import Shared
from remat.solvers.bounds.memory_margins import Reserves
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.core.incumbent import Search
from remat.solvers.core.interrupt import is_past
from remat.solvers.persistent.rotor import rotor_steps
from remat.solvers.search.greedy_eviction import (
    MOST_OPERATORS_TO_EVICT,
    Rule,
    is_compiled,
    steps_with_eviction,
)
from remat.solvers.search.repair import mended

_RESERVES_SHARE = 0.15  # of the time left, at most, for schedules with reserves from one relaxation
_MENDING_SHARE = 0.2  # of the time left, at most; most searches end before
_OPTIONS_SHARE = 0.15  # of the time left, at most, for the options of segments
_SECONDS_AN_OPERATOR = 2e-4  # what it takes without them
_LEAST_S = 7.0  # with less, as for a point of a curve, annealing what there is finds more
# sum of the squared lengths of the schedules mended; some three seconds
_MENDING_WORK = 400_000_000
_MOST_MENDED = 3  # of the schedules with reserves from one relaxation
_MENDING_RULES = Rule.LARGE, Rule.CHEAP, Rule.ENOUGH


def offer_families(search: Search, shared: Shared) -> None:
    """Offers what the closed-form heuristics give, one after the other."""
    families = shared.families.cheapest(search.budget_bytes)
    while not search.is_over and (steps := next(families, None)) is not None:
        search.offer(steps)


def offer_with_reserves(search: Search, refinement: Refinement) -> None:
    """Offers schedules of the present stages with memory in reserve, and the cheapest of those that
    do not fit, mended.
    """
    deadline = time.perf_counter() + search.left_s * _RESERVES_SHARE
    schedules = (
        iter(()) if refinement.is_over else Reserves(refinement).schedules(deadline=deadline)
    )
    failed: dict[tuple[int, ...], float] = {}  # what it costs
    while not search.is_over and (steps := next(schedules, None)) is not None:
        if not search.offer(steps):
            failed[tuple(steps)] = float(search.graph.arrays.cost_s[steps].sum())
    _offer_cheapest_mended(search, failed, deadline)


def _offer_cheapest_mended(
    search: Search, failed: Mapping[tuple[int, ...], float], deadline: float
) -> None:
    """Offers the cheapest of what does not fit, mended by each rule, while that may be cheaper than
    what does.
    """
    for steps in sorted(failed, key=failed.__getitem__)[:_MOST_MENDED] if is_compiled() else ():
        for rule in _MENDING_RULES if len(steps) <= MOST_OPERATORS_TO_EVICT else ():
            if (
                search.is_over
                or is_past(deadline)
                or (search.cost_s is not None and failed[steps] >= search.cost_s)
            ):
                return
            found = mended(search.graph, steps, budget_bytes=search.budget_bytes, rule=rule)
            if found is not None:
                search.offer(found)


def offer_evicted(search: Search, kept: Mapping[int, Sequence[int]]) -> None:
    """Offers schedules that keep so much at first and evict more where that does not fit."""
    if is_compiled():
        _offer_by_rules(search, kept)


def offer_mended(search: Search, shared: Shared) -> None:
    """Offers what becomes of the closed-form heuristics' schedules that need more than the budget,
    until that was work enough.
    """
    deadline, work = time.perf_counter() + search.left_s * _MENDING_SHARE, 0
    for rule in _MENDING_RULES if is_compiled() else ():
        for cost_s, steps in shared.families.above(search.budget_bytes):
            if search.is_over or is_past(deadline) or work > _MENDING_WORK:
                return
            is_of_use = search.cost_s is None or cost_s < search.cost_s  # it only gets dearer
            if is_of_use and len(steps) <= MOST_OPERATORS_TO_EVICT:
                work += len(steps) ** 2
                found = mended(search.graph, steps, budget_bytes=search.budget_bytes, rule=rule)
                search.offer(found or steps)


def offer_persistent(search: Search, should_stop: Callable[[], bool]) -> list[int] | None:
    """Offers the cheapest persistent schedule of segments, and returns its steps where there is
    one.
    """
    options_s, count = search.left_s * _OPTIONS_SHARE, search.graph.num_operators
    if (
        not is_compiled()
        or count > MOST_OPERATORS_TO_EVICT
        or search.left_s < _LEAST_S
        or options_s < _SECONDS_AN_OPERATOR * count
    ):
        return None
    steps = rotor_steps(
        search.graph, search.budget_bytes, options_s=options_s, should_stop=should_stop
    )
    if steps is not None:
        search.offer(steps)
    return steps


def offer_greedy(search: Search, shared: Shared) -> None:
    """Offers the greedy's schedules, and that of the least budget where none of them fits."""
    _offer_by_rules(search, {})
    if search.steps is None and not search.is_over:
        search.offer(shared.least(time_limit_s=search.left_s / 2).steps)


def _offer_by_rules(search: Search, kept: Mapping[int, Sequence[int]]) -> None:
    """Offers what greedy eviction makes of a plan, or of keeping everything, by each of its
    rules.
    """
    for rule in Rule if search.graph.num_operators <= MOST_OPERATORS_TO_EVICT else ():
        if search.is_over:
            return
        steps = steps_with_eviction(
            search.graph, search.budget_bytes, rule, left_s=search.left_s, kept=kept
        )
        if steps is not None:
            search.offer(steps.tolist())
