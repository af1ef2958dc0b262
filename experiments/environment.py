"""Where and when a result was made: hardware, versions, seed, date and commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("remat", "torch", "numpy", "highspy", "pulp", "numba", "transformers")


def environment(*, seed: int | None = None) -> dict[str, Any]:
    """Returns what a reader needs to repeat a result, ready for JSON."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "seed": seed,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _commit() -> str:
    """Returns the commit of the checkout, with `+changes` if files other than results differ.

    If the files are a copy without git, `REMAT_COMMIT` names the commit.
    """
    if named := os.environ.get("REMAT_COMMIT"):
        return named

    folder = Path(__file__).resolve().parent
    try:
        commit = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
        changes = _output(
            "git",
            "-C",
            str(folder.parent),
            "status",
            "--porcelain",
            "-uno",
            "--",
            ".",
            ":!experiments/results",
        )
        return f"{commit}+changes" if changes else commit
    except (OSError, subprocess.CalledProcessError):
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # no such name on this system
        return None


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
