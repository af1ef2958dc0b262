"""Ctrl-C in real processes: the best schedule so far is returned, soon.

Handlers that the program installed are left alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Status
from remat.core.validate import validate
from remat.solvers.auto.minimum import minimum
from remat.solvers.core.interrupt import heeding_interrupts, is_interrupted
from remat.solvers.exhaustive.solver import Exhaustive
from remat.solvers.exhaustive.states import Found, cheapest
from remat.tracers.synthetic import random_layered
from tests.support.training_script import TRAINING

LIMIT_S = 60.0
SOON_S = 20.0  # a busy machine first finishes what it is computing
SCRIPT = """
import sys, time
from remat.core.graph import Graph
from remat.solvers import make_solver

def tell(moment):
    if moment.cost_s is not None:
        print("found", flush=True)

graph = Graph.load(sys.argv[1])
solver = make_solver(sys.argv[2], time_limit_s=float(sys.argv[4]), gap=0.0, progress=tell)
solution = solver.solve(graph, budget_bytes=int(sys.argv[3]))
print("answer", solution.status, solution.peak_bytes, solution.cost_s, flush=True)
"""


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Handles interrupts as a program on a terminal does.

    A program that a shell starts in the background ignores them, and so do its children.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def problem(folder: Path, num_nodes: int) -> tuple[Path, Graph, int]:
    """Saves a graph that keeps a solver busy for a while, and returns it with a budget."""
    graph = random_layered(num_nodes, seed=3, is_training=False)
    path = folder / "graph.json"
    graph.save(path)
    return path, graph, simulate(graph, Schedule.keep_all(graph)).peak_bytes * 80 // 100


@pytest.mark.parametrize(("solver", "num_nodes"), [("auto", 150), ("milp", 40), ("free-order", 70)])
def test_a_solver_returns_the_best_so_far(tmp_path: Path, solver: str, num_nodes: int) -> None:
    path, graph, budget = problem(tmp_path, num_nodes)
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        SCRIPT,
        str(path),
        solver,
        str(budget),
        str(LIMIT_S),
    ]

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "found\n"
        time.sleep(0.5)  # into the next model, or the next round of annealing
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=SOON_S)

    assert process.returncode == 0, errors
    assert time.monotonic() - asked < SOON_S
    _, status, peak, cost_s = output.splitlines()[-1].split()
    assert status == "feasible"
    assert int(peak) <= budget
    assert float(cost_s) >= graph.cost_s
    assert "interrupted" in errors


def test_the_command_line_prints_the_best_so_far(tmp_path: Path) -> None:
    """Its progress, shown on a pseudo-terminal, tells when there is an answer to print."""
    path, graph, budget = problem(tmp_path, 150)
    terminal, end = os.openpty()

    command = [
        sys.executable,
        "-m",
        "remat",
        "solve",
        str(path),
        "--budget",
        str(budget),
        "--gap",
        "0",
        "--time-limit",
        str(LIMIT_S),
    ]

    process = subprocess.Popen(
        [*command, "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=end,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "REMAT_PROGRESS"},
    )
    os.close(end)

    seen = b""
    while b"found +" not in seen:
        seen += os.read(terminal, 4096)

    process.send_signal(signal.SIGINT)
    drain = threading.Thread(target=_read_all, args=(terminal,), daemon=True)
    drain.start()
    output, _ = process.communicate(timeout=SOON_S)
    drain.join()
    os.close(terminal)

    assert process.returncode == 0
    answer = json.loads(output)
    assert answer["status"] == "feasible"
    assert validate(graph, Schedule.from_steps(graph, answer["order"]), budget_bytes=budget) == []


def _read_all(terminal: int) -> None:
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:  # the other end is closed
        return


def training(cache: Path, interrupts: int) -> tuple[int, str, str, list[Path]]:
    """Trains a model and presses Ctrl-C a second into solving.

    Returns the exit status, what the script printed, its errors, and the plans that it left.
    """
    # the second Ctrl-C may come after planning, and has to stop the training then
    num_steps = 2 if interrupts == 1 else 10**9
    command = [sys.executable, "-c", TRAINING, str(LIMIT_S), str(num_steps)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "solving\n"
        for _ in range(interrupts):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)

        # Python takes two presses during one library call for one: press until the process ends
        began = time.monotonic()
        while interrupts > 1 and process.poll() is None and time.monotonic() - began < SOON_S:
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)

        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()  # otherwise a failure would wait forever
    return process.returncode, output, errors, list(cache.rglob("plans-*/*"))


def test_an_interrupted_plan_is_used_and_not_kept(tmp_path: Path) -> None:
    """Naive: it is stored, and later jobs that have time to plan get it too."""
    status, output, errors, plans = training(tmp_path, 1)
    assert status == 0, errors
    assert "interrupted by Ctrl-C; not kept for later jobs" in output
    assert plans == []


def test_a_second_interrupt_stops_a_script_that_plans(tmp_path: Path) -> None:
    status, output, errors, plans = training(tmp_path, 2)
    assert status == -signal.SIGINT
    assert output == ""
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert plans == []


def test_the_first_interrupt_is_noted_and_the_next_one_raises() -> None:
    with heeding_interrupts():
        signal.raise_signal(signal.SIGINT)
        assert is_interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert not is_interrupted()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupted_exhaustive_search_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Found:
        signal.raise_signal(signal.SIGINT)
        while not is_interrupted():
            time.sleep(0.001)
        return cheapest(*args, **kwargs)

    monkeypatch.setattr("remat.solvers.exhaustive.solver.cheapest", interrupted)
    graph = random_layered(24, seed=3)
    solution = Exhaustive().solve(graph, budget_bytes=minimum(graph).peak_bytes)
    assert solution.status is Status.NO_SOLUTION and "Ctrl-C" in solution.cut_short


def test_the_programs_own_handler_stays() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))

    try:
        with heeding_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert not is_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_other_threads_set_no_handler() -> None:
    results: list[bool] = []

    def work() -> None:
        with heeding_interrupts():
            results.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [True]
