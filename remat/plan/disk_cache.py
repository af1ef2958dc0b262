"""Plans on disk: one file a plan in the user's cache folder, so that a job that starts again, or
another rank, plans nothing twice.

A file is written whole or not at all, and any number of processes may read and write. What is read
is judged anew: a plan counts only where it was made for this graph and is valid within the budget.
A cache is never a reason to fail: what can't be read is planned again, and what can't be written is
kept in memory, with a warning.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import platformdirs

from remat.core.errors import RematError
from remat.core.files import collect_parts
from remat.core.graph import Graph
from remat.core.solution import Solution

_LOG = logging.getLogger(__name__)
_FORMAT = "v1"
_SOURCES = ("core", "solvers")  # the folders of what a plan depends on beside its graph


def plans_path() -> Path:
    """Returns the folder of the plans: `$XDG_CACHE_HOME/remat/plans-v1` on Linux."""
    return platformdirs.user_cache_path("remat") / f"plans-{_FORMAT}"


@dataclass(frozen=True)
class PlanCache:
    """Plans by graph, costs, budget, solver and the version of both.

    Attributes:
        folder: where the files lie.
        limit_bytes: beyond it the plans that were not used for longest go.
    """

    folder: Path
    limit_bytes: int = 256 << 20

    def get_or_solve(
        self, graph: Graph, budget_bytes: int, how: str, solve: Callable[[], Solution]
    ) -> Solution:
        """Returns the plan of `graph` for a budget.

        From the disk, or else from `solve`, and then on the disk, unless its search was cut short:
        a later job may have the time that this one had not.

        Args:
            graph: the step; its measured costs and workspaces are part of the key.
            budget_bytes: what the plan may hold.
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
        """Yields each plan's file, and what the file system knows of it."""
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
            _LOG.warning("the cached plan %s can't be used, and is made again: %s", path, reason)
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
            _LOG.warning("a plan stays in memory, its cache can't be written: %s", reason)

    def _trim(self, fresh: Path) -> None:
        """Removes the plans that were not used for longest, and what killed writers left behind.

        Not the one just written: the clocks of machines that share a folder disagree, and its date
        may be the oldest.
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
    """Returns a digest of all that a plan depends on."""
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
    """A digest of the code that makes plans.

    A changed solver makes new ones, in a release and in a checkout.
    """
    root = Path(__file__).parents[1]
    files = [path for name in _SOURCES for path in sorted((root / name).rglob("*.py"))]

    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
