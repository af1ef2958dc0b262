"""Results are compared, drawn and exported: `frontier`, `bench`, `plot`, `report`, `export`."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

from remat.tracers.synthetic import transformer
from tests.support.command_line import Run, assert_refused


def test_a_frontier_is_printed_and_saved(run: Run, plain: Path) -> None:
    options = ["--points", "6", "--solver", "chen-greedy"]
    table = run("frontier", plain, *options, "--output", "frontier.json")
    assert table.exit_code == 0, table.stderr
    assert "100%" in table.stdout

    answers = json.loads(run("frontier", plain, *options, "--format", "json").stdout)
    solved = [answer for answer in answers if answer["status"] in ("optimal", "feasible")]
    assert len(solved) >= 2
    by_budget = sorted((answer["budget"], answer["cost"]) for answer in solved)
    assert [cost for _, cost in by_budget] == sorted((cost for _, cost in by_budget), reverse=True)

    assert (
        run(
            "plot", plain, "frontier.json", "--picture", "tradeoff", "--output", "curve.svg"
        ).exit_code
        == 0
    )
    assert Path("curve.svg").exists()


def test_plot_draws_what_solve_saved(run: Run, plain: Path) -> None:
    run("solve", plain, "--budget", "14", "--solver", "chen-sqrt", "--output", "plan.json")
    for picture in ("memory", "schedule"):
        result = run("plot", plain, "plan.json", "--picture", picture, "--output", f"{picture}.png")
        assert result.exit_code == 0, result.stderr
        assert Path(f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert run("plot", plain, "--output", "keep_all.svg").exit_code == 0


def test_plot_refuses_wrong_files_and_formats(run: Run, plain: Path, tmp_path: Path) -> None:
    transformer(1).save(tmp_path / "graph.json")
    run("solve", "graph.json", "--budget", "100%", "--solver", "keep-all", "--output", "other.json")
    assert_refused(run("plot", plain, "other.json"), "other.json", "for another step")
    assert_refused(run("plot", plain, "none.json"), "none.json")
    assert_refused(run("plot", plain, plain), "chain.json")
    assert_refused(run("plot", plain, "--output", "picture.txt"), ".png")
    assert_refused(run("plot", plain, "--picture", "tradeoff"), "frontier")


def test_bench_compares_solvers(run: Run, plain: Path) -> None:
    result = run("bench", plain, "--budget", "80%", "--solver", "chen-sqrt", "--solver", "keep-all")
    assert result.exit_code == 0
    assert "chen-sqrt" in result.stdout
    assert "no_solution" in result.stdout

    records = json.loads(
        run("bench", plain, "--budget", "80%", "--solver", "chen-sqrt", "--format", "json").stdout
    )
    assert [(record["instance"], record["name"]) for record in records] == [("chain", "chen-sqrt")]

    assert_refused(run("bench", plain, "--solver", "nobody"), "nobody")


def test_bench_names_the_solver_that_has_no_answer_and_goes_on(run: Run) -> None:
    result = run("bench", "--budget", "80%", "--solver", "revolve", "--solver", "chen-sqrt")
    assert result.exit_code == 0
    assert "revolve" in result.stderr
    assert "chen-sqrt" in result.stdout


def test_report_and_export_write_what_solve_saved(run: Run, tmp_path: Path) -> None:
    step = transformer(2, width=2**16)
    step.save(tmp_path / "graph.json")

    assert (
        run(
            "solve",
            "graph.json",
            "--budget",
            "90%",
            "--solver",
            "pytorch-knapsack",
            "--output",
            "plan.json",
        ).exit_code
        == 0
    )

    assert (
        run("report", "graph.json", "plan.json", "--points", "0", "--output", "page.html").exit_code
        == 0
    )
    assert "<title>graph: remat report</title>" in (tmp_path / "page.html").read_text()

    assert run("export", "graph.json", "plan.json", "--output", "trace.json").exit_code == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert run("export", "graph.json", "--output", "all.pickle").exit_code == 0
    assert pickle.loads((tmp_path / "all.pickle").read_bytes())["device_traces"]
    assert_refused(run("export", "graph.json", "--output", "a.txt"), ".pickle", ".json")
