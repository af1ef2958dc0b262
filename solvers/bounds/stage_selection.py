"""Stages chosen by the bound that they give in the linear relaxation.

Refinement splits stages where a schedule fails. Where the budget is tight, schedules fail nearly
everywhere, and the one operator whose own stage would raise the bound is found late or never.

- On small graphs a relaxation with one more stage is solved quickly. Operators all over the
  backward are tried as stages; with the best of them in place, the runners-up are tried, until one
  gains little.
- On large graphs the operators that leave least room are tried: where the working set nearly fills
  the budget (at the loss of a language model), all that is read later is recomputed after it. Then,
  with the best of them in place, a cut is tried at growing distances after it: what was recomputed
  by then cannot all be held either. The only windows are the stages, which makes the relaxations
  ten times as fast.

Complexity: some 50 relaxations for the first stage on small graphs, of operators evenly spread over
the backward and around the best, and fewer but larger ones for the next two stages; on large graphs
some five in all. The bounds are the window model's and hold for all schedules of the fixed order.
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
from remat.solvers.bounds.stages import Stages
from remat.solvers.bounds.window import WindowModel
from remat.solvers.core.interrupt import is_past

# operators, for each stage chosen here; refinement adds more (published graphs: U-Net at 5 GB)
_TRIED = 50, 10, 6
_MOST_COLUMNS = 6_000  # larger models take too long; how long, and for which set, is not on record
_TIE = 1e-6  # relative; bounds that differ by less are equal; not tuned
_LEAST_GAIN = 0.03  # share of the proved overhead that a stage must gain (traced steps: U-Net)
# for large graphs, measured together on traced steps (GPT-2, Llama) at their least budgets
_CROWDED = 4  # operators tried, those that leave least room
_APART = 40  # they are at least a fortieth of the backward apart
# the first distance of the cut in operators; distances in a row that gain nothing
_LEAST_DISTANCE, _MOST_FRUITLESS = 2, 2
# before the crowded operator, itself, up to the cut, after it: the number follows from the method
_STAGES = 4


def scout(refinement: Refinement, *, deadline: float) -> float:
    """Replaces the stages of `refinement` by those with the best bound.

    Returns the best bound of the relaxations; -inf where there is none, inf where no schedule fits.

    Args:
        refinement: its stages stay as they are where no stage of one operator raises the bound, or
            no schedule fits. Nothing is tried where the forward is long (see `scout_crowded`), or
            nothing is left to refine.
        deadline: in `time.perf_counter` seconds.
    """
    graph = refinement.graph
    if refinement.is_over or refinement.first > MOST_FORWARD:
        return -math.inf

    stages = refinement.stages.cleared()
    best_s = refinement.relaxed_bound(deadline, stages)
    backward = range(refinement.first, graph.num_operators)
    spacing = max(1, -(-len(backward) // _TRIED[0]))
    candidates = list(backward[::spacing])

    for count in _TRIED:
        if refinement.num_columns(stages) > _MOST_COLUMNS or is_past(deadline):
            break

        tried = _bounds_with(refinement, stages, candidates[:count], deadline)
        if not tried:
            break

        best = max(tried, key=lambda v: tried[v])
        around = range(max(best - spacing, backward.start), min(best + spacing + 1, backward.stop))
        untried = [v for v in around if v not in tried and v not in stages.singles]
        tried |= _bounds_with(refinement, stages, untried, deadline)

        if math.inf in (best_s, tried[best]):  # the relaxation has no point
            return math.inf

        chosen = _last_of_the_best(tried, spacing)
        least_gain = _LEAST_GAIN * (tried[chosen] - graph.cost_s)
        if tried[chosen] == -math.inf or tried[chosen] - best_s <= least_gain:
            break

        best_s = tried[chosen]
        candidates = candidates if stages.singles else _promising(tried)
        candidates = [v for v in candidates if abs(v - chosen) > 1]
        stages = stages.with_single(chosen)

    if best_s < math.inf:
        refinement.adopt(stages if stages.singles else refinement.stages, best_s)
    return best_s


def _promising(tried: dict[int, float]) -> list[int]:
    """Returns the operators by falling bound, without neighbours of better ones.

    Neighbours have nearly the same bound.
    """
    best = sorted(tried, key=lambda v: -tried[v])
    return [v for k, v in enumerate(best) if all(abs(v - u) > 1 for u in best[:k])]


def _bounds_with(
    refinement: Refinement, stages: Stages, candidates: Sequence[int], deadline: float
) -> dict[int, float]:
    """Returns the bound with each of these operators as one more stage; -inf where time ran out."""
    found = dict.fromkeys(candidates, -math.inf)
    for v in candidates:
        if is_past(deadline):
            break
        found[v] = refinement.relaxed_bound(deadline, stages.with_single(v))
    return found


def _last_of_the_best(tried: dict[int, float], spacing: int) -> int:
    """Returns the best operator, or a later one near it with the same bound.

    With integers the later one has the better bound.
    """
    best = max(tried, key=lambda v: tried[v])
    as_much_s = tried[best] * (1 - _TIE)  # infinite where the best bound is
    return max(v for v in tried if abs(v - best) <= spacing and tried[v] >= as_much_s)


def scout_crowded(refinement: Refinement, *, deadline: float) -> float:
    """Does the same as `scout` for large graphs: tries the operators that leave least room.

    Args:
        refinement: its stages stay as they are where none of those tried raises the bound. Nothing
            is tried where the forward is short or too long, or nothing is left to refine.
        deadline: in `time.perf_counter` seconds.

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
        refinement.adopt(stages if cut == best[1] else stages.with_cut(cut), best_s)
    return best_s


def _crowded(refinement: Refinement) -> list[int]:
    """Returns the backward operators that leave least room, at some distance from each other.

    The room is what is left of the budget when all that can be recomputed is recomputed.
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
    """Returns the bound of the relaxation whose only windows are the stages between `cuts`.

    -inf where time ran out.
    """
    first, end = refinement.first, refinement.graph.num_operators
    windows = [(0, first), *pairwise(sorted({first, end, *(cut for cut in cuts if cut < end)}))]
    model = WindowModel(
        refinement.graph, windows, priced=windows, budget_bytes=refinement.budget_bytes
    )
    model.program.starts_from_last = True

    lazy = LazyRows(model, refinement.known.of(set(windows)))
    outcome = lazy.solve(deadline=deadline, is_relaxed=True)
    refinement.known.take_rows(lazy)
    return model.bound_s(outcome) if outcome.is_finished else -math.inf
