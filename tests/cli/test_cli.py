"""The command line: exit statuses, JSON, one-line errors, and help with examples."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from remat.cli import commands
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.tracers.synthetic import chain, transformer

Run = Callable[..., Result]
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


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(
        commands.app, [str(argument) for argument in arguments]
    )


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "chain.json"
    graph = chain(16)
    edges = [[u, v] for v, op in enumerate(graph.operators) for u in op.reads]
    path.write_text(
        json.dumps({"cost": [1] * 33, "size": [1] * 33, "edges": edges, "first_backward": 17})
    )
    return path


def assert_refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert not result.stdout
    for part in parts:
        assert part in result.stderr


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
    assert answer["gap_percent"] <= 100 * (1 - answer["lower_bound"] / answer["cost"]) + 1e-9


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


FACTORY = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        first, last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        self.layers = torch.nn.Sequential(first, torch.nn.ReLU(), last)

    def forward(self, x):
        return self.layers(x).sum()

def make():
    return Model(), (torch.randn(4, 8),)
"""


def test_trace_saves_a_graph_and_says_what_it_holds(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "factory_of_a_model.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    result = run("trace", "factory_of_a_model:make", "--output", "graph.json")
    assert result.exit_code == 0, result.stderr
    assert "backward" in result.stdout
    assert Graph.load("graph.json").num_operators > 4


FACTORIES = (
    FACTORY
    + """
def only():
    return Model()

def keywords():
    return Model(), {"x": torch.randn(4, 8)}

def both():
    return Model(), [], {"x": torch.randn(4, 8)}

def needs(path):
    return Model()

def raises():
    return helper()

def helper():
    raise FileNotFoundError("no config.yaml")

def exits():
    raise SystemExit("usage: train.py CONFIG")

def nothing():
    pass

def tensor():
    return Model(), torch.randn(4, 8)

def four():
    return Model(), (), {}, 4

def text():
    return Model(), (torch.randn(4, 8),), "text"

class Picky(Model):
    def forward(self, x):
        if x.shape[0] != 3:
            raise KeyError("a batch of three")
        return super().forward(x)

def picky():
    return Picky(), (torch.randn(4, 8),)

def wrong_shape():
    return Model(), (torch.randn(4, 9),)

def step():
    model, criterion = Model(), torch.nn.MSELoss()
    def train(x, *, target):
        return criterion(model.layers(x), target)
    return train, (torch.randn(4, 8),), {"target": torch.randn(4, 1)}

class Trainer:
    def __init__(self):
        self.model = Model()

    def step(self):
        return self.model(torch.ones(4, 8))

def method():
    return Trainer().step
"""
)


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_factories.py").write_text(FACTORIES)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train_it.py").write_text("from beside_it import make")
    (tmp_path / "folder" / "beside_it.py").write_text(FACTORY)
    (tmp_path / "broken_factory.py").write_text("import torch\nmake = torch.no_such_name\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    "factory",
    [
        "some_factories:make",
        "some_factories.py:make",
        "some_factories:keywords",
        "some_factories:both",
        "folder/train_it.py:make",
        "some_factories:step",
        "some_factories.py:method",
    ],
)
def test_factories_of_every_form_are_traced(run: Run, factory: str) -> None:
    result = run("trace", factory)
    assert result.exit_code == 0, result.stderr
    assert Graph.load("graph.json").num_operators > 4


@pytest.mark.usefixtures("factories")
def test_doctor_takes_keywords_and_step_functions(run: Run) -> None:
    for name in ("keywords", "step"):
        result = run("doctor", f"some_factories:{name}", "--device", "H100", "--time-limit", "5")
        assert result.exit_code == 0, result.stderr
        assert "H100: fits" in result.stdout


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("only", ["missing a required argument: 'x'", "(model, args)"]),
        ("needs", ["missing a required argument: 'path'", "called without arguments"]),
        ("nothing", ["returned nothing", "(model, batch) with a dict"]),
        ("tensor", ["(model, a Tensor)", "(model, (x,))"]),
        ("four", ["(Model, tuple, dict, int)"]),
        ("text", ["returned a str as the keywords"]),
        ("wrong_shape", ["[4, 9] X [8, 8]", "(some_factories.py:"]),
    ],
)
def test_a_wrong_result_of_a_factory_is_refused_in_one_line(
    run: Run, name: str, parts: list[str]
) -> None:
    for command in ("trace", "doctor"):
        assert_refused(run(command, f"some_factories:{name}"), *parts)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("factory", "told"),
    [
        (
            "some_factories:raises",
            ["FileNotFoundError: no config.yaml", ", in helper", "raise FileNotFoundError"],
        ),
        ("some_factories:exits", ["usage: train.py CONFIG", ", in exits", "raise SystemExit"]),
        ("broken_factory:make", ["no_such_name", "broken_factory.py:2", "torch.no_such_name"]),
        ("broken_factory.py:make", ["no_such_name", "broken_factory.py:2", "torch.no_such_name"]),
    ],
)
def test_a_failing_factory_is_reported_in_three_lines(
    run: Run, factory: str, told: list[str]
) -> None:
    for command in ("trace", "doctor"):
        result = run(command, factory)
        lines = result.stderr.splitlines()
        assert (result.exit_code, len(lines)) == (2, 3), result.stderr
        for part, line in zip(told, lines, strict=True):
            assert part in line


