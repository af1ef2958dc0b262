"""Solves problems at budgets around the least one, under short limits, and checks them.

`test_near_least.py` looks at a few, `experiments/near_least.py` at thousands.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import remat
from remat.core.graph import Graph
from remat.core.solution import Solution
from remat.core.validate import validate
from remat.solvers.auto import raising
from remat.solvers.auto.minimum import minimum
from remat.solvers.bounds.lagrangian import Lagrangian
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.bounds.window import WindowModel
from remat.solvers.exhaustive import states
from remat.tracers import synthetic

KINDS: dict[str, Callable[[int, int], Graph]] = {
    "step": lambda count, seed: synthetic.random_step(count, seed=seed),
    "training": lambda count, seed: synthetic.random_layered(
        count // 2, seed=seed, width=1 + seed % 4
    ),
    "layered": lambda count, seed: synthetic.random_layered(
        count, seed=seed, width=1 + seed % 4, is_training=False
    ),
    "chain": lambda count, seed: synthetic.chain(
        count // 2, size=1 + seed % 9, has_phases=seed % 2 == 0
    ),
    "skips": lambda count, seed: synthetic.chain_with_skips(
        count // 2, span=2 + seed % 3, size=1 + seed % 9
    ),
}
"""Functions, by name, that make a graph from its approximate number of operators and a seed."""
LIMITS_S = 0.2, 0.5, 1.0, 3.0
_SHARES_OF_LIMITS = 8, 4, 2, 1
_BOUNDS = (
    (raising, "scout"),
    (Refinement, "relaxed_bound"),
    (WindowModel, "bound_s_of"),
    (Lagrangian, "raise_bound"),
)


class Problem:
    """A random graph, a budget from 0.9 to 1.1 of its least, and a limit, all from one seed."""

    def __init__(self, seed: int) -> None:
        """Draws the graph, the budget and the limit."""
        draw = random.Random(seed)
        self.seed, self.kind = seed, draw.choice(list(KINDS))
        self.graph = KINDS[self.kind](draw.randint(4, 48), draw.randrange(2**20))
        self.limit_s = draw.choices(LIMITS_S, _SHARES_OF_LIMITS)[0]
        self.is_exhausted = draw.random() < 0.5  # if small; otherwise it is solved as a large one
        self.budget_bytes = max(
            1, round(minimum(self.graph, time_limit_s=5.0).peak_bytes * draw.uniform(0.9, 1.1))
        )

    def __repr__(self) -> str:
        """Names the seed, which makes the problem again."""
        return (
            f"Problem({self.seed}): {self.graph.num_operators} operators of {self.kind!r}, "
            f"{self.budget_bytes:,} bytes, {self.limit_s} s"
        )


def outcome(problem: Problem) -> str:
    """Solves a problem and returns the outcome: a status, or the error's name and status.

    Raises:
        AssertionError: a bound is NaN, or the schedule is not valid.
    """
    told: list[float] = []
    with _checked_bounds(), pytest.MonkeyPatch.context() as patch:
        if not problem.is_exhausted:
            patch.setattr(states, "is_small", lambda graph: False)

        try:
            solution = remat.solve(
                problem.graph,
                problem.budget_bytes,
                time_limit_s=problem.limit_s,
                progress=lambda progress: told.append(progress.bound_s),
            )
        except remat.BudgetError as error:
            refusal = error
        else:
            return _checked_status(problem, solution, told)

    assert refusal.minimum_bytes > problem.budget_bytes
    return f"BudgetError, {'proved' if refusal.is_proved else 'not proved'}"


def _checked_status(problem: Problem, solution: Solution, told: Sequence[float]) -> str:
    assert all(map(math.isfinite, (*told, solution.lower_bound_s, solution.gap))), told
    assert solution.lower_bound_s <= solution.cost_s
    assert solution.schedule is not None
    assert not validate(problem.graph, solution.schedule, budget_bytes=problem.budget_bytes)
    return str(solution.status)


@contextmanager
def _checked_bounds() -> Iterator[None]:
    """Checks that no intermediate bound is NaN."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _BOUNDS:
            patch.setattr(owner, name, _checked(getattr(owner, name)))
        yield


def _checked(method: Callable[..., float]) -> Callable[..., float]:
    def checked(*args: Any, **kwargs: Any) -> float:
        bound = method(*args, **kwargs)
        assert not math.isnan(bound), method.__qualname__
        return bound

    return checked
