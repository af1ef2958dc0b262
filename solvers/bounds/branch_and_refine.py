"""Branch and refine.

A tree over what is kept and computed again, in which each leaf has stages of its own.

A window model (`window`) sees what recomputing needs where it has stages of one operator, and one
model with such stages everywhere is too large. Its linear relaxation also splits what a schedule
does as a whole: half of a value is kept and half of it computed again. But few decisions count, say
whether the largest gradient is kept over the pass through the network's middle, and once they are
taken, few stages show why either way is expensive; which ones differs between the two. So a
*leaf* of the tree is

    choices   S[b, i] or R[w, j] fixed at 0 or 1: value i is in memory at boundary b, operator j is
    computed again inside w windows   of its model, unions of its stages

and the leaf of the least bound is worked on, until none is below the cutoff:

- *split* it by the choice whose two relaxations bound most (strong branching), of some that the
  relaxed point leaves in between: those that gained most before, and the largest not tried yet, one
  of each value and operator;
- or where that gains little, *refine* it by the stage that bounds most. Tried are those where
  something is read that is fixed or undecided, those that the schedule of the point asks for
  (`refinement`), and those that gained before. The windows there were remain, or the refined model
  would bound less at first. The first two stages are chosen from the whole backward, by what they
  bound once the largest choice is taken as well: what forbids to compute the largest gradient again
  bounds little as long as half of it is.

Every schedule of the fixed order has S and R of 0 or 1 at any boundary and window, so it is in one
leaf, whose relaxation, with any windows, bounds it: the least of all leaves' bounds, closed ones at
their cutoff, is one of all schedules. Each is derived from duals (`safe_bound`).

Complexity: some 20 relaxations to split a leaf, as many to refine it; the number of leaves is
exponential in the worst case. Source: strong branching and gains as estimates, Achterberg, Koch,
Martin, "Branching rules revisited", 2005; that each leaf is refined for itself is this package's
own.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from remat.solvers.bounds.leaf_relaxation import HALF, Choice, LeafModel, boundaries_of, unions_of
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.bounds.window import Window
from remat.solvers.core.accounting import Floats
from remat.solvers.core.incumbent import Search
from remat.solvers.core.interrupt import is_past

MOST_LEAVES = 2_000
_MOST_STAGES = 14  # where a leaf can be split
_ALL_UNIONS = 5  # stages, up to which all their unions are windows; beyond, those of two neighbours
_MODELS = 40  # kept, the last used
_TRIED_CHOICES = 10  # for each split; half of them by what they gained before
# tried for each refinement: that gained before, and that were never tried
_KNOWN_STAGES, _NEW_STAGES = 2, 6
_SURVEYED = 60  # operators all over the backward that are tried as stages
# of them that are tried once more beside the best, and those with the operators next to them
_PROMISING, _NEIGHBOURED = 10, 4
_SURVEYED_BOUNDARIES = 5  # of a model where stages are no longer chosen so: it has two
_TIE = 1e-3  # of the gain, where the later stage is taken: with integers it bounds more
# of the way from a leaf's bound to the cutoff; where a split gains that, no stage is looked for
_ENOUGH = 0.15
# of what the best split gains, for a stage to be taken instead; all of that it leaves one leaf, not
# two
_WORTH = 0.5
# of the cost of keeping everything, of a stage for it to be taken; of one that is tried again, 4
# times as much
_LEAST_GAIN = 5e-5
_HIGHER_SIDE = 0.1  # how much a split's higher side counts
_LOOK_AHEAD = 5e-5  # of that cost, above the next leaf's bound, for a leaf to wait
_ROUNDS, _ROUNDS_TO_TRY = 60, 5  # of memory rows
_RECENT = 0.5  # how much the last gain counts in the estimate
# what a stage must have gained to be tried again: so much, and so much of the split's gain
_HOPEFUL = 4 * _LEAST_GAIN, 0.02

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Some of the schedules, and the model that bounds them.

    Attributes:
        bound: a lower bound on the objective of all of them.
        fixed: what all of them do (1) and don't (0).
        windows: of the model, without the forward.
    """

    bound: float
    fixed: Mapping[Choice, float]
    windows: frozenset[Window]


def refined_windows(windows: frozenset[Window], cut: Collection[int]) -> frozenset[Window]:
    """Windows with further boundaries.

    Those there were, without which the model may bound less, and those of the new stages.
    """
    return windows | unions_of(sorted({*boundaries_of(windows), *cut}), 2)


