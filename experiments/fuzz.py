"""Damaged files given to every reader and command.

    python -m experiments.fuzz [--files 20000] [--seed 0] [--output FILE]

Each file (`damage.py`) goes to a reader of its kind and to a command. These failures are counted: a
traceback, a hang of more than 20 s, an undocumented exit status, an error of several lines, a
half-written output, an invalid graph or schedule that is accepted, and a number that is trusted
only because a file states it. Everything runs in this process. `--first 1234 --files 1` repeats
case 1234.
"""

from __future__ import annotations

import json
import logging
import math
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import joblib
import typer

from experiments import damage
from experiments.command_line import parser_of
from experiments.environment import environment
from remat.cli import commands
from remat.cli.arguments import load_solutions
from remat.core.budget import parse_budget
from remat.core.errors import RematError, SolverError
from remat.core.graph import Graph
from remat.core.instance import read_instance
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.core.validate import validate
from remat.plan.disk_cache import PlanCache, key_of
from remat.plan.fixed_plan import FixedPlan
from remat.solvers import make_solver
from remat.solvers.auto.frontier import frontier_solutions
from remat.tracers.cache import DiskCache

RESULT = Path(__file__).resolve().parent / "results" / "fuzz.json"
_HANG_S = 20.0
_STATUSES = (0, 2, 3, 4)
_METHODS = [
    *("keep-all", "chen-sqrt", "chen-greedy", "ap-greedy", "linear-sqrt", "revolve", "per-block"),
    *("recompute-cheap", "recompute-attention", "pytorch-knapsack", "lp-rounding", "exhaustive"),
    *("milp", "auto", "free-order"),
]


class Hang(BaseException):
    """A case took longer than allowed."""


class Wrong(AssertionError):
    """A case failed; the first word says how."""


