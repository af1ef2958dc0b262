"""Stages of one operator chosen by what they bound: each is tried in the linear relaxation, and the one that bounds most is taken.

Refinement cuts where a schedule fails. Where the budget is tight, it fails nearly everywhere, and the one operator whose own
window would raise the bound is found late or never: on a U-Net at half of its peak it is a convolution of the widest layer, which
alone closes three quarters of the gap. A relaxation with one more stage is solved in a twentieth of a second on small graphs,
so operators all over the backward are tried, then with the best of them the next most promising, until one gains little.

Complexity: 26 relaxations for the first stage, of operators evenly spread over the backward, fewer and
larger ones for the next two. Bounds are those of the window model, so of all schedules of the fixed order. Source: this package's own.
"""

from __future__ import annotations

from .interrupt import is_past
from .refinement import Refinement

_MOST_FORWARD = 250  # operators
_TRIED = 26, 10, 6  # operators, for each stage chosen here; refinement adds more
_MOST_COLUMNS = 6_000  # of a model that is worth its time
_APART = 1  # operators; neighbours bound alike
_TIE = 1e-6
_LEAST_GAIN = 0.03  # of the overhead that is proved


def scout(refinement: Refinement, *, deadline: float) -> float:
    """Replaces the stages of `refinement` by those that bound most; returns the bound, -inf where none was found.

    Args:
        refinement: its stages stay as they are where no other bounds more than none, or its forward is long.
        deadline: of `time.perf_counter`, in seconds.
    """
    graph = refinement.graph
    if refinement.is_over or refinement.first > _MOST_FORWARD:
        return float("-inf")
    before = refinement.singles, refinement.cuts
    refinement.singles, refinement.cuts = set(), set()
    best_s = refinement.relaxed_bound(deadline)
    scores = dict.fromkeys(range(refinement.first, graph.num_operators), 0.0)
    for count in _TRIED:
        if refinement.num_columns > _MOST_COLUMNS or is_past(deadline):
            break
        scores |= _tried(refinement, scores, count, deadline)
        chosen = _latest_of_ties(refinement, max(scores, key=lambda v: scores[v]), scores, deadline)
        if scores[chosen] - best_s <= _LEAST_GAIN * (scores[chosen] - graph.cost_s):
            break
        best_s = scores.pop(chosen)
        refinement.singles.add(chosen)
    if not refinement.singles:
        refinement.singles, refinement.cuts = before
    refinement.best_s = max(refinement.best_s, best_s)
    return best_s


def _latest_of_ties(refinement: Refinement, chosen: int, scores: dict[int, float], deadline: float) -> int:
    """Returns the operator after `chosen` where it bounds as much: with integers the later of two that belong together bounds more."""
    later = {chosen + 1} & set(scores)
    for v in later:
        scores[v] = _bound_with(refinement, v, deadline)
    return max(later, default=chosen) if all(scores[v] >= scores[chosen] * (1 - _TIE) for v in later) else chosen


def _bound_with(refinement: Refinement, v: int, deadline: float) -> float:
    """The bound with one more stage, of operator `v`."""
    refinement.singles.add(v)
    bound_s = refinement.relaxed_bound(deadline)
    refinement.singles.remove(v)
    return bound_s


def _tried(refinement: Refinement, scores: dict[int, float], count: int, deadline: float) -> dict[int, float]:
    """Returns the bounds with one more stage: of those that promised most when last tried, or evenly spread ones where none was."""
    candidates = list(scores)
    if refinement.singles:
        best = sorted(scores, key=lambda v: -scores[v])
        candidates = [v for k, v in enumerate(best) if all(abs(v - u) > _APART for u in best[:k])]
    else:
        candidates = candidates[:: max(1, -(-len(candidates) // count))]
    return {v: _bound_with(refinement, v, deadline) for v in candidates[:count] if not is_past(deadline)}