@dataclass(frozen=True, slots=True)
class _Split:
    """A choice, and what leaving it undone (0) and doing it (1) bound."""

    choice: Choice
    bounds: tuple[float, float]

    def gain(self, bound: float) -> float:
        """What it raises a leaf's bound by; the higher side is a small part of it."""
        lower, higher = sorted(max(side - bound, 0.0) for side in self.bounds)
        return lower + _HIGHER_SIDE * higher

    def leaves(self, leaf: Leaf) -> tuple[Leaf, ...]:
        """Returns the two that it splits a leaf into."""
        sides = enumerate(self.bounds)
        return tuple(
            replace(
                leaf, bound=max(leaf.bound, bound), fixed={**leaf.fixed, self.choice: float(side)}
            )
            for side, bound in sides
        )


@dataclass(frozen=True, slots=True)
class _Refined:
    """A leaf with one more stage, what that gains, and the stage's last boundary."""

    gain: float
    last: int
    leaf: Leaf


class _Gains(Generic[Key]):
    """What choices or stages gained so far, an average in which the last gain counts half."""

    def __init__(self) -> None:
        self._known: dict[Key, float] = {}

    def note(self, key: Key, gain: float) -> None:
        """Takes one more gain over."""
        self._known[key] = gain + (1 - _RECENT) * (self._known.get(key, gain) - gain)

    def best(self, keys: Collection[Key], least: float = 0.0) -> list[Key]:
        """Returns those of `keys` that gained more than `least`, best first."""
        found = [key for key in keys if self._known.get(key, -math.inf) > least]
        return sorted(found, key=lambda key: -self._known[key])

    def untried(self, keys: Collection[Key]) -> list[Key]:
        """Returns those of `keys` that are not known, in their order."""
        return [key for key in keys if key not in self._known]

    def forget(self) -> None:
        """Forgets all of them."""
        self._known.clear()