@dataclass
class Outcome:
    """The outcome of many files.

    Attributes:
        counts: cases by outcome: accepted or refused by a reader, exit statuses of a command.
        wrong: a line for each case that failed.
        slowest_s: time of the slowest case.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Fuzzer:
    """Valid files, and what is tried on their damaged copies."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.seed = folder, seed
        self.graph, self.seeds = damage.seeds(folder)
        for kind, content in self.seeds.items():
            (folder / f"{kind}.json").write_bytes(content)
        self.command = typer.main.get_command(commands.app)
        self.told = ""
        self._warm_up()

    def _warm_up(self) -> None:
        """Runs every method once, so that compiling does not count as a hang."""
        for graph in (self.graph, read_instance(self.folder / "plain.json")):
            least = frontier_solutions(graph, 2, make_solver("auto", time_limit_s=1.0))[0]
            for method in _METHODS:
                with suppress(SolverError):
                    make_solver(method, time_limit_s=1.0).solve(
                        graph, budget_bytes=least.budget_bytes
                    )

    def run(self, numbers: range, *, tell: Callable[[str], None] = lambda line: None) -> Outcome:
        """Returns the outcome of the cases with these numbers."""
        outcome = Outcome()
        for number in numbers:
            began = time.monotonic()
            chance = random.Random(f"{self.seed}:{number}")
            kind, path = chance.choice(damage.KINDS), self.folder / "damaged.json"
            content, how = damage.damaged(self.seeds[kind], chance)

            path.write_bytes(content)
            self.told = f"{number}: {kind}, {how}"

            for part in (self._read, self._command):
                wrong = self._attempt(part, kind, path, number, outcome.counts)
                if wrong:
                    outcome.wrong.append(wrong)
                    tell(wrong)

            if number % 1000 == 999:
                tell(f"{number + 1} files, {len(outcome.wrong)} wrong")
            outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - began)

        return outcome

    def _attempt(self, part: Any, kind: str, path: Path, number: int, counts: Counter[str]) -> str:
        """Runs a reader or a command and counts the outcome; returns a line if it is wrong.

        A case that takes too long is tried again: the machine may be busy.
        """
        for trial in range(2):
            try:
                with _limit(_HANG_S), joblib.parallel_config("sequential"):
                    counts[part(kind, path, random.Random(f"{self.seed}:{number}"))] += 1
                return ""
            except Hang as error:
                wrong: BaseException = error
                counts["slow once"] += trial == 0
            except Exception as error:  # noqa: BLE001 - a fuzzer looks for any exception
                wrong = error
                break

        end = str(wrong).split()[0] if isinstance(wrong, Wrong) else type(wrong).__name__
        counts[f"wrong: {end}"] += 1

        frame = traceback.extract_tb(wrong.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return f"{self.told}: {end} at {place}: {wrong}"[:600]

    def _read(self, kind: str, path: Path, chance: random.Random) -> str:
        if kind == "measured":
            _check_measured(path)
            return "measured read"

        try:
            if kind in ("plain", "graph"):
                _check_graph(read_instance(path))
            elif kind == "schedule":
                _check_schedule(self.graph, Schedule.load(path))
            elif kind == "plan":
                self._check_cache(path)
                self._check_fixed(Solution.load(path))
            else:
                for solution in load_solutions(path, self.graph):
                    _check_numbers(self.graph, solution)
        except RematError as refusal:
            _check_line(str(refusal))
            return f"{kind} refused"

        return f"{kind} accepted"

    def _check_fixed(self, solution: Solution) -> None:
        step: Any = SimpleNamespace(graph=self.graph)
        _check_numbers(self.graph, FixedPlan(solution)(step))

    def _check_cache(self, path: Path) -> None:
        budget_bytes, made = self.graph.resident_bytes * 100, list[bool]()
        target = self.folder / f"{key_of(self.graph, budget_bytes, 'fuzz')}.json"
        target.write_bytes(path.read_bytes())

        def solve() -> Solution:
            made.append(True)
            steps = range(self.graph.num_operators)
            return Solution.of_steps(
                self.graph, budget_bytes, steps, lower_bound_s=0.0, solver="fuzz", wall_s=0.0
            )

        found = PlanCache(self.folder).get_or_solve(self.graph, budget_bytes, "fuzz", solve)
        target.unlink()
        _check_numbers(self.graph, found, budget_bytes=budget_bytes)

    def _command(self, kind: str, path: Path, chance: random.Random) -> str:
        if kind in ("schedule", "measured"):
            return "read by no command"

        name, arguments = self._arguments(kind, path, chance)
        output = self.folder / name if name else None

        if output is not None:
            arguments = [*arguments, "--output", str(output)]
        self.told = f"{self.told.partition('; remat')[0]}; remat {' '.join(arguments)[:120]}"

        status, stdout, stderr = self._invoke(arguments)
        _check_end(status, stderr)

        if output is not None:
            is_there = output.exists()
            output.unlink(missing_ok=True)
            if is_there != (status == 0) and status not in (3, 4):
                raise Wrong(f"output: the file is {'' if is_there else 'not '}there: {stderr}")

        if any(self.folder.glob(".remat-*.part")):
            raise Wrong("output: a partial file is left")
        if arguments[0] == "solve" and status == 0:
            self._check_answer(path, arguments, json.loads(stdout))

        return f"exit status {status}"

    def _invoke(self, arguments: list[str]) -> tuple[int, str, str]:
        """Returns exit status, stdout and stderr of a command."""
        stdout, stderr = StringIO(), StringIO()
        with redirect_stdout(stdout), redirect_stderr(stderr):
            try:
                self.command.main(arguments, prog_name="remat")
                status: Any = 0
            except SystemExit as end:
                status = end.code or 0
        return status, stdout.getvalue(), stderr.getvalue()

    def _arguments(self, kind: str, path: Path, chance: random.Random) -> tuple[str, list[str]]:
        file, graph = str(path), str(self.folder / "graph.json")
        files = [graph, file] if kind in ("plan", "curve") else [file]
        command = _command_for(kind, chance)

        size, method = damage.budget(chance), chance.choice(_METHODS)
        limit = ["--time-limit", "0.1"]
        plan = str(self.folder / "plan.json")

        return {
            "solve": (
                chance.choice(("", "answer.json")),
                ["solve", file, "--budget", size, "--solver", method, *limit, "--format", "json"],
            ),
            "frontier": (
                "front.json",
                ["frontier", file, "--points", "3", "--solver", method, *limit],
            ),
            "bench": ("", ["bench", file, "--budget", size, "--solver", method, *limit]),
            "sweep": (
                "",
                ["sweep", file, "--budget", size, "--solver", method, *limit, "--jobs", "1"],
            ),
            "plot": ("picture.png", ["plot", *files]),
            "schedule": ("picture.png", ["plot", *files, "--picture", "schedule"]),
            "tradeoff": ("picture.png", ["plot", *files, "--picture", "tradeoff"]),
            "report": (
                "page.html",
                ["report", *(files if kind == "plan" else [file, plan]), "--points", "0"],
            ),
            "curve": ("page.html", ["report", graph, plan, file]),
            "export": ("memory.pickle", ["export", *files]),
            "trace": ("trace.json", ["export", *files]),
        }[command]  # fmt: skip

    def _check_answer(self, path: Path, arguments: list[str], answer: dict[str, Any]) -> None:
        graph = read_instance(path)
        keep_all = simulate(graph, Schedule.keep_all(graph)).peak_bytes
        budget_bytes = parse_budget(arguments[3], keep_all_bytes=keep_all)

        schedule = Schedule.from_steps(graph, answer["order"])
        broken = validate(
            graph, schedule, budget_bytes=budget_bytes, is_free_order=arguments[5] == "free-order"
        )
        if broken:
            raise Wrong(f"invalid: {broken[0]}")

        cost_s = math.fsum(graph.operators[i].cost_s for i in schedule.steps)
        if not math.isclose(cost_s, answer["cost"], rel_tol=1e-9):
            raise Wrong(f"believed: the cost {answer['cost']} is {cost_s}")

        if not 0 <= answer["lower_bound"] <= answer["cost"] * (1 + 1e-9):
            raise Wrong(f"believed: the bound {answer['lower_bound']} of {answer['cost']}")


def _command_for(kind: str, chance: random.Random) -> str:
    """Returns a command, drawn at random, that reads files of this kind."""
    if kind == "plan":
        return chance.choice(["plot", "schedule", "report", *["export", "trace"] * 4])
    if kind == "curve":
        return chance.choice(["tradeoff"] * 3 + ["curve"])

    solving = ["solve"] * 9 + ["frontier", "bench", "sweep"]
    drawing = ["plot", "schedule", "report"] + ["export", "trace"] * 2
    return chance.choice([*solving, *drawing])


def _check_graph(graph: Graph) -> None:
    """Raises `Wrong` if a graph breaks a rule; the rules are copied here on purpose."""
    sizes = [value.size_bytes for value in graph.values]
    workspaces = [op.workspace_bytes for op in graph.operators]
    costs = [op.cost_s for op in graph.operators]
    if min([*sizes, *workspaces, 0]) < 0 or sum(sizes) + max([*workspaces, 0]) >= 2**53:
        raise Wrong("invalid: sizes that can't be counted")

    if not all(0 <= cost <= 1e100 for cost in costs):
        raise Wrong("invalid: a cost")
    if not all(0 <= op.region < 2**31 for op in graph.operators):
        raise Wrong("invalid: a region")

    texts = [v.name for v in graph.values] + [
        text for op in graph.operators for text in (op.name, op.module, op.source, op.target)
    ]
    if any(ord(letter) < 32 or len(text) > 10_000 for text in texts for letter in text):
        raise Wrong("invalid: a text")

    simulate(graph, Schedule.keep_all(graph))


def _check_schedule(graph: Graph, schedule: Schedule) -> None:
    """Raises if the simulator fails on a schedule that the validator accepts."""
    broken = validate(graph, schedule)
    if not broken and simulate(graph, schedule).peak_bytes < 0:
        raise Wrong("invalid: a negative peak")


def _check_numbers(graph: Graph, solution: Solution, budget_bytes: int | None = None) -> None:
    """Raises `Wrong` if a number of a solution differs from the simulator's."""
    if solution.schedule is None:
        return

    limit = solution.budget_bytes if budget_bytes is None else budget_bytes
    broken = validate(graph, solution.schedule, budget_bytes=limit)
    if broken:
        raise Wrong(f"invalid: {broken[0]}")

    simulation = simulate(graph, solution.schedule)
    said = (solution.peak_bytes, solution.cost_s, solution.keep_all_cost_s)
    true = (simulation.peak_bytes, simulation.cost_s, graph.cost_s)
    if said != true:
        raise Wrong(f"believed: {said} is {true}")

    if not graph.cost_s <= solution.lower_bound_s <= solution.cost_s * (1 + 1e-9):
        raise Wrong(f"believed: the bound {solution.lower_bound_s} of {solution.cost_s}")

    is_trivial = solution.lower_bound_s <= graph.cost_s
    if not (is_trivial or solution.is_bound_stated):
        raise Wrong("believed: a bound counts as proved")

    if solution.status == "optimal" and solution.cost_s > graph.cost_s * (1 + 1e-9):
        raise Wrong("believed: a status counts as proved")


def _check_measured(path: Path) -> None:
    store = DiskCache(path)
    for key in ("cpu: mm", "cpu: sin"):
        numbers = store.get(key)
        if numbers is not None and not all(0 <= number <= 1e100 for number in numbers):
            raise Wrong(f"invalid: {numbers} as a measurement")


def _check_end(status: int, stderr: str) -> None:
    if status not in _STATUSES:
        raise Wrong(f"status {status}: {stderr[-200:]}")
    if status == 2:
        _check_line(stderr.rstrip("\n"))


def _check_line(text: str) -> None:
    if len(text.splitlines()) != 1 or len(text) > 2000:
        raise Wrong(f"lines: an error has {len(text.splitlines())} lines, {len(text)} characters")


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    """Runs the cases and writes the outcome; returns 1 if a case failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--files", type=int, default=20_000, help="files (default: 20000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        numbers = range(options.first, options.first + options.files)
        outcome = Fuzzer(Path(folder), options.seed).run(numbers, tell=print)

    result = {
        "environment": environment(seed=options.seed),
        "files": options.files,
        "wrong": len(outcome.wrong),
        "counts": dict(sorted(outcome.counts.items())),
        "slowest_s": round(outcome.slowest_s, 1),
        "seconds": round(time.monotonic() - began, 1),
        "cases": outcome.wrong[:100],
    }

    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({**result, "cases": []}, indent=1))
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
