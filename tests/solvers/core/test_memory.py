"""Too little memory: plain Python, one thread or one technique fewer; a warning, no error."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Status
from remat.solvers import make_solver
from remat.solvers.auto.starting import Families
from remat.solvers.checkmate.stage_search import StageSearch
from remat.solvers.core.interrupt import is_interrupted, threads_beside
from remat.solvers.core.memory import leaving_out
from remat.tracers.synthetic import random_layered
from tests.support.checkout import ROOT

SOLVE = """
from remat.core.graph import Graph
from remat.solvers import make_solver
graph = Graph.from_arrays([1] * 9, [1] * 9, [(i, i + 1) for i in range(8)] + [(0, 8), (1, 7)])
print(make_solver("auto", time_limit_s=5).solve(graph, budget_bytes=3).status)
"""


def problem() -> tuple[Graph, int]:
    graph = random_layered(60, seed=3, is_training=False)
    return graph, simulate(graph, Schedule.keep_all(graph)).peak_bytes * 85 // 100


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError


def test_numba_that_cannot_be_loaded_is_not_needed(tmp_path: Path) -> None:
    """Naive: every command ends with the `OSError` of its library."""
    fake = tmp_path / "numba"
    fake.mkdir()
    text = "libllvmlite.so: failed to map segment from shared object"
    (fake / "__init__.py").write_text(f"raise OSError({text!r})\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    done = subprocess.run(
        [sys.executable, "-c", SOLVE], capture_output=True, text=True, env=environment, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == "optimal\n"
    assert "numba can't be loaded (libllvmlite" in done.stderr


def test_a_technique_without_memory_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Families, "run", no_memory)
    graph, budget = problem()
    with caplog.at_level(logging.WARNING):
        solution = make_solver("auto", time_limit_s=3.0, gap=0.0).solve(graph, budget_bytes=budget)
    assert solution.is_solved
    assert "too little memory for families" in caplog.text
    assert solution.status is Status.OPTIMAL or "families" in solution.cut_short


def test_one_thread_is_enough_if_no_other_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    graph, budget = problem()
    with caplog.at_level(logging.WARNING):
        solution = make_solver("auto", time_limit_s=3.0, gap=0.0).solve(graph, budget_bytes=budget)
    assert solution.is_solved
    assert "in one thread" in caplog.text


def test_the_milp_returns_its_best_answer_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageSearch, "run", no_memory)
    graph, budget = problem()
    solution = make_solver("milp", time_limit_s=3.0, gap=0.0).solve(graph, budget_bytes=budget)
    assert solution.status in (Status.FEASIBLE, Status.NO_SOLUTION)
    assert solution.cut_short == "too little memory for the rest of the search"


def test_other_errors_are_passed_on() -> None:
    with pytest.raises(RuntimeError, match="a bug"), leaving_out("anything", lambda _: None):
        raise RuntimeError("a bug")


def test_a_second_thread_ends_when_the_first_raises() -> None:
    """Naive: the first waits until the second reaches its own limit."""

    def work() -> None:
        until_s = time.monotonic() + 60.0
        while not is_interrupted() and time.monotonic() < until_s:
            time.sleep(0.01)

    def is_told_to_end() -> None:
        with threads_beside(1) as threads:
            threads.submit(work)
            raise SystemExit(143)

    began = time.monotonic()
    with pytest.raises(SystemExit):
        is_told_to_end()
    assert time.monotonic() - began < 30.0
    assert not is_interrupted()