class Branching:
    """The tree so far.

    Attributes:
        leaves: those that are left, as a heap of (bound on the objective, number, leaf).
        num_leaves: how many there were so far.
    """

    def __init__(self, refinement: Refinement, *, most_leaves: int = MOST_LEAVES) -> None:
        """Starts with one leaf, which has the stages of `refinement`.

        Rows are shared with it. Nothing is solved yet.
        """
        self._refinement, self._scale, self._most_leaves = refinement, 0.0, most_leaves
        self._models: OrderedDict[frozenset[Window], LeafModel] = OrderedDict()
        self.leaves: list[tuple[float, int, Leaf]] = []
        self.num_leaves, self._closed, self._is_stuck = 0, math.inf, False
        self._gains, self._gains_of_stages, self._gains_of_survey = (
            _Gains[Choice](),
            _Gains[tuple[int, ...]](),
            _Gains[tuple[int, ...]](),
        )
        if not refinement.is_open:
            self._closed = -math.inf
        else:
            boundaries = refinement.boundaries
            width = len(boundaries) if len(boundaries) <= _ALL_UNIONS + 1 else 2
            self._push(
                Leaf(
                    -math.inf,
                    {},
                    frozenset({*unions_of(boundaries, width), (boundaries[0], boundaries[-1])}),
                )
            )

    @property
    def is_over(self) -> bool:
        """True where no leaf is left, the tree is too large, or nothing divides the leaf of the
        least bound.
        """
        return not self.leaves or self.num_leaves > self._most_leaves or self._is_stuck

    def bound_s(self) -> float:
        """A lower bound on the cost of every schedule of the fixed order.

        -inf where nothing was solved.
        """
        bound = min(self.leaves[0][0] if self.leaves else math.inf, self._closed)
        return (
            bound
            if not self._models or bound == -math.inf
            else next(iter(self._models.values())).model.bound_s_of(bound)
        )

    def work(self, *, deadline: float, cutoff_s: float) -> list[int] | None:
        """Splits or refines the leaf of the least bound.

        Returns the schedule of its point, within the budget or not, if it has one.

        Args:
            deadline: of `time.perf_counter`, in seconds.
            cutoff_s: leaves without a cheaper schedule are closed.
        """
        _, _, leaf = heapq.heappop(self.leaves)
        model = self._model(leaf.windows)
        self._scale, cutoff = (
            model.model.objective(2 * self._refinement.graph.cost_s),
            model.model.objective(cutoff_s),
        )
        outcome = model.solve(leaf.fixed, rounds=_ROUNDS, deadline=deadline)
        leaf = replace(leaf, bound=max(leaf.bound, outcome.bound))
        next_bound = self.leaves[0][0] if self.leaves else math.inf
        is_ahead = leaf.bound > next_bound + _LOOK_AHEAD * self._scale
        is_solved = outcome.point is not None and leaf.bound > -math.inf
        if outcome.point is None or not is_solved or is_ahead or leaf.bound >= cutoff:
            # it may have no point, unproved
            self._is_stuck = not is_solved and leaf.bound < cutoff and not is_past(deadline)
            self._push(leaf, cutoff)
            return None
        self._divide(leaf, model, outcome.point, deadline, cutoff)
        return model.steps(outcome.point, HALF)

    def _push(self, leaf: Leaf, cutoff: float = math.inf) -> None:
        """Keeps a leaf, or closes it where no schedule in it is below the cutoff."""
        if leaf.bound >= cutoff:
            self._closed = min(self._closed, cutoff)
            return
        self.num_leaves += 1
        heapq.heappush(self.leaves, (leaf.bound, self.num_leaves, leaf))

    def _model(self, windows: frozenset[Window]) -> LeafModel:
        """Returns the model that has these windows: one of the last used, or a new one."""
        if windows not in self._models:
            self._models[windows] = LeafModel(self._refinement, windows)
            if len(self._models) > _MODELS:
                self._models.popitem(last=False)
        self._models.move_to_end(windows)
        return self._models[windows]

    def _divide(
        self, leaf: Leaf, model: LeafModel, point: Floats, deadline: float, cutoff: float
    ) -> None:
        """Puts the leaves of the best split, or the leaf with one more stage, in its place."""
        split = self._best_split(leaf, model, point, deadline, cutoff)
        gain, refined = -math.inf if split is None else split.gain(leaf.bound), None
        if split is None or (
            gain < _ENOUGH * (cutoff - leaf.bound) and len(model.boundaries) <= _MOST_STAGES
        ):
            refined = self._best_refined(leaf, model, point, deadline, cutoff, gain)
        if refined is not None and (
            split is None or refined.gain >= max(_WORTH * gain, _LEAST_GAIN * self._scale)
        ):
            leaves: tuple[Leaf, ...] = (refined.leaf,)
        elif split is not None:
            leaves = split.leaves(leaf)
        else:
            # nothing divides it, and its bound is the tree's
            self._is_stuck = not is_past(deadline)
            leaves = (leaf,)
        for part in leaves:
            self._push(part, cutoff)

    def _best_split(
        self, leaf: Leaf, model: LeafModel, point: Floats, deadline: float, cutoff: float
    ) -> _Split | None:
        """Returns the split whose lower side is highest, of those that are tried.

        None where there is none, or no time.
        """
        choices = model.undecided(point)
        known = self._gains.best(choices)[: _TRIED_CHOICES // 2]
        # one of each value and operator, as those of several windows bound alike
        new: dict[tuple[int, bool], Choice] = {}
        for choice in self._gains.untried(choices):
            new.setdefault((choice.index, choice.last < 0), choice)
        tried = [*known, *list(new.values())[: _TRIED_CHOICES - len(known)]]
        best: _Split | None = None
        for choice in tried or choices[:_TRIED_CHOICES]:
            split = self._split(leaf, model, choice, deadline, cutoff)
            if is_past(deadline):
                return None
            self._gains.note(choice, split.gain(leaf.bound))
            if best is None or sorted(split.bounds) > sorted(best.bounds):
                best = split
            if min(best.bounds) >= cutoff:
                break
        return best

    @staticmethod
    def _split(
        leaf: Leaf, model: LeafModel, choice: Choice, deadline: float, cutoff: float
    ) -> _Split:
        """Returns what the relaxations with this choice bound, at most the cutoff.

        No memory rows are added.
        """
        sides = [
            model.solve({**leaf.fixed, choice: side}, rounds=1, deadline=deadline).bound
            for side in (0.0, 1.0)
        ]
        return _Split(choice, (min(sides[0], cutoff), min(sides[1], cutoff)))

    def _best_refined(
        self,
        leaf: Leaf,
        model: LeafModel,
        point: Floats,
        deadline: float,
        cutoff: float,
        split: float,
    ) -> _Refined | None:
        """Returns the leaf with the stage that gains most, of those that are tried.

        None where there is none, or no time.

        `split` is what the best split gains without it.
        """
        best: _Refined | None = None
        if not leaf.fixed and len(model.boundaries) < _SURVEYED_BOUNDARIES:
            best = self._best_of(
                self._surveyed(model),
                self._gains_of_survey,
                leaf,
                deadline,
                cutoff,
                max(split, 0.0),
            )
        if best is None or best.gain <= 0:
            if split == -math.inf:
                self._gains_of_stages.forget()  # what gained nothing elsewhere is all that is left
            asked = self._asked_for(leaf, model, point, split)
            best = self._best_of(asked, self._gains_of_stages, leaf, deadline, cutoff, None) or best
        return None if is_past(deadline) else best

    def _best_of(
        self,
        cuts: Iterable[tuple[int, ...]],
        gains: _Gains[tuple[int, ...]],
        leaf: Leaf,
        deadline: float,
        cutoff: float,
        split: float | None,
    ) -> _Refined | None:
        """Returns the leaf with that of these stages which gains most, of those it has time for,
        and notes what they gain.
        """
        best: _Refined | None = None
        for cut in cuts:
            found = self._refined(leaf, cut, deadline, cutoff, split)
            if is_past(deadline):
                break
            gains.note(cut, min(found.gain, self._scale))
            if (
                best is None
                or found.gain > best.gain
                or (found.gain >= best.gain * (1 - _TIE) and found.last > best.last)
            ):
                best = found
        return best

    def _refined(
        self, leaf: Leaf, cut: tuple[int, ...], deadline: float, cutoff: float, split: float | None
    ) -> _Refined:
        """Returns the leaf with one more stage and what that gains, alone or, given a `split`,
        beyond it with the largest choice taken.
        """
        refined = replace(leaf, windows=refined_windows(leaf.windows, cut))
        model = self._model(refined.windows)
        outcome = model.solve(leaf.fixed, rounds=_ROUNDS_TO_TRY, deadline=deadline)
        bound = max(leaf.bound, outcome.bound)
        gain = bound - leaf.bound
        if outcome.point is not None and bound < cutoff and split is not None:
            for choice in model.undecided(outcome.point)[:1]:
                gain = max(
                    gain,
                    self._split(leaf, model, choice, deadline, cutoff).gain(leaf.bound) - split,
                )
        return _Refined(gain, max(cut), replace(refined, bound=bound))

    def _asked_for(
        self, leaf: Leaf, model: LeafModel, point: Floats, split: float
    ) -> list[tuple[int, ...]]:
        """Returns the stages that are asked for and gained before, or were never tried."""
        asked = model.asked_for(point, leaf.fixed)
        known = self._gains_of_stages.best(
            asked, _HOPEFUL[0] * self._scale + _HOPEFUL[1] * max(split, 0.0)
        )[:_KNOWN_STAGES]
        return [*known, *self._gains_of_stages.untried(asked)[:_NEW_STAGES]]

    def _surveyed(self, model: LeafModel) -> list[tuple[int, ...]]:
        """Returns stages of one operator all over the backward.

        Once they were tried, the best of them and what is next to these.
        """
        first, end = model.boundaries[0], model.boundaries[-1]
        spread: list[tuple[int, ...]] = [
            (v, v + 1) for v in range(first, end, -(-(end - first) // _SURVEYED))
        ]
        if untried := self._gains_of_survey.untried(spread):
            return untried
        best = [
            cut for cut in self._gains_of_survey.best(spread) if not {*cut} & {*model.boundaries}
        ]
        apart = [
            cut for k, cut in enumerate(best) if not any({*cut} & {*other} for other in best[:k])
        ][:_PROMISING]
        beside = {u for v, _ in apart[:_NEIGHBOURED] for u in (v - 1, v + 1) if first <= u < end}
        return [
            *apart,
            *(
                (u, u + 1)
                for u in sorted(beside)
                if (u, u + 1) not in apart and u not in model.boundaries
            ),
        ]


def raise_bound_by_branching(
    search: Search,
    refinement: Refinement,
    cutoff_s: Callable[[], float | None],
    *,
    deadline: float,
    most_leaves: int = MOST_LEAVES,
) -> None:
    """Raises the bound of a search until its gap is closed, the tree is over, or the deadline.

    Offers the schedules of its points.

    Args:
        search: has a schedule that fits.
        refinement: whose stages the tree starts with; left as it is, but for rows.
        cutoff_s: the cost at which a bound closes the gap.
        deadline: of `time.perf_counter`, in seconds.
        most_leaves: of the tree, before it is over.
    """
    tree = Branching(refinement, most_leaves=most_leaves)
    while not (search.is_over or tree.is_over or is_past(deadline)):
        cutoff = cutoff_s()
        if cutoff is None:
            return
        steps = tree.work(deadline=deadline, cutoff_s=cutoff)
        search.raise_bound(tree.bound_s())
        if steps is not None:
            search.offer(steps)
