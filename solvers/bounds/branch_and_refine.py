"""Branch and refine: a tree over what is kept and recomputed, each leaf with its own stages.

A window model (`window`) sees what recomputing needs where it has stages of one operator, but a
model with such stages everywhere is too large. Its linear relaxation also takes decisions by
halves: half of a value is kept and half of it is recomputed. But few decisions count, such as
whether the largest gradient is kept over the pass through the network's middle. Once they are
taken, few stages suffice to show why either side is expensive, and these stages differ between the
two sides. So a *leaf* of the tree has

    branching variables   S[b, i] or R[w, j], fixed at 0 or 1: value i is in memory at boundary b,
                          operator j is recomputed inside w
    windows               of its model, unions of its stages

and the leaf with the lowest bound is processed, until none is below the cutoff:

- It is *split* by the fractional variable whose two relaxations have the best bounds (strong
  branching). Candidates are the variables that gained most before, and the largest not tried yet,
  one per value and operator.
- Where that gains little, it is *refined* by the stage with the best bound. Candidates are stages
  that read a value whose variables are fixed or fractional, those that the schedule of the point
  asks for (`refinement`), and those that gained before. The windows so far remain, as the refined
  model's bound could be weaker without them. The first two stages are chosen from the whole
  backward, by their bound with the largest variable fixed as well: a stage that forbids recomputing
  the largest gradient gains little while half of it is recomputed.

Every schedule of the fixed order has S and R of 0 or 1 at any boundary and window, so it belongs to
one leaf, whose relaxation, with any windows, bounds it. The lowest of all leaves' bounds, with
closed leaves at their cutoff, is a lower bound on all schedules. Each bound is derived from duals
(`safe_bound`).

Complexity: some 20 relaxations to split a leaf, as many to refine it; the number of leaves is
exponential in the worst case. Source: strong branching and gains as estimates, Achterberg, Koch,
Martin, "Branching rules revisited", 2005; refining each leaf separately is this package's own.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace

from remat.solvers.bounds.leaf_relaxation import HALF, Choice, LeafModel, unions_of
from remat.solvers.bounds.leaves import Gains, Leaf, Refined, Split, refined_windows
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.bounds.window import Window
from remat.solvers.core.accounting import Floats
from remat.solvers.core.incumbent import Search
from remat.solvers.core.interrupt import is_past

MOST_LEAVES = 2_000
_MOST_STAGES = 14  # in a leaf that can be split; more are added only where it can't
# stages; up to as many, all unions are windows; beyond, only unions of two neighbours
_ALL_UNIONS = 5
_MODELS = 40  # models cached, the last ones used
_TRIED_CHOICES = 10  # variables tried per split; up to half of them by what they gained before
# stages tried per refinement: those that gained before, and those never tried
_KNOWN_STAGES, _NEW_STAGES = 2, 6
_SURVEYED = 60  # operators all over the backward that are tried as stages
# the best of these are tried again for the second stage, the first few with their neighbours
_PROMISING, _NEIGHBOURED = 10, 4
_SURVEYED_BOUNDARIES = 5  # from five boundaries on, stages are no longer chosen by survey
_TIE = 1e-3  # share of the gain within which the later stage wins: with integers it bounds more
# share of the way from a leaf's bound to the cutoff; where a split gains that, no stage is tried
_ENOUGH = 0.15
# share of the best split's gain that a stage must gain to be preferred; it leaves one leaf, not two
_WORTH = 0.5
# least gain of an added stage, over the cost of keeping everything; 4 times that to try it again
_LEAST_GAIN = 5e-5
_LOOK_AHEAD = 5e-5  # over the same cost; a leaf whose bound exceeds the next leaf's by more waits
_ROUNDS, _ROUNDS_TO_TRY = 60, 5  # rounds of memory rows
# what a stage must have gained to be tried again: as a share of that cost, plus a share of the
# split's gain
_HOPEFUL = 4 * _LEAST_GAIN, 0.02


class Branching:
    """The tree so far.

    Attributes:
        leaves: the open leaves, a heap of (bound on the objective, number, leaf).
        num_leaves: number of leaves created so far.
    """

    def __init__(self, refinement: Refinement, *, most_leaves: int = MOST_LEAVES) -> None:
        """Starts with one leaf, with the stages of `refinement`; nothing is solved yet.

        Rows are shared with the refinement.
        """
        self._refinement, self._scale, self._most_leaves = refinement, 0.0, most_leaves
        self._models: OrderedDict[frozenset[Window], LeafModel] = OrderedDict()
        self.leaves: list[tuple[float, int, Leaf]] = []
        self.num_leaves, self._closed, self._is_stuck = 0, math.inf, False
        self._gains, self._gains_of_stages, self._gains_of_survey = (
            Gains[Choice](),
            Gains[tuple[int, ...]](),
            Gains[tuple[int, ...]](),
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
        """True where no leaf is open, the tree is too large, or its lowest leaf is indivisible."""
        return not self.leaves or self.num_leaves > self._most_leaves or self._is_stuck

    def bound_s(self) -> float:
        """Returns a lower bound on all schedules in fixed order; -inf before the first solve."""
        bound = min(self.leaves[0][0] if self.leaves else math.inf, self._closed)
        return (
            bound
            if not self._models or bound == -math.inf
            else next(iter(self._models.values())).model.bound_s_of(bound)
        )

    def work(self, *, deadline: float, cutoff_s: float) -> list[int] | None:
        """Splits or refines the leaf with the lowest bound.

        Returns the schedule of its point, within the budget or not, or None.

        Args:
            deadline: in `time.perf_counter` seconds.
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
            # no point, and no proof that there is none
            self._is_stuck = not is_solved and leaf.bound < cutoff and not is_past(deadline)
            self._push(leaf, cutoff)
            return None
        self._divide(leaf, model, outcome.point, deadline, cutoff)
        return model.steps(outcome.point, HALF)

    def _push(self, leaf: Leaf, cutoff: float = math.inf) -> None:
        """Adds an open leaf, or closes it where no schedule in it is below the cutoff."""
        if leaf.bound >= cutoff:
            self._closed = min(self._closed, cutoff)
            return
        self.num_leaves += 1
        heapq.heappush(self.leaves, (leaf.bound, self.num_leaves, leaf))

    def _model(self, windows: frozenset[Window]) -> LeafModel:
        """Returns the model with these windows, cached or new."""
        if windows not in self._models:
            self._models[windows] = LeafModel(self._refinement, windows)
            if len(self._models) > _MODELS:
                self._models.popitem(last=False)
        self._models.move_to_end(windows)
        return self._models[windows]

    def _divide(
        self, leaf: Leaf, model: LeafModel, point: Floats, deadline: float, cutoff: float
    ) -> None:
        """Replaces a leaf by the two of its best split, or by itself with one more stage."""
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
            # the leaf can't be divided, so the tree's bound stays at its bound
            self._is_stuck = not is_past(deadline)
            leaves = (leaf,)
        for part in leaves:
            self._push(part, cutoff)

    def _best_split(
        self, leaf: Leaf, model: LeafModel, point: Floats, deadline: float, cutoff: float
    ) -> Split | None:
        """Returns the tried split with the highest lower side; None without one, or out of time."""
        choices = model.undecided(point)
        known = self._gains.best(choices)[: _TRIED_CHOICES // 2]
        # one per value and operator, as those of several windows have similar bounds
        new: dict[tuple[int, bool], Choice] = {}
        for choice in self._gains.untried(choices):
            new.setdefault((choice.index, choice.last < 0), choice)
        tried = [*known, *list(new.values())[: _TRIED_CHOICES - len(known)]]
        best: Split | None = None
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
    ) -> Split:
        """Returns the bounds with this variable at 0 and 1, at most the cutoff.

        No memory rows are added.
        """
        sides = [
            model.solve({**leaf.fixed, choice: side}, rounds=1, deadline=deadline).bound
            for side in (0.0, 1.0)
        ]
        return Split(choice, (min(sides[0], cutoff), min(sides[1], cutoff)))

    def _best_refined(
        self,
        leaf: Leaf,
        model: LeafModel,
        point: Floats,
        deadline: float,
        cutoff: float,
        split: float,
    ) -> Refined | None:
        """Returns the leaf with the stage that gains most, of those tried.

        None where there is none, or out of time. `split` is the best split's gain without a stage.
        """
        best: Refined | None = None
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
                self._gains_of_stages.forget()  # nothing else is left: try all stages again
            asked = self._asked_for(leaf, model, point, split)
            best = self._best_of(asked, self._gains_of_stages, leaf, deadline, cutoff, None) or best
        return None if is_past(deadline) else best

    def _best_of(
        self,
        cuts: Iterable[tuple[int, ...]],
        gains: Gains[tuple[int, ...]],
        leaf: Leaf,
        deadline: float,
        cutoff: float,
        split: float | None,
    ) -> Refined | None:
        """Tries these stages until the deadline, records their gains, and returns the best."""
        best: Refined | None = None
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
    ) -> Refined:
        """Evaluates adding one stage: the refined leaf, and its gain in the bound.

        With `split`, the gain may also be that of splitting by the largest variable, less `split`.
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
        return Refined(gain, max(cut), replace(refined, bound=bound))

    def _asked_for(
        self, leaf: Leaf, model: LeafModel, point: Floats, split: float
    ) -> list[tuple[int, ...]]:
        """Returns the stages that `model` asks for and that gained before or were never tried."""
        asked = model.asked_for(point, leaf.fixed)
        known = self._gains_of_stages.best(
            asked, _HOPEFUL[0] * self._scale + _HOPEFUL[1] * max(split, 0.0)
        )[:_KNOWN_STAGES]
        return [*known, *self._gains_of_stages.untried(asked)[:_NEW_STAGES]]

    def _surveyed(self, model: LeafModel) -> list[tuple[int, ...]]:
        """Returns stages of one operator all over the backward.

        Once all were tried, returns the best of them and the neighbours of these.
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

    Offers the schedules of the leaves' points.

    Args:
        search: with a schedule that fits.
        refinement: the tree starts with its stages, and adds rows to it.
        cutoff_s: returns the bound that closes the gap; None where there is none.
        deadline: in `time.perf_counter` seconds.
        most_leaves: the tree is over with more.
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
