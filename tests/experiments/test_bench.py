"""The benchmark: rows are checked, kept, compared at equal peak, and drawn.

Missing instances are reported.
"""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments import ablation, bench, bench_frontier, bench_real
from experiments.bench_proof import is_proved
from experiments.bench_published import best_published
from experiments.bench_rows import Rows, geometric_mean, mean_seconds
from experiments.peers import PEERS
from remat.core.schedule import Schedule, simulate
from remat.solvers.auto.solver import NAMES
from remat.tracers.synthetic import random_layered, transformer
from tests.support.checkout import ROOT, SHARED

REFEREE, RESULTS = SHARED / "referee.py", ROOT / "experiments" / "results"
NUM_POINTS = 6
INSTANCE = {
    "cost": [1, 1, 1, 1],
    "size": [4, 4, 4, 1],
    "edges": [[0, 1], [1, 2], [2, 3], [0, 3]],
    "total_cost": 4,
    "budgets": {"tight": 9, "none": 8},
    "published": {
        "tight": {
            "moccasin": {"overhead_percent": 25.0, "seconds": 2.0},
            "fastsa_free_order": {"overhead_percent": 0.0},
        }
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the sets that need no tracing, once, at fewer budgets."""
    folder = tmp_path_factory.mktemp("bench")
    for name in ("instances", "graphs", "results"):
        (folder / name).mkdir()

    (folder / "instances" / "tiny.json").write_text(json.dumps(INSTANCE))
    if REFEREE.is_file():
        shutil.copy(REFEREE, folder)
    transformer(2).save(folder / "graphs" / "tiny.json")

    places = [
        "--instances",
        folder / "instances",
        "--graphs",
        folder / "graphs",
        "--output",
        folder / "results",
    ]
    options = [*map(str, places), "--time-limit", "0.2", "--gap", "0.05", "--names", "tiny"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_real, "_SHARES", (90, 60))
        patch.setattr(bench_frontier, "_NUM_POINTS", NUM_POINTS)
        assert bench.main(["published", "real", "frontier", "pictures", *options]) == 0
    return folder


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        (folder / "results" / f"bench_{name}.json").read_text()
    )["rows"]
    return found


def test_published_instances_are_checked_and_compared(results: Path) -> None:
    tight, none = rows(results, "published")
    assert (tight["cost"], tight["published_by"], tight["published_cost"]) == (5.0, "moccasin", 5.0)
    assert tight["referee"] == ("valid" if REFEREE.is_file() else "absent")
    assert (none["status"], none["cost"]) == ("infeasible", None)
    table = csv.DictReader((results / "results" / "bench_published.csv").read_text().splitlines())
    assert [row["budget"] for row in table] == ["tight", "none"]


def test_networks_are_solved_until_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("checkmate_tiny", "layered"):
        (tmp_path / f"{name}.json").write_text(json.dumps(INSTANCE))

    assert (
        bench.main(
            [
                "proof",
                "--instances",
                str(tmp_path),
                "--output",
                str(tmp_path),
                "--time-limit",
                "0.5",
            ]
        )
        == 0
    )

    found = json.loads((tmp_path / "bench_proof.json").read_text())["rows"]
    assert [(row["instance"], row["budget"], row["gap"]) for row in found] == [
        ("checkmate_tiny", "tight", 0.002),
        ("checkmate_tiny", "none", 0.002),
    ]

    assert [is_proved(row) for row in found] == [True, True]
    assert not is_proved(found[0] | {"gap_percent": 0.3})
    assert "not proved: 0 of 2" in capsys.readouterr().out


def test_traced_points_are_solved_until_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformer(2).save(tmp_path / "gpt2_48.json")  # in place of the traced graph
    options = [
        "--graphs",
        str(tmp_path),
        "--output",
        str(tmp_path),
        "--time-limit",
        "0.5",
        "--names",
        "gpt2_48",
    ]

    assert bench.main(["real_proof", *options]) == 0
    least, row = json.loads((tmp_path / "bench_real_proof.json").read_text())["rows"]
    assert (row["graph"], row["budget"], row["budget_bytes"], row["gap"]) == (
        "gpt2_48",
        "least",
        least["peak_bytes"],
        0.01,
    )
    assert f"not proved: {int(not is_proved(row))} of 1" in capsys.readouterr().out


def test_auto_is_compared_at_the_baselines_peaks(results: Path) -> None:
    found = rows(results, "real")
    reached = {
        row["peak_bytes"] for row in found if row["kind"] == "peer" and row["cost"] is not None
    }
    ours = {row["budget_bytes"]: row for row in found if row["kind"] == "auto at a peer's peak"}

    assert {row["peer"] for row in found if row["kind"] == "peer"} == set(PEERS)
    assert reached
    assert reached == set(ours)
    assert all(row["peak_bytes"] <= budget for budget, row in ours.items())


def test_the_curve_is_compared_with_single_solves(results: Path) -> None:
    found = rows(results, "frontier")
    curve = next(row for row in found if row["kind"] == "curve")
    assert curve["is_monotone"]
    assert len(curve["points"]) == NUM_POINTS
    assert {row["budget_bytes"] for row in found if row["kind"] == "separate"} == {
        point[0] for point in curve["points"]
    }


def test_finished_rows_are_kept_and_other_options_start_over(tmp_path: Path) -> None:
    first = Rows(tmp_path, "set", {"time_limit_s": 1.0}, is_fresh=False)
    assert first.row({"name": "a"}, lambda: {"cost": 1.0})["cost"] == 1.0
    again = Rows(tmp_path, "set", {"time_limit_s": 1.0}, is_fresh=False)
    assert again.row({"name": "a"}, lambda: {"cost": 2.0})["cost"] == 1.0
    other = Rows(tmp_path, "set", {"time_limit_s": 2.0}, is_fresh=False)
    assert other.row({"name": "a"}, lambda: {"cost": 2.0})["cost"] == 2.0


def test_no_file_has_rows_of_two_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: the rows of the first commit stay, and one table compares two versions of the code."""
    for commit in ("first", "second"):
        monkeypatch.setenv("REMAT_COMMIT", commit)
        rows = Rows(tmp_path, "set", {"time_limit_s": 1.0}, is_fresh=False)
        rows.row({"name": commit}, lambda: {"cost": 1.0})
        assert [row["commit"] for row in rows.rows] == [commit]


def test_missing_instances_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = ["--instances", str(tmp_path / "nowhere"), "--output", str(tmp_path)]
    assert bench.main(["published", *options]) == 2
    assert "--instances or REMAT_INSTANCES" in caplog.text


def test_unknown_sets_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["everything"])
    assert "published" in capsys.readouterr().err


def test_free_order_and_heuristics_are_never_compared() -> None:
    assert best_published(INSTANCE, "tight").system == "moccasin"
    assert best_published(INSTANCE, "none").system == ""


def test_rows_that_took_no_measurable_time_have_a_mean() -> None:
    """A baseline of a tiny graph was rounded to 0.000 s, and the table failed."""
    assert mean_seconds([{"seconds": 0.0}, {"seconds": 1.0}]) == pytest.approx(1e-3**0.5)


def test_the_mean_is_the_geometric_one() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_an_ablation_counts_where_a_technique_helps_and_where_it_harms() -> None:
    graph = random_layered(12, seed=3, is_training=False)
    budget_bytes = simulate(graph, Schedule.keep_all(graph)).peak_bytes * 9 // 10
    point = ablation.Point("small", graph, budget_bytes)
    rows = [
        {"point": "small", "seed": seed, "without": name, **ablation._solve(point, name, seed, 1.0)}
        for seed in ablation.SEEDS
        for name in (ablation.NOTHING, "eviction")
    ]

    (change,) = ablation.changes(rows)["eviction"]
    assert not change.helps and not change.harms  # solved exhaustively either way

    worse = [row | {"cost": 1.01 * row["cost"]} for row in rows if row["without"] == "eviction"]
    full = [row for row in rows if row["without"] == ablation.NOTHING]
    assert ablation.change_of(full, worse).helps
    assert ablation.change_of(worse, full).harms

    unsolved = [row | {"cost": None, "gap_percent": None} for row in worse]
    assert ablation.change_of(full, unsolved).helps


def test_every_technique_helps_at_enough_points_or_is_a_named_exception() -> None:
    saved = json.loads((RESULTS / "bench_ablation.json").read_text())
    rows = saved["rows"]
    changes = ablation.changes(rows)
    helps = {name: sum(change.helps for change in changes[name]) for name in changes}

    rare = {name for name in NAMES if helps.get(name, 0) < ablation.LEAST_HELPED}
    named = {"families", "window", "exhaustive", "other-seeds", "benders", "second-restarts"}
    assert rare == named

    page = (ROOT / "docs" / "architecture.md").read_text()
    assert all(f"`{name}`" in page for name in named)
    assert (RESULTS / "bench_ablation.md").read_text() == ablation.page(rows, saved["options"])
    assert not {*ablation.REMOVED} & {*NAMES}
