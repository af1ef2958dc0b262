"""Plans on disk, one file per plan, so that a restarted job need not solve again.

The files are in the user's cache folder. A file is written whole or not at all, and any number of
processes may read and write. A plan that was read is checked: it is used only if it was made for
this graph and is valid within the budget. The cache never makes a step fail: a plan that can't be
read is made again, and a plan that can't be written stays in memory, each with a warning.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from remat.core.errors import RematError
from remat.core.files import cache_folder, collect_parts
from remat.core.graph import Graph
from remat.core.solution import Solution

_LOG = logging.getLogger(__name__)
_FORMAT = "v1"
_SOURCES = ("core", "solvers")  # folders of the code that plans depend on


def plans_path() -> Path:
    """Returns the folder of the plans: `$XDG_CACHE_HOME/remat/plans-v1` on Linux."""
    return cache_folder() / f"plans-{_FORMAT}"


@dataclass(frozen=True)
class PlanCache:
    """Plans by graph, costs, budget, solver, and the version of the code.

    Attributes:
        folder: the folder of the files.
        limit_bytes: above this total size, the least recently used plans are removed.
    """

    folder: Path
    limit_bytes: int = 256 << 20

    def get_or_solve(
        self, graph: Graph, budget_bytes: int, how: str, solve: Callable[[], Solution]
    ) -> Solution:
        """Returns the plan of `graph` for a budget, from the disk or else from `solve`.

        A new plan is written to the disk, unless its search was cut short: a later job may have
        more time.

        Args:
            graph: the step; its measured costs and workspaces are part of the key.
            budget_bytes: budget of the plan.
            how: the solver and its options, as a text that is the same in another process.
            solve: finds the plan.
        """
        path = self.folder / f"{key_of(graph, budget_bytes, how)}.json"
        found = self._read(path, graph, budget_bytes)
        if found is None:
            found = solve()
            if not found.cut_short:
                self._write(path, found)
        return found

    def files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yields the file of each plan, with its `stat`."""
        for path in self.folder.glob("*.json"):
            try:
                yield path, path.stat()
            except FileNotFoundError:  # another process removed it
                continue

    def _read(self, path: Path, graph: Graph, budget_bytes: int) -> Solution | None:
        try:
            if not path.exists():
                return None
            solution = Solution.load(path).on(graph)
            os.utime(path)
        except (RematError, OSError) as reason:
            _LOG.warning("the cached plan %s can't be read, and is made again: %s", path, reason)
            return None

        is_asked = solution.budget_bytes == budget_bytes and not solution.is_free_order
        if not (is_asked and solution.is_solved):
            _LOG.warning("the cached plan %s does not fit its step, and is made again", path)
            return None
        return solution

    def _write(self, path: Path, solution: Solution) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            solution.save(path)
            self._trim(path)
        except OSError as reason:
            _LOG.warning("a plan can't be written to the cache, and stays in memory: %s", reason)

    def _trim(self, fresh: Path) -> None:
        """Removes the least recently used plans, and partial files that killed writers left.

        The plan just written stays, even if its date is the oldest: the clocks of machines that
        share the folder may disagree.
        """
        files = sorted(self.files(), key=lambda item: item[1].st_mtime)
        total = sum(status.st_size for _, status in files)
        for path, status in files:
            if total <= self.limit_bytes:
                break
            if path != fresh:
                path.unlink(missing_ok=True)
                total -= status.st_size

        collect_parts(self.folder, now_s=fresh.stat().st_mtime)


def key_of(graph: Graph, budget_bytes: int, how: str) -> str:
    """Returns the name of a plan's file: a digest of everything the plan depends on."""
    arrays = graph.arrays
    digest = hashlib.sha256(
        f"{_FORMAT} {_source_digest()} {graph.fingerprint} {graph.device} {budget_bytes} "
        f"{how}".encode()
    )
    digest.update(arrays.cost_s.tobytes())
    digest.update(arrays.workspace_bytes.tobytes())
    return digest.hexdigest()[:40]


@cache
def _source_digest() -> str:
    """Returns a digest of the code that makes plans, so that changed code makes new plans."""
    root = Path(__file__).parents[1]
    files = [path for name in _SOURCES for path in sorted((root / name).rglob("*.py"))]

    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
