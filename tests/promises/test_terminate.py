"""SIGTERM, as job managers send it: exit status 143, soon, and nothing stays behind.

For a process that a signal ended, a shell reports 128 + the signal's number, Python -number.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from remat.tracers.synthetic import random_layered
from tests.support.training_script import TRAINING

LIMIT_S, SOON_S = 60, 20.0
OWN_HANDLER = """
import signal, sys
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers import make_solver

def leave(number, _):
    raise SystemExit(128 + number)

signal.signal(signal.SIGTERM, leave)
graph = Graph.load(sys.argv[1])
budget = simulate(graph, Schedule.keep_all(graph)).peak_bytes * 8 // 10
tell = lambda moment: moment.cost_s is not None and print("found", flush=True)
solver = make_solver("auto", time_limit_s=float(sys.argv[2]), gap=0.0, progress=tell)
solver.solve(graph, budget_bytes=budget)
"""


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A graph that keeps a solver busy for a while."""
    path = tmp_path / "graph.json"
    random_layered(150, seed=3, is_training=False).save(path)
    return path


@contextmanager
def begun(*args: str, cache: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Starts a process in a group of its own, which is killed when the test ends."""
    environment = {**os.environ, **({"XDG_CACHE_HOME": str(cache)} if cache else {})}

    with subprocess.Popen(
        [sys.executable, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"REMAT_PROGRESS": "1"},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if members(process.pid):
                os.killpg(process.pid, signal.SIGKILL)


def members(group: int) -> list[str]:
    """The names of the group's running processes, from `/proc`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = path.read_text().rsplit(")", 1)
        except OSError:  # it has just ended
            continue

        state, _, own_group = rest.split()[:3]
        if int(own_group) == group and state != "Z":
            found.append(name)
    return found


def terminate(process: subprocess.Popen[str]) -> int:
    """Sends SIGTERM to the one process, and returns the exit status as a shell reports it."""
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SOON_S)
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode

    while members(process.pid) and time.monotonic() - asked < SOON_S:
        time.sleep(0.1)
    assert members(process.pid) == []
    return status


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are listed in /proc")
def test_no_worker_of_a_sweep_stays_behind(graph: Path) -> None:
    """Naive: joblib's workers go on solving for a parent that is gone."""
    limit = ("--jobs", "2", "--gap", "0", "--time-limit", str(LIMIT_S))
    budgets = ("--budget", "80%", "--budget", "70%")

    with begun("-m", "remat", "sweep", str(graph), *budgets, *limit) as process:
        while len(members(process.pid)) < 3:
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(2.0)
        assert terminate(process) == 143


def test_a_command_ends_at_once_and_writes_nothing(graph: Path) -> None:
    output = ("--output", str(graph.with_name("plan.json")))
    limits = ("--gap", "0", "--time-limit", str(LIMIT_S))

    with begun("-m", "remat", "solve", str(graph), "--budget", "80%", *output, *limits) as process:
        assert process.stderr is not None
        process.stderr.readline()  # its first word of progress
        assert terminate(process) == 143
    assert [path.name for path in graph.parent.iterdir()] == [graph.name]


def test_a_script_that_plans_leaves_no_half_plan(tmp_path: Path) -> None:
    with begun("-c", TRAINING, str(LIMIT_S), "2", cache=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "solving\n"
        assert terminate(process) == 143
    assert list(tmp_path.rglob("plans-*/*")) == []


def test_a_handler_that_raises_is_not_kept_waiting(graph: Path) -> None:
    """Naive: the process waits for the thread that raises the bound, up to the time limit."""
    with begun("-c", OWN_HANDLER, str(graph), str(LIMIT_S)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "found\n"
        time.sleep(1.0)
        assert terminate(process) == 143
