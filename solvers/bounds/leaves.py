"""Leaves of a tree of schedules, the two ways to divide one, and what these gained before."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from remat.solvers.bounds.leaf_relaxation import Choice, boundaries_of, unions_of
from remat.solvers.bounds.window import Window

_HIGHER_SIDE = 0.1  # weight of a split's higher side
_RECENT = 0.5  # weight of the last gain in the estimate

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Some of the schedules, and the model that bounds them.

    Attributes:
        bound: a lower bound on their objective.
        fixed: values of branching variables, the same in all of them.
        windows: of the model, without the forward.
    """

    bound: float
    fixed: Mapping[Choice, float]
    windows: frozenset[Window]


def refined_windows(windows: frozenset[Window], cut: Collection[int]) -> frozenset[Window]:
    """Returns `windows` and the windows of the stages that `cut` adds.

    Without the old windows the model's bound could be weaker.
    """
    return windows | unions_of(sorted({*boundaries_of(windows), *cut}), 2)


@dataclass(frozen=True, slots=True)
class Split:
    """A branching variable, and the bounds with it at 0 and at 1."""

    choice: Choice
    bounds: tuple[float, float]

    def gain(self, bound: float) -> float:
        """Returns the gain over a leaf's bound: the lower side's, plus a little of the higher's."""
        lower, higher = sorted(max(side - bound, 0.0) for side in self.bounds)
        return lower + _HIGHER_SIDE * higher

    def leaves(self, leaf: Leaf) -> tuple[Leaf, ...]:
        """Returns the two leaves that it splits a leaf into."""
        sides = enumerate(self.bounds)
        return tuple(
            replace(
                leaf, bound=max(leaf.bound, bound), fixed={**leaf.fixed, self.choice: float(side)}
            )
            for side, bound in sides
        )


@dataclass(frozen=True, slots=True)
class Refined:
    """A leaf with one more stage, the stage's gain, and its last boundary."""

    gain: float
    last: int
    leaf: Leaf


class Gains(Generic[Key]):
    """Gains of variables or stages so far: averages in which the last gain counts half."""

    def __init__(self) -> None:
        self._known: dict[Key, float] = {}

    def note(self, key: Key, gain: float) -> None:
        """Records one more gain."""
        self._known[key] = gain + (1 - _RECENT) * (self._known.get(key, gain) - gain)

    def best(self, keys: Collection[Key], least: float = 0.0) -> list[Key]:
        """Returns those of `keys` that gained more than `least`, best first."""
        found = [key for key in keys if self._known.get(key, -math.inf) > least]
        return sorted(found, key=lambda key: -self._known[key])

    def untried(self, keys: Collection[Key]) -> list[Key]:
        """Returns those of `keys` without a recorded gain, in their order."""
        return [key for key in keys if key not in self._known]

    def forget(self) -> None:
        """Forgets all gains."""
        self._known.clear()
