"""Stages of one operator chosen by what they bound: each is tried in the linear relaxation, and the one that bounds most is taken.

Refinement cuts where a schedule fails. Where the budget is tight, it fails nearly everywhere, and the one operator whose own
window would raise the bound is found late or never. A relaxation with one more stage is solved soon on small
graphs, so operators all over the backward are tried, then with the best of them those that came next, until one gains little.

Complexity: some 50 relaxations for the first stage, of operators evenly spread over the backward and of those around the best, fewer and
larger ones for the next two.
Bounds are those of the window model, so of all schedules of the fixed order. Source: this package's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .hierarchy import MOST_FORWARD
from .interrupt import is_past
from .refinement import Refinement

_TRIED = 50, 10, 6  # operators, for each stage chosen here; refinement adds more
_MOST_COLUMNS = 6_000  # of a model that is worth its time
_TIE = 1e-6
_LEAST_GAIN = 0.03  # of the overhead that is proved


def scout(refinement: Refinement, *, deadline: float) -> float:
    """Replaces the stages of `refinement` by those that bound most; returns the best bound of the relaxations, -inf where there is none.

    Args:
        refinement: its stages stay as they are where no stage of one operator bounds more than none; it is left alone where its
            forward is long, or nothing is left to refine.
        deadline: of `time.perf_counter`, in seconds.
    """
    graph = refinement.graph
    if refinement.is_over or refinement.first > MOST_FORWARD:
        return -math.inf
    before = refinement.singles, refinement.cuts
    refinement.singles, refinement.cuts = set(), set()
    best_s = refinement.relaxed_bound(deadline)
    backward, candidates = range(refinement.first, graph.num_operators), list[int]()
    spacing = max(1, -(-len(backward) // _TRIED[0]))
    for count in _TRIED:
        if refinement.num_columns > _MOST_COLUMNS or is_past(deadline):
            break
        candidates = candidates if refinement.singles else list(backward[::spacing])
        tried = _bounds_with(refinement, candidates[:count], deadline)
        if not tried:
            break
        best = max(tried, key=lambda v: tried[v])
        around = [v for v in range(best - spacing, best + spacing + 1) if v in backward and v not in tried and v not in refinement.singles]
        tried |= _bounds_with(refinement, around, deadline)
        chosen = _last_of_the_best(tried, spacing)
        if tried[chosen] - best_s <= _LEAST_GAIN * (tried[chosen] - graph.cost_s):
            break
        best_s = tried[chosen]
        refinement.singles.add(chosen)
        candidates = [v for v in (candidates if len(refinement.singles) > 1 else _promising(tried)) if abs(v - chosen) > 1]
    if not refinement.singles:
        refinement.singles, refinement.cuts = before
    refinement.best_s = max(refinement.best_s, best_s)
    return best_s


def _promising(tried: dict[int, float]) -> list[int]:
    """Returns the operators that bounded most, without the neighbours of better ones, which bound alike."""
    best = sorted(tried, key=lambda v: -tried[v])
    return [v for k, v in enumerate(best) if all(abs(v - u) > 1 for u in best[:k])]


def _bounds_with(refinement: Refinement, candidates: Sequence[int], deadline: float) -> dict[int, float]:
    """Returns the bounds with one more stage, of each of these operators, which are none yet; -inf where there is no time for it."""
    found = dict.fromkeys(candidates, -math.inf)
    for v in candidates:
        if is_past(deadline):
            break
        refinement.singles.add(v)
        found[v] = refinement.relaxed_bound(deadline)
        refinement.singles.remove(v)
    return found


def _last_of_the_best(tried: dict[int, float], spacing: int) -> int:
    """Returns the best operator, or a later one near it that bounds as much: with integers the later one bounds more."""
    best = max(tried, key=lambda v: tried[v])
    return max(v for v in tried if abs(v - best) <= spacing and tried[v] >= tried[best] - _TIE * abs(tried[best]))
