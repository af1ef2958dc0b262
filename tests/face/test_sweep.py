"""Sweeps, in processes and on a cluster, give the answers of single solves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import joblib
import pytest
from distributed import Client, LocalCluster
from typer.testing import CliRunner

import remat
from remat.cli import commands
from remat.core.solution import Solution, Status
from remat.solvers.baselines.chen import ChenSqrt
from remat.tracers.synthetic import chain, random_step, transformer, two_regions

GRAPHS = [chain(12), transformer(2), two_regions(3), random_step(12, seed=3)]
BUDGETS: list[int | str] = ["100%", "80%", 1]


@pytest.fixture
def cluster() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as local,
        Client(local) as client,
    ):
        yield client


def facts(
    rows: list[list[Solution]],
) -> list[list[tuple[Status, float, remat.Schedule | None, str]]]:
    return [[(s.status, s.cost_s, s.schedule, s.fingerprint) for s in row] for row in rows]


def one_by_one() -> list[list[Solution]]:
    peaks = [remat.simulate(graph, remat.Schedule.keep_all(graph)).peak_bytes for graph in GRAPHS]
    sizes = [[remat.parse_budget(b, keep_all_bytes=peak) for b in BUDGETS] for peak in peaks]
    return [
        [ChenSqrt().solve(graph, budget_bytes=size) for size in row]
        for graph, row in zip(GRAPHS, sizes, strict=True)
    ]


def test_processes_answer_as_single_solves_do() -> None:
    assert facts(remat.sweep(GRAPHS, BUDGETS, solver=ChenSqrt(), n_jobs=2)) == facts(one_by_one())


def test_a_dask_cluster_answers_as_single_solves_do(cluster: Client) -> None:
    with joblib.parallel_config("dask"):
        rows = remat.sweep(GRAPHS, BUDGETS, solver=ChenSqrt())
    assert facts(rows) == facts(one_by_one())
    ran = cluster.run(lambda dask_worker: dask_worker.state.executed_count)
    assert sum(ran.values()) > 0, "no task ran on the cluster"


def test_an_unmet_budget_is_an_answer_and_not_an_error() -> None:
    (met, unmet), *_ = remat.sweep([chain(8)], ["100%", 1], time_limit_s=5.0, n_jobs=1)
    assert (met.status, unmet.status) == (Status.OPTIMAL, Status.INFEASIBLE)


def test_no_worker_is_started_without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: 60 processes for one solve, which take 18 s to start."""
    monkeypatch.setattr(joblib, "Parallel", lambda n_jobs: pytest.fail(f"{n_jobs} processes"))
    with pytest.raises(pytest.fail.Exception, match=r"^1 processes"):
        remat.sweep([chain(8)], ["100%"], n_jobs=60)


def test_an_empty_sweep_is_empty() -> None:
    assert remat.sweep([], ["50%"]) == []
    assert remat.sweep([chain(3)], []) == [[]]


def test_bad_arguments_are_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match="apples"):
        remat.sweep(GRAPHS, ["12 apples"])
    with pytest.raises(ValueError, match="chen-sqrt"):
        remat.sweep(GRAPHS, ["50%"], solver="nobody")


def test_the_command_line_sweeps(tmp_path: Path) -> None:
    for name, graph in (("one", chain(8)), ("two", transformer(1))):
        graph.save(tmp_path / f"{name}.json")
    files = [str(tmp_path / "one.json"), str(tmp_path / "two.json")]
    options = ["--budget", "100%", "--budget", "80%", "--solver", "chen-sqrt", "--jobs", "2"]

    records = json.loads(
        CliRunner().invoke(commands.app, ["sweep", *files, *options, "--format", "json"]).stdout
    )
    assert [(r["instance"], r["budget"]) for r in records] == [
        (n, b) for n in ("one", "two") for b in ("100%", "80%")
    ]

    expected = [
        s
        for row in remat.sweep(
            [chain(8), transformer(1)], ["100%", "80%"], solver="chen-sqrt", n_jobs=1
        )
        for s in row
    ]
    assert [(r["status"], r["order"]) for r in records] == [
        (s.status, list(s.schedule.steps) if s.schedule else []) for s in expected
    ]

    table = CliRunner().invoke(commands.app, ["sweep", *files, *options]).stdout
    assert "one" in table
    assert "80%" in table

    refused = CliRunner().invoke(commands.app, ["sweep", *files, "--budget", "80%", "--jobs", "0"])
    assert refused.exit_code == 2
    assert "--jobs" in refused.stderr
