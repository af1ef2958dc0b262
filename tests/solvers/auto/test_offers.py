"""Schedules offered to a search are repaired if they do not fit and may be better."""

from __future__ import annotations

import pytest

from remat.core.schedule import Schedule, simulate
from remat.solvers.auto import starting
from remat.solvers.auto.minimum import minimum
from remat.solvers.auto.starting import offer_with_margins
from remat.solvers.bounds.memory_margins import Reserves
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.core.incumbent import Search
from remat.tracers.synthetic import transformer

GRAPH = transformer(4)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    """A search near the least budget, where reserves only give the keep-all schedule."""
    monkeypatch.setattr(starting, "is_compiled", lambda: True)
    monkeypatch.setattr(
        Reserves, "schedules", lambda self, deadline: iter([list(range(GRAPH.num_operators))] * 5)
    )
    return Search(
        GRAPH, budget_bytes=minimum(GRAPH).peak_bytes * 11 // 10, gap=0.0, time_limit_s=60.0
    )


def test_reserves_that_do_not_fit_are_repaired(search: Search) -> None:
    offer_with_margins(search, Refinement(search.graph, budget_bytes=search.budget_bytes))
    assert search.steps is not None
    assert (
        simulate(search.graph, Schedule.from_steps(search.graph, search.steps)).peak_bytes
        <= search.budget_bytes
    )


def test_a_costlier_schedule_is_not_repaired(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "repaired", lambda *_, **__: pytest.fail("repaired"))
    search.offer(minimum(GRAPH).steps)
    search.cost_s, search.bound_s = search.graph.cost_s * (1 - 1e-9), 0.0
    assert not search.is_over  # else nothing is offered at all
    offer_with_margins(search, Refinement(search.graph, budget_bytes=search.budget_bytes))
    assert search.num_starts == 1  # keeping everything was offered, and does not fit


def test_the_same_schedule_is_repaired_once_by_each_rule(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = []
    monkeypatch.setattr(starting, "repaired", lambda *_, rule, **__: rules.append(rule))
    offer_with_margins(search, Refinement(search.graph, budget_bytes=search.budget_bytes))
    assert len(rules) == len(set(rules)) > 1
