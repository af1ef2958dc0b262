"""`remat solve`: exit statuses, JSON, tables, and one line for what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.tracers.synthetic import chain, transformer
from tests.support.command_line import Run, assert_refused

KEYS = [
    "status",
    "cost",
    "peak",
    "overhead_percent",
    "lower_bound",
    "gap_percent",
    "solver",
    "found_by",
    "proved_by",
    "wall_s",
    "order",
]


def test_a_solved_instance_prints_what_the_simulator_says(run: Run, plain: Path) -> None:
    result = run("solve", plain, "--budget", "14", "--solver", "chen-sqrt", "--format", "json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, list(answer)) == (0, KEYS)

    graph = chain(16)
    simulation = simulate(graph, Schedule.from_steps(graph, answer["order"]))
    assert (answer["cost"], answer["peak"]) == (simulation.cost_s, simulation.peak_bytes)
    assert answer["overhead_percent"] == pytest.approx(100 * (simulation.cost_s / graph.cost_s - 1))

    assert answer["lower_bound"] <= answer["cost"]
    assert answer["wall_s"] > 0
    assert answer["status"] in ("optimal", "feasible")


def test_the_default_solver_proves_its_answer(run: Run, plain: Path) -> None:
    answer = json.loads(
        run("solve", plain, "--budget", "60%", "--format", "json", "--time-limit", "10").stdout
    )
    assert answer["peak"] <= 0.6 * simulate(chain(16), Schedule.keep_all(chain(16))).peak_bytes
    assert answer["status"] == "optimal" and answer["gap_percent"] <= 0.5


def test_each_outcome_has_its_own_exit_status(run: Run, plain: Path) -> None:
    solved = run("solve", plain, "--budget", "100%", "--format", "json")
    impossible = run("solve", plain, "--budget", "2", "--format", "json", "--time-limit", "10")
    stopped = run("solve", plain, "--budget", "3", "--solver", "keep-all", "--format", "json")
    refused = run("solve", plain, "--budget", "much")
    assert [r.exit_code for r in (solved, impossible, stopped, refused)] == [0, 3, 4, 2]

    for result, status in ((impossible, "infeasible"), (stopped, "no_solution")):
        answer = json.loads(result.stdout)
        assert list(answer) == KEYS
        assert (answer["status"], answer["cost"], answer["peak"], answer["order"]) == (
            status,
            None,
            None,
            [],
        )


def test_a_solution_is_printed_as_a_table(run: Run, plain: Path) -> None:
    result = run("solve", plain, "--budget", "14", "--solver", "chen-sqrt")
    assert result.exit_code == 0
    for word in ("feasible", "budget", "peak", "overhead", "gap", "recompute", "ChenSqrt"):
        assert word in result.stdout
    assert not result.stderr


def test_a_solution_can_be_saved(run: Run, plain: Path) -> None:
    run("solve", plain, "--budget", "14", "--solver", "chen-sqrt", "--output", "plan.json")
    solution = Solution.load("plan.json")
    assert solution.budget_bytes == 14
    assert solution.fingerprint == chain(16).fingerprint


def test_a_saved_graph_is_an_instance(run: Run, tmp_path: Path) -> None:
    transformer(2).save(tmp_path / "graph.json")
    assert (
        run("solve", "graph.json", "--budget", "90%", "--solver", "pytorch-knapsack").exit_code == 0
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--budget", "12 apples"], "apples"),
        (["--budget", "-5"], "-5"),
        (["--budget", "0"], "not positive"),
        (["--budget", "14", "--solver", "nobody"], "chen-sqrt"),
        (["--budget", "14", "--without", "nobody"], "--without: auto has no technique"),
        (["--budget", "14", "--free-order", "--solver", "chen-sqrt"], "--free-order"),
        (["--budget", "14", "--output", "nowhere/plan.json"], "nowhere"),
    ],
)
def test_an_unusable_option_is_refused_in_one_line(
    run: Run, plain: Path, arguments: list[str], part: str
) -> None:
    assert_refused(run("solve", plain, *arguments), part)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"cost": [1], "size": [1, 2], "edges": []}',
        '{"cost": [-1], "size": [1], "edges": []}',
    ],
)
def test_a_bad_file_is_refused_by_name(run: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    for command in (
        ["solve", "bad.json", "--budget", "9"],
        ["plot", "bad.json"],
        ["bench", "bad.json"],
        ["frontier", "bad.json"],
    ):
        assert_refused(run(*command), "bad.json")


def test_a_missing_option_is_a_usage_error(run: Run, plain: Path) -> None:
    result = run("solve", plain)
    assert result.exit_code == 2
    assert "--budget" in result.stderr


def test_solve_starts_without_torch(plain: Path) -> None:
    code = (
        "import sys; from remat.cli.commands import app; app(sys.argv[1:], "
        "standalone_mode=False); assert 'torch' not in sys.modules"
    )
    arguments = ["solve", str(plain), "--budget", "60%", "--time-limit", "5", "--format", "json"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_python_m_remat_does_the_same(plain: Path) -> None:
    def call(*arguments: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "remat", *map(str, arguments)], capture_output=True, text=True
        )

    done = call("solve", plain, "--budget", "14", "--solver", "chen-sqrt", "--format", "json")
    assert (done.returncode, list(json.loads(done.stdout)), done.stderr) == (0, KEYS, "")
    done = call("solve", plain, "--budget", "lots")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_a_terminal_without_unicode_shows_the_rest(tmp_path: Path) -> None:
    """Naive: a traceback for the sign of microseconds, after the output was written."""
    graph = chain(4)
    file = tmp_path / "graph.json"
    graph.with_costs([1e-6] * graph.num_operators, costs="profile:cpu").save(file)
    done = subprocess.run(
        [sys.executable, "-m", "remat", "solve", str(file), "--budget", "100%"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert b" ?s" in done.stdout


def test_importing_draws_no_random_number() -> None:
    """Naive: a library does so when it is imported, and all of the user's draws differ."""
    code = (
        "import random; random.seed(0); before = random.getstate(); import remat; "
        "remat.checkpoint, remat.report, remat.fits; assert random.getstate() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
