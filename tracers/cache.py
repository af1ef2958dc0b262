"""Measurements on disk: numbers by key, one JSON file in the user's cache folder.

A cache never makes a step fail: a file that can't be read is ignored, and numbers that can't be
written stay in memory. Both cases log a warning.
"""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from remat.core import serialize
from remat.core.errors import TraceError
from remat.core.files import cache_folder

_LOG = logging.getLogger(__name__)
_FORMAT = "v2"  # v1 had times measured on busy machines
_SECONDS_BETWEEN_WRITES = 1.0


def cache_path(name: str) -> Path:
    """Returns the file of the cache `name`: `$XDG_CACHE_HOME/remat/NAME-v2.json` on Linux."""
    return cache_folder() / f"{name}-{_FORMAT}.json"


@dataclass(eq=False)
class DiskCache:
    """Tuples of numbers by key, in memory and in the JSON file `path`.

    New entries are written at most once per second, when the cache is dropped and at exit. A write
    merges them with what other processes wrote meanwhile, and replaces the whole file, so a reader
    never sees half of it. If two processes write at the same instant, the last one wins.
    """

    path: Path
    _entries: dict[str, tuple[float, ...]] = field(init=False, repr=False)
    _fresh: dict[str, tuple[float, ...]] = field(default_factory=dict, init=False, repr=False)
    _written_s: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._entries = _read(self.path)
        weakref.finalize(self, _write, self.path, self._fresh)

    def get(self, key: str, *ranges: tuple[float, float]) -> tuple[float, ...] | None:
        """Returns the numbers of `key`, or None.

        Args:
            key: what was measured.
            ranges: the smallest and the largest possible value of each number. A number outside its
                range comes from a damaged file; the result is then None.
        """
        numbers = self._entries.get(key)
        if numbers is None or len(numbers) != len(ranges):
            return None
        is_possible = all(
            least <= number <= most for number, (least, most) in zip(numbers, ranges, strict=True)
        )
        return numbers if is_possible else None

    def put(self, key: str, numbers: tuple[float, ...], *, is_kept: bool = True) -> None:
        """Stores the numbers of `key`, only for this process unless `is_kept`.

        They are written if the last write is over a second ago.
        """
        self._entries[key] = numbers
        if not is_kept:
            return
        self._fresh[key] = numbers
        if time.monotonic() - self._written_s > _SECONDS_BETWEEN_WRITES:
            self.flush()

    def flush(self) -> None:
        """Writes the new entries."""
        _write(self.path, self._fresh)
        self._written_s = time.monotonic()


def _read(path: Path) -> dict[str, tuple[float, ...]]:
    try:
        if not path.exists():
            return {}
        return serialize.load(dict[str, tuple[float, ...]], path, TraceError)
    except (TraceError, OSError) as reason:
        _LOG.warning("a cache can't be read; it is ignored and will be written again: %s", reason)
        return {}


def _write(path: Path, fresh: dict[str, tuple[float, ...]]) -> None:
    if not fresh:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        serialize.save({**_read(path), **fresh}, path)
    except OSError as reason:
        _LOG.warning("measurements can't be written to the cache, and stay in memory: %s", reason)
    fresh.clear()
