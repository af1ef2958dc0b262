"""The closed-form families as starting schedules of `auto`.

`auto` never costs more than one of them, and the least budget is never above theirs.
"""

from __future__ import annotations

from contextlib import suppress

from remat.core.errors import SolverError
from remat.solvers.auto.minimum import minimum
from remat.solvers.auto.solver import NAMES, Auto
from remat.solvers.baselines.chen import ChenGreedy
from remat.solvers.baselines.families import FAMILIES, Families
from remat.tracers.synthetic import chain

GRAPH = chain(12)
UNLIMITED = 1 << 60


def test_auto_adopts_a_familys_schedule_if_it_finds_nothing_else() -> None:
    found = ChenGreedy().solve(GRAPH, budget_bytes=minimum(GRAPH).peak_bytes * 2)
    assert found.schedule is not None
    others = tuple(name for name in NAMES if name != "families")
    solver = Auto(gap=0.0, time_limit_s=10.0, without=others)
    solved = solver.solve(GRAPH, budget_bytes=found.peak_bytes)
    assert solved.cost_s <= found.cost_s
    assert solved.found_by == "families"


def test_the_least_budget_is_not_above_that_of_a_family() -> None:
    least = minimum(GRAPH).peak_bytes
    assert any(True for _ in Families(GRAPH).leanest(UNLIMITED))
    for family in FAMILIES:
        with suppress(SolverError):  # a chain has no blocks
            assert least <= family.solve(GRAPH, budget_bytes=UNLIMITED).minimum_bytes
