"""Runs part of the tests on each supported version of PyTorch, in its own environment.

    python -m experiments.versions [--torch 2.11.0 2.12.1 ...] [--folder FOLDER]

Makes a virtual environment for each version in the folder (a CUDA build of several GB if PyPI has
no other), installs this checkout with its test extra, and runs the tests of the parts that use
private names of PyTorch: tracing, rewriting, running, pieces, Inductor, gradients that must never
be wrong. Writes `experiments/results/versions.json` and `.md` after each version; versions named on
the command line are run again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .command_line import parser_of
from .environment import environment

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "versions.json"
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TESTS = (
    "tests/tracers", "tests/run", "tests/pieces", "tests/inductor", "tests/face",
    "tests/promises/test_never_wrong.py", "tests/promises/test_computed_again.py",
    "tests/promises/test_training_loops.py",
)  # fmt: skip
HOW = ("-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile")  # as `make test`


def installed(version: str, folder: Path) -> Path:
    """Returns the Python of an environment with that version of PyTorch; makes it if missing."""
    place = folder / f"torch-{version}"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)

    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        f"torch=={version}",
        "-e",
        f"{ROOT}[test]",
    ]
    subprocess.run(install, check=True)

    return python


def tested(python: Path, folder: Path) -> dict[str, Any]:
    """Runs the tests, and returns how many passed and which failed."""
    report = folder / "report.xml"
    began = time.perf_counter()
    command = [str(python), "-m", "pytest", *HOW, f"--junitxml={report}", *TESTS]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)

    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [
        f"{case.get('classname', '')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)

    return {
        "passed": len(cases) - len(failed) - skipped,
        "failed": failed,
        "skipped": skipped,
        "packages": _packages(python),
        "wall_s": round(time.perf_counter() - began),
    }


def _packages(python: Path) -> dict[str, str]:
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({n: version(n) for n in ('torch', 'transformers', 'numpy')}))"
    )
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def table(versions: dict[str, Any]) -> str:
    """Returns the results as Markdown."""
    lines = [
        "| PyTorch | transformers | passed | failed | skipped | which failed |",
        "|---|---|---:|---:|---:|---|",
    ]

    for name, row in sorted(versions.items()):
        failed = ", ".join(f"`{test.rpartition('.')[2]}`" for test in row["failed"])
        lines.append(
            f"| {name} | {row['packages']['transformers']} | {row['passed']} | "
            f"{len(row['failed'])} | {row['skipped']} | {failed} |"
        )

    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Tests the requested versions."""
    parser = parser_of(__doc__)
    parser.add_argument("--torch", nargs="+", default=VERSIONS, metavar="VERSION")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions")
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)

    asked.folder.mkdir(parents=True, exist_ok=True)
    versions = json.loads(asked.output.read_text())["versions"] if asked.output.exists() else {}
    where = environment(seed=0)

    for version in asked.torch:
        row = tested(installed(version, asked.folder), asked.folder)
        versions[version] = {**row, "commit": where["commit"]}

        record = {"environment": where, "tests": TESTS, "versions": versions}
        asked.output.write_text(json.dumps(record, indent=1) + "\n")
        asked.output.with_suffix(".md").write_text(table(versions))
        print(f"{version}: {row['passed']} passed, {len(row['failed'])} failed", file=sys.stderr)


if __name__ == "__main__":
    main()
