"""Every reader checks its input by the same rules, and refuses bad input in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from remat.cli import commands
from remat.core import limits
from remat.core.budget import parse_budget
from remat.core.errors import GraphError, RematError, ScheduleError
from remat.core.graph import Graph
from remat.core.instance import read_instance
from remat.core.operators import Operator, Value
from remat.core.schedule import Schedule
from remat.core.solution import Solution
from remat.tracers.cache import DiskCache
from remat.tracers.synthetic import chain

GRAPH = chain(4)
PLAN = Solution.of_steps(
    GRAPH, 1 << 40, range(GRAPH.num_operators), lower_bound_s=0.0, solver="given", wall_s=0.0
)
PLAIN = {"cost": [1.0, 2.0], "size": [4, 4], "edges": [[0, 1]]}
SIZES = [-1, 2**53, 2**63, 2**64, 10**400]
COSTS = [-1.0, 1e101, 1e308, 1e-320]
TEXTS = ["a\x00b", "\x1b[31mred", "two\nlines", "\u202eleft", "x" * 10_001]
Load = Callable[[Path], object]


def written(record: Any, tmp_path: Path, *where: str | int, value: object) -> Path:
    """Returns a file of `record` with one field replaced."""
    path = tmp_path / "bad.json"
    if isinstance(record, dict):
        path.write_text(json.dumps(record))
    else:
        record.save(path)

    tree = json.loads(path.read_text())
    holder = tree
    for key in where[:-1]:
        holder = holder[key]
    holder[where[-1]] = value
    path.write_text(json.dumps(tree))
    return path


def assert_refused(load: Load, path: Path) -> None:
    with pytest.raises(RematError) as caught:
        load(path)
    text = str(caught.value)
    assert path.name in text
    assert "\n" not in text
    assert len(text) < 600


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"2**{abs(size).bit_length()}")
def test_a_bad_size_is_refused_wherever_it_occurs(size: int, tmp_path: Path) -> None:
    for load in (Graph.load, read_instance):
        assert_refused(load, written(GRAPH, tmp_path, "values", 1, "size_bytes", value=size))
        assert_refused(
            load, written(GRAPH, tmp_path, "operators", 1, "workspace_bytes", value=size)
        )
    assert_refused(read_instance, written(PLAIN, tmp_path, "size", 1, value=size))

    for name in ("peak_bytes", "minimum_bytes"):
        assert_refused(Solution.load, written(PLAN, tmp_path, name, value=size))

    with pytest.raises(GraphError, match="the size"):
        Value("v", size)
    with pytest.raises(GraphError, match="the workspace"):
        Operator("o", 1.0, (), (), workspace_bytes=size)
    with pytest.raises(GraphError, match="node 0 has the size"):
        Graph.from_arrays([1], [size], [])


@pytest.mark.parametrize("cost", COSTS)
def test_a_bad_cost_is_refused_wherever_it_occurs(cost: float, tmp_path: Path) -> None:
    for load in (Graph.load, read_instance):
        assert_refused(load, written(GRAPH, tmp_path, "operators", 1, "cost_s", value=cost))
    assert_refused(read_instance, written(PLAIN, tmp_path, "cost", 0, value=cost))
    with pytest.raises(GraphError, match="the cost"):
        Operator("o", cost, (), ())
    with pytest.raises(GraphError, match="the cost"):
        GRAPH.with_costs([cost] * GRAPH.num_operators)


@pytest.mark.parametrize("name", ["cost_s", "keep_all_cost_s", "lower_bound_s", "wall_s"])
def test_a_plans_negative_number_is_refused(name: str, tmp_path: Path) -> None:
    assert_refused(Solution.load, written(PLAN, tmp_path, name, value=-1.0))


def test_sizes_whose_sum_exceeds_exact_floats_are_refused() -> None:
    half = 2**52
    Graph.from_arrays([1, 1], [half, half - 1], [])
    with pytest.raises(GraphError, match="add up to"):
        Graph.from_arrays([1, 1], [half, half], [])
    values = (Value("v", half),)
    with pytest.raises(GraphError, match="add up to"):
        Graph(values, (Operator("o", 1.0, (), (0,), workspace_bytes=half),))


@pytest.mark.parametrize("step", [-1, 2**31, 2**63, 10**30])
def test_a_bad_step_is_refused_wherever_it_occurs(step: int, tmp_path: Path) -> None:
    assert PLAN.schedule is not None
    assert_refused(Schedule.load, written(PLAN.schedule, tmp_path, "steps", 2, value=step))
    assert_refused(Solution.load, written(PLAN, tmp_path, "schedule", "steps", 2, value=step))
    with pytest.raises(ScheduleError, match="names the operator"):
        Schedule((0, step), 1)


def test_steps_are_whole_numbers() -> None:
    half: Any = 0.5
    for steps in ((0, half), (False, True)):
        with pytest.raises(ScheduleError, match="whole number"):
            Schedule(steps, 1)
    assert Schedule(tuple(np.arange(3)), 1).array.tolist() == [0, 1, 2]
    with pytest.raises(GraphError, match=r"the size 1\.5"):
        Graph.from_arrays([1], [1.5], [])  # type: ignore[list-item]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text)[:12])
def test_a_bad_text_is_refused_wherever_it_occurs(text: str, tmp_path: Path) -> None:
    for name in ("name", "module", "source", "target", "pinned"):
        assert_refused(Graph.load, written(GRAPH, tmp_path, "operators", 1, name, value=text))
    for name in ("name", "dtype"):
        assert_refused(Graph.load, written(GRAPH, tmp_path, "values", 1, name, value=text))
    for name in ("device", "costs"):
        assert_refused(Graph.load, written(GRAPH, tmp_path, name, value=text))
    for name in ("solver", "fingerprint", "cut_short"):
        assert_refused(Solution.load, written(PLAN, tmp_path, name, value=text))

    assert len(limits.printable(text)) <= limits.LONGEST_TEXT
    assert not limits.texts_fault([limits.printable(text)])


@pytest.mark.parametrize("levels", ["[" * 60_000, "[" * 60_000 + "]" * 60_000, '{"a":' * 60_000])
def test_deep_nesting_is_refused_by_every_reader(levels: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"version": 1, "x": ' + levels)
    for load in (Graph.load, Schedule.load, Solution.load, Solution.load_all, read_instance):
        assert_refused(load, path)
    assert DiskCache(path).get("key", (0, 1)) is None


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "none.json", "\x00"])
def test_a_path_that_is_not_a_file_is_refused(path: str) -> None:
    for load in (Graph.load, Schedule.load, Solution.load, Solution.load_all, read_instance):
        with pytest.raises(RematError) as caught:
            load(Path(path))
        assert path in str(caught.value) or "null" in str(caught.value)


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """`remat solve <(zcat graph.json.gz)` opened the pipe twice; the second read was empty."""
    GRAPH.save(tmp_path / "graph.json")
    reader, writer = os.pipe()
    os.write(writer, (tmp_path / "graph.json").read_bytes())
    os.close(writer)

    try:
        assert read_instance(f"/dev/fd/{reader}") == GRAPH
    finally:
        os.close(reader)


@pytest.mark.parametrize("numbers", [[-1.0, 0.0], [1e300, 0.0], [1.0, 2.0**60], [1.0], []])
def test_an_impossible_cached_measurement_is_ignored(numbers: list[float], tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    path.write_text(json.dumps({"key": numbers}))
    assert DiskCache(path).get("key", (0.0, 1e6), (0.0, 2.0**50)) is None


@pytest.mark.parametrize("budget", ["9" * 400, "9" * 400 + "%", "9" * 300 + "GiB", 10**400, 2**63])
def test_a_budget_of_many_digits_is_refused_in_one_line(budget: str | int) -> None:
    with pytest.raises(ValueError, match="can be counted") as caught:
        parse_budget(budget, keep_all_bytes=1000)
    assert len(str(caught.value)) < 300


def test_the_command_line_refuses_outputs_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    GRAPH.save("graph.json")
    PLAN.save("plan.json")
    Path("file").touch()
    Path("folder.png").mkdir()

    for command, suffix in (
        (["solve", "graph.json", "--budget", "100%"], ""),
        (["frontier", "graph.json"], ""),
        (["plot", "graph.json"], ".png"),
        (["report", "graph.json", "plan.json"], ".html"),
        (["export", "graph.json"], ".json"),
    ):
        for output in ("folder.png", f"file/x{suffix}", f"nowhere/x{suffix}"):
            result = CliRunner().invoke(commands.app, [*command, "--output", output])
            assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.stderr
            assert output in result.stderr


def test_brackets_and_dollars_in_a_name_are_not_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "[red] $\\frac{$"
    GRAPH.save(f"{name}.json")
    plan = ["solve", f"{name}.json", "--budget", "100%", "--solver", "keep-all"]

    for arguments in (
        [*plan, "--output", f"{name}-plan.json"],
        ["bench", f"{name}.json", "--budget", "100%", "--solver", "keep-all"],
        ["plot", f"{name}.json", f"{name}-plan.json", "--output", "a.png"],
    ):
        result = CliRunner().invoke(commands.app, arguments)
        assert result.exit_code == 0, result.stderr
        assert name in result.stdout or arguments[0] != "bench"


@pytest.mark.parametrize("graph", [Graph((), ()), Graph.from_arrays([0] * 2, [0] * 2, [(0, 1)])])
def test_a_graph_of_zero_bytes_works(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`remat frontier` divided by the peak of keeping everything, which is 0 here."""
    monkeypatch.chdir(tmp_path)
    graph.save("graph.json")
    limit = ["--time-limit", "1"]

    for command in (
        ["solve", "graph.json", "--budget", "1", "--output", "plan.json"],
        ["frontier", "graph.json", "--points", "3", *limit, "--output", "curve.json"],
        ["plot", "graph.json", "plan.json"],
        ["plot", "graph.json", "curve.json", "--picture", "tradeoff"],
        ["export", "graph.json", "plan.json"],
    ):
        result = CliRunner().invoke(commands.app, command)
        assert result.exit_code == 0, (command, result.output, result.exception)


@pytest.mark.parametrize(
    ("option", "said"),
    [(["--time-limit", "nan"], "time"), (["--gap", "nan"], "gap"), (["--gap", "-1"], "gap")],
)
def test_an_invalid_number_for_an_option_is_refused(
    option: list[str], said: str, tmp_path: Path
) -> None:
    GRAPH.save(tmp_path / "graph.json")
    arguments = ["solve", str(tmp_path / "graph.json"), "--budget", "100%", *option]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "No such option" not in result.stderr


def test_a_curve_of_too_many_points_is_refused(tmp_path: Path) -> None:
    GRAPH.save(tmp_path / "graph.json")
    arguments = ["frontier", str(tmp_path / "graph.json"), "--points", "1000000000"]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exit_code == 2
    assert "points" in result.stderr
    assert "No such option" not in result.stderr
