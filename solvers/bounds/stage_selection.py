"""Stages chosen by what they bound.

Operators of the backward are tried in the linear relaxation, and those that bound most are taken.

Refinement cuts where a schedule fails. Where the budget is tight, it fails nearly everywhere, and
the one operator whose own window would raise the bound is found late or never.

- On small graphs a relaxation with one more stage is solved soon, so operators all over the
  backward are tried, then with the best of them those that came next, until one gains little.
- On large ones the operators that leave least room are tried: where the working set nearly fills
  the budget (at the loss of a language model), all that is read later is computed again after it.
  Then, with the best of them, a cut at growing distances behind it: what was computed again by then
  cannot all be held either. Windows are the stages alone, whose relaxations take a tenth of the
  time.

Complexity: some 50 relaxations for the first stage on small graphs, of operators evenly spread over
the backward and of those around the best, fewer and larger ones for the next two; on large graphs
some five in all. Bounds are those of the window model, so of all schedules of the fixed order.
Source: this package's own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

from remat.solvers.bounds.dyadic_windows import MOST_FORWARD
from remat.solvers.bounds.lazy_rows import LazyRows
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.bounds.window import WindowModel
from remat.solvers.core.interrupt import is_past

_TRIED = 50, 10, 6  # operators, for each stage chosen here; refinement adds more
_MOST_COLUMNS = 6_000  # of a model that is worth its time
_TIE = 1e-6
_LEAST_GAIN = 0.03  # of the overhead that is proved
_CROWDED = 4  # operators that leave least room, on large graphs
_APART = 40  # that many of them there would be at most
_STAGES = 4  # with a crowded operator, and a cut behind it
# operators; distances in a row that bound less than the best
_LEAST_DISTANCE, _MOST_FRUITLESS = 2, 2


def scout(refinement: Refinement, *, deadline: float) -> float:
    """Replaces the stages of `refinement` by those that bound most.

    Returns the best bound of the relaxations; -inf where there is none, inf where no schedule fits.

    Args:
        refinement: its stages stay as they are where no stage of one operator bounds more than
            none, or no schedule fits; it is left alone where its forward is long (see
            `scout_crowded`), or nothing is left to refine.
        deadline: of `time.perf_counter`, in seconds.
    """
    graph = refinement.graph
    if refinement.is_over or refinement.first > MOST_FORWARD:
        return -math.inf
    before = refinement.stages
    refinement.stages = before.cleared()
    best_s = refinement.relaxed_bound(deadline)
    backward, candidates = range(refinement.first, graph.num_operators), list[int]()
    spacing = max(1, -(-len(backward) // _TRIED[0]))
    for count in _TRIED:
        if refinement.num_columns > _MOST_COLUMNS or is_past(deadline):
            break
        candidates = candidates if refinement.stages.singles else list(backward[::spacing])
        tried = _bounds_with(refinement, candidates[:count], deadline)
        if not tried:
            break
        best = max(tried, key=lambda v: tried[v])
        around = [
            v
            for v in range(best - spacing, best + spacing + 1)
            if v in backward and v not in tried and v not in refinement.stages.singles
        ]
        tried |= _bounds_with(refinement, around, deadline)
        if math.inf in (best_s, tried[best]):  # the relaxation has no point
            best_s = math.inf
            refinement.stages = before
            break
        chosen = _last_of_the_best(tried, spacing)
        least_gain = _LEAST_GAIN * (tried[chosen] - graph.cost_s)
        if tried[chosen] == -math.inf or tried[chosen] - best_s <= least_gain:
            break
        best_s = tried[chosen]
        refinement.stages = refinement.stages.with_single(chosen)
        candidates = [
            v
            for v in (candidates if len(refinement.stages.singles) > 1 else _promising(tried))
            if abs(v - chosen) > 1
        ]
    if not refinement.stages.singles:
        refinement.stages = before
    if best_s < math.inf:
        refinement.best_s = max(refinement.best_s, best_s)
    return best_s


def _promising(tried: dict[int, float]) -> list[int]:
    """Returns the operators that bounded most, without the neighbours of better ones, which bound
    alike.
    """
    best = sorted(tried, key=lambda v: -tried[v])
    return [v for k, v in enumerate(best) if all(abs(v - u) > 1 for u in best[:k])]


def _bounds_with(
    refinement: Refinement, candidates: Sequence[int], deadline: float
) -> dict[int, float]:
    """Returns the bounds with one more stage, of each of these operators, which are none yet.

    -inf where there is no time for it.
    """
    found = dict.fromkeys(candidates, -math.inf)
    for v in candidates:
        if is_past(deadline):
            break
        before = refinement.stages
        refinement.stages = before.with_single(v)
        found[v] = refinement.relaxed_bound(deadline)
        refinement.stages = before
    return found


def _last_of_the_best(tried: dict[int, float], spacing: int) -> int:
    """Returns the best operator, or a later one near it that bounds as much.

    With integers the later one bounds more.
    """
    best = max(tried, key=lambda v: tried[v])
    as_much_s = tried[best] * (1 - _TIE)  # of an infinite bound the same
    return max(v for v in tried if abs(v - best) <= spacing and tried[v] >= as_much_s)


def scout_crowded(refinement: Refinement, *, deadline: float) -> float:
    """Does what `scout` does on large graphs, where the operators that leave least room are tried.

    Args:
        refinement: its stages stay as they are where none of those tried bounds more; it is left
            alone where its forward is short, or too long, or nothing is left to refine.
        deadline: of `time.perf_counter`, in seconds.

    Returns:
        The best bound of the relaxations; -inf where there is none, inf where no schedule fits.
    """
    if refinement.is_over or refinement.first <= MOST_FORWARD or refinement.is_too_large(_STAGES):
        return -math.inf
    best, best_s = (0, 0), -math.inf
    for v in _crowded(refinement):
        bound_s = _bound_of_stages(refinement, (v, v + 1), deadline)
        if bound_s <= best_s:
            break
        best, best_s = (v, v + 1), bound_s
    single_s, cut, distance, fruitless = best_s, best[1], _LEAST_DISTANCE, 0
    while (
        fruitless < _MOST_FRUITLESS
        and best[1] + distance < refinement.graph.num_operators
        and math.isfinite(best_s)
    ):
        bound_s = _bound_of_stages(refinement, (*best, best[1] + distance), deadline)
        if bound_s <= single_s:
            break
        fruitless = 0 if bound_s > best_s else fruitless + 1
        cut, best_s = (best[1] + distance, bound_s) if bound_s > best_s else (cut, best_s)
        distance *= 2
    if refinement.best_s < best_s < math.inf:
        stages = refinement.stages.cleared().with_single(best[0])
        refinement.stages = stages if cut == best[1] else stages.with_cut(cut)
        refinement.best_s = best_s
    return best_s


def _crowded(refinement: Refinement) -> list[int]:
    """Returns the operators of the backward that leave least room where all that can be is computed
    again, apart from each other.
    """
    graph, window = refinement.graph, (refinement.first, refinement.graph.num_operators)
    model = WindowModel(graph, [window], priced=[window], budget_bytes=refinement.budget_bytes)
    again = model.again[window]
    point = np.zeros(model.program.num_columns)
    point[again[again >= 0]] = 1.0
    usage, chosen, apart = (
        model.usage(point, window),
        list[int](),
        max((window[1] - window[0]) // _APART, 2),
    )
    for v in (window[0] + np.argsort(-usage, kind="stable")).tolist():
        if all(abs(v - u) > apart for u in chosen):
            chosen.append(v)
        if len(chosen) == _CROWDED:
            break
    return chosen


def _bound_of_stages(refinement: Refinement, cuts: Collection[int], deadline: float) -> float:
    """The bound of the relaxation that has the stages between these operators as its only windows;
    -inf where there is no time for it.
    """
    first, end = refinement.first, refinement.graph.num_operators
    windows = [(0, first), *pairwise(sorted({first, end, *(cut for cut in cuts if cut < end)}))]
    model = WindowModel(
        refinement.graph, windows, priced=windows, budget_bytes=refinement.budget_bytes
    )
    model.program.starts_from_last = True
    lazy = LazyRows(model, refinement.known.of(set(windows)))
    outcome = lazy.solve(deadline=deadline, is_relaxed=True)
    refinement.known.rows |= lazy.rows
    return model.bound_s(outcome) if outcome.is_finished else -math.inf