@pytest.mark.usefixtures("factories")
def test_a_failing_step_names_its_line(run: Run) -> None:
    traced = run("trace", "some_factories:picky")
    first, place, line = traced.stderr.splitlines()
    assert traced.exit_code == 2
    assert "the step of some_factories:picky failed: KeyError: 'a batch of three'" in first
    assert "in forward" in place
    assert "raise KeyError" in line

    # doctor plans whole steps only
    assert_refused(run("doctor", "some_factories:picky"), "KeyError('a batch of three')")


@pytest.mark.parametrize("command", [(), ("trace",), ("solve",), ("doctor",)])
def test_help_lists_the_exit_statuses(run: Run, command: tuple[str, ...]) -> None:
    text = " ".join(run(*command, "--help").stdout.split())
    assert "Exit status" in text
    assert "2 bad input" in text


@pytest.mark.parametrize(
    "factory",
    ["no_colon", "no_such_module:make", "json:nothing", ":make", "json:", "no_file.py:make"],
)
def test_trace_refuses_what_it_cant_find(run: Run, factory: str) -> None:
    assert_refused(run("trace", factory))


def test_doctor_finds_nothing_wrong_here(run: Run) -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.stdout
    for word in ("torch", "highspy", "cache", "self-check"):
        assert word in result.stdout
    assert "BAD" not in result.stdout


def test_doctor_exits_with_1_if_something_is_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / "file" / name))
    result = run("doctor")
    assert result.exit_code == 1
    assert "BAD" in result.stdout
    assert "can't be written" in result.stdout


def test_help_has_an_example_of_every_command(run: Run) -> None:
    assert run("--help").exit_code == 0
    for command in ("demo", "trace", "solve", "frontier", "plot", "bench"):
        result = run(command, "--help")
        assert result.exit_code == 0
        assert f"remat {command} " in result.stdout, command


def test_the_version_is_printed(run: Run) -> None:
    assert run("--version").stdout.strip() == "remat 0.1.0"


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


WIDE = [
    "bench",
    "INSTANCE",
    "--budget",
    "90%",
    "--solver",
    "chen-sqrt",
    "--solver",
    "pytorch-knapsack",
    "--solver",
    "recompute-attention",
]
COMMANDS = {
    "bench": WIDE,
    "solve": ["solve", "INSTANCE", "--budget", "90%", "--solver", "chen-sqrt"],
    "frontier": ["frontier", "INSTANCE", "--points", "3", "--solver", "chen-sqrt"],
    "sweep": [
        "sweep",
        "INSTANCE",
        "--budget",
        "90%",
        "--budget",
        "1MiB",
        "--solver",
        "chen-sqrt",
        "--jobs",
        "1",
    ],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_output_fits_a_terminal_of_80_columns_without_colour(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    step = transformer(2, width=2**16)
    step.with_costs([op.cost_s * 1e-4 for op in step.operators], costs="roofline:H100").save(
        tmp_path / "instance.json"
    )

    result = run(
        *["instance.json" if argument == "INSTANCE" else argument for argument in COMMANDS[command]]
    )

    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout


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
    assert "graph" in (tmp_path / "page.html").read_text()

    assert run("export", "graph.json", "plan.json", "--output", "trace.json").exit_code == 0
    assert run("export", "graph.json", "--output", "all.pickle").exit_code == 0
    assert_refused(run("export", "graph.json", "--output", "a.txt"), ".pickle", ".json")
