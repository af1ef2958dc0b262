"""The search runs compiled or not.

Without numba, with its compiler off, and without a folder for compiled code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from remat.solvers.core import compiled
from tests.support.checkout import ROOT

SOLVE = """
import math
import sys
if "without numba" in sys.argv:
    sys.modules["numba"] = None
from remat.solvers.auto.solver import Auto
from remat.solvers.core.compiled import IS_COMPILED
from remat.solvers.auto.minimum import minimum
from remat.solvers.search.greedy_eviction import is_compiled, steps_with_eviction
from remat.tracers.synthetic import random_step
from remat.core.validate import validate
graph, compiles_all = random_step(30, seed=1), "eviction only" not in sys.argv
if not compiles_all:
    assert not is_compiled() and steps_with_eviction(graph, 1 << 40) is not None and is_compiled()
budget = minimum(graph, time_limit_s=math.inf if compiles_all else 1.0).peak_bytes * 11 // 10
solution = Auto(time_limit_s=15 if compiles_all else 1.0).solve(graph, budget_bytes=budget)
assert solution.schedule is not None and not validate(graph, solution.schedule, budget_bytes=budget)
print("compiled" if IS_COMPILED else "plain")
"""
# a locator for cells of notebooks, which finds no folder here
NO_FOLDER = {"NUMBA_CACHE_LOCATOR_CLASSES": "IPythonCacheLocator"}


def solve(arguments: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-c", SOLVE, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("arguments", "variables"), [(["without numba"], {}), ([], {"NUMBA_DISABLE_JIT": "1"})]
)
def test_without_the_compiler_it_solves_in_plain_python(
    arguments: list[str], variables: dict[str, str]
) -> None:
    done = solve(arguments, variables)
    assert done.stdout == "plain\n"
    assert done.stderr.count("the search runs in plain Python") == 1


def test_without_a_folder_for_compiled_code_it_solves_and_says_so_once() -> None:
    """The annealing would be compiled in the same way, but takes several times as long."""
    pytest.importorskip("numba")
    done = solve(["eviction only"], NO_FOLDER)
    assert done.stdout == "compiled\n"
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1


@pytest.mark.parametrize(("changed", "beside"), [("function", "."), ("constant", "nested.")])
def test_a_change_recompiles_everything_that_used_the_old_code(
    changed: str, beside: str, tmp_path: Path
) -> None:
    """Also through functions and constants of other files, however they are imported.

    The compiled function's own file does not change.
    """
    pytest.importorskip("numba")
    header = "from remat.solvers.core.compiled import compiled, inner\n"
    package = tmp_path / "nested"
    package.mkdir()
    (package / "__init__.py").touch()

    (package / "between.py").write_text(
        f"{header}from {beside}innermost import first\n"
        "@inner\ndef second(x):\n    return first(x)\n"
    )
    (package / "outermost.py").write_text(
        f"{header}from {beside}between import second\n"
        "@compiled\ndef third(x):\n    return second(x)\n"
    )

    answers: list[str] = []
    for number in (1, 2, 2):
        (package / "constants.py").write_text(f"STEP = {number if changed == 'constant' else 0}\n")
        step = f"STEP + {number if changed == 'function' else 0}"
        innermost = (
            f"{header}from {beside}constants import STEP\n"
            f"@inner\ndef first(x):\n    return x + {step}\n"
        )
        if changed == "function" or not answers:
            (package / "innermost.py").write_text(innermost)

        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
        command = [sys.executable, "-c", "from nested.outermost import third; print(third(0))"]
        answers.append(
            subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            ).stdout.strip()
        )

    assert answers == ["1", "2", "2"]


def test_processes_that_start_together_may_drop_the_same_stale_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: a file that another process deletes after the listing is an error."""
    stale, gone = tmp_path / "loops.first-1.py311.nbc", tmp_path / "loops.second-2.py311.nbc"
    stale.touch()
    os.utime(stale, (0, 0))
    monkeypatch.setattr(compiled, "_sources", {Path(__file__)})
    monkeypatch.setattr(compiled, "_cached", lambda _: [gone, stale])
    compiled._drop_stale(len)
    assert not stale.exists()
