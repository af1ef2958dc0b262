"""The checks of `remat doctor`: versions, devices, solvers, the cache, a small problem."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from remat.core.budget import format_bytes
from remat.core.errors import RematError
from remat.core.graph import Graph
from remat.core.solution import Solution
from remat.plan.disk_cache import PlanCache, plans_path
from remat.solvers import make_solver

_TORCH_VERSIONS = ((2, 11), (2, 15))  # first and last minor release that the runtime is tested on
_BACKENDS = "highspy", "pulp", "numba"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `is_ok` is None if it is only information."""

    name: str
    is_ok: bool | None
    detail: str


def examine() -> Iterator[Finding]:
    """Yields the findings one by one; `is_ok` is False if something has to be repaired."""
    yield Finding("python", None, f"{platform.python_version()} on {platform.platform(terse=True)}")
    yield from _torch()
    for name in _BACKENDS:
        yield _module(name)
    yield _inductor()
    yield _cache()
    yield _self_check()


def _torch() -> Iterator[Finding]:
    try:
        torch = importlib.import_module("torch")
    except ImportError as reason:
        yield Finding("torch", False, f"does not import: {reason}")
        return

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    first, last = _TORCH_VERSIONS
    is_known = first <= version <= last
    tested = f"tested on {first[0]}.{first[1]} to {last[0]}.{last[1]}"

    yield Finding(
        "torch",
        is_known,
        torch.__version__ if is_known else f"{torch.__version__}; remat is {tested}",
    )

    if not torch.cuda.is_available():
        yield Finding(
            "cuda", None, "no GPU is visible; models run on the CPU, plans work for any device"
        )
        return

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(
            f"cuda:{index}",
            None,
            f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, CUDA "
            f"{torch.version.cuda}",
        )


def _module(name: str) -> Finding:
    try:
        importlib.import_module(name)
    except ImportError as reason:
        return Finding(name, False, f"does not import: {reason}")
    return Finding(name, True, importlib.metadata.version(name))


def _inductor() -> Finding:
    """Returns which compilers `executor="inductor"` can use."""
    compiler = shutil.which("g++")
    found = [f"{compiler} for CPUs" if compiler else "no g++, so not for CPUs"]
    try:
        found.append(f"triton {importlib.metadata.version('triton')} for GPUs")
    except importlib.metadata.PackageNotFoundError:
        found.append("no triton, so not for GPUs")
    return Finding("inductor", None, "; ".join(found))


def _cache() -> Finding:
    folder = Path(platformdirs.user_cache_dir("remat"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as reason:
        return Finding(
            "cache",
            False,
            f"{folder} can't be written: {reason.strerror}; measured costs are not kept",
        )

    plans = PlanCache(plans_path())
    sizes = [status.st_size for _, status in plans.files()]
    held = (
        f"{len(sizes)} plans of {format_bytes(sum(sizes))} in {plans.folder.name}, of at most "
        f"{format_bytes(plans.limit_bytes)}"
    )

    return Finding("cache", True, f"{folder} can be written; {held}")


def _self_check() -> Finding:
    # a chain of four operators and its backward
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (2, 5), (4, 5), (1, 6), (5, 6), (0, 7), (6, 7)]
    graph = Graph.from_arrays([1.0] * 8, [4] * 8, edges, first_backward=4)

    try:
        solutions = [
            make_solver("auto", time_limit_s=10.0).solve(graph, budget_bytes=budget)
            for budget in (20, 16)
        ]
    except (RematError, ImportError) as reason:
        return Finding("self-check", False, f"a chain of eight operators can't be solved: {reason}")

    return Finding(
        "self-check", all(s.is_solved for s in solutions), ", ".join(map(_summary, solutions))
    )


def _summary(solution: Solution) -> str:
    return f"budget {solution.budget_bytes}: {solution.status} at cost {solution.cost_s:g}"
