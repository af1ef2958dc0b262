"""Least budgets are remembered: one that was named is met later, in whatever time there is."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers.auto import minimum as module
from remat.solvers.auto.minimum import Minimum, minimum
from remat.solvers.auto.solver import Auto
from remat.tracers.synthetic import random_layered, transformer


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_searched", OrderedDict())


def no_search(graph: Graph, *rest: object) -> Minimum:
    raise AssertionError("the least budget is searched for again")


def test_a_named_least_budget_is_met_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: the next solve searches again, for as long as its own limit allows."""
    graph = transformer(2)
    least = minimum(graph)
    monkeypatch.setattr(module, "_minimum", no_search)
    monkeypatch.setattr("remat.solvers.auto.starting.evict", lambda *_: None)
    solution = Auto(rounds=1, time_limit_s=0.3).solve(graph, budget_bytes=least.peak_bytes)
    assert solution.is_solved
    assert solution.peak_bytes <= least.peak_bytes


def test_equal_graphs_are_searched_once_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = random_layered(20, seed=1)
    least = minimum(graph, time_limit_s=0.2)
    heavier = graph.with_costs(graph.arrays.cost_s.tolist(), [1000] * graph.num_operators)
    assert minimum(heavier).peak_bytes > least.peak_bytes

    monkeypatch.setattr(module, "_minimum", no_search)
    renamed = replace(graph, values=tuple(replace(v, name=f"{v.name}_") for v in graph.values))
    assert minimum(renamed, time_limit_s=0.1) is least
    with pytest.raises(AssertionError, match="searched for again"):
        minimum(transformer(2))


def test_a_longer_search_keeps_the_best_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_layered(30, seed=2)
    keep_all = Schedule.keep_all(graph)
    poor = Minimum(simulate(graph, keep_all).peak_bytes, 3, keep_all.steps)
    with monkeypatch.context() as first:
        first.setattr(module, "_minimum", lambda *_: poor)
        assert minimum(graph, time_limit_s=0.0) == poor

    complete = minimum(graph)
    assert complete.peak_bytes < poor.peak_bytes

    # later and worse: a search that was cut short, which has a better bound
    monkeypatch.setattr(module, "_minimum", lambda *_: replace(poor, lower_bound_bytes=9999))
    assert minimum(graph) is complete
    kept = module._remember(module._key(graph), replace(poor, lower_bound_bytes=11), 0.5)
    assert (kept.peak_bytes, kept.steps) == (complete.peak_bytes, complete.steps)
    assert kept.lower_bound_bytes == max(11, complete.lower_bound_bytes)
    assert minimum(graph) is kept


def test_only_the_latest_graphs_are_remembered() -> None:
    graphs = [random_layered(4, seed=seed) for seed in range(module._MOST_REMEMBERED + 3)]
    for graph in graphs:
        minimum(graph)
    keys = [module._key(graph) for graph in graphs]
    assert len(set(keys)) == len(keys)
    assert list(module._searched) == keys[3:]
