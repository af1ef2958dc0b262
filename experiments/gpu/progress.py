"""What a process of the GPU run is doing and until when, in a file that its parent reads."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Named = TypeVar("Named", bound=tuple[Any, ...])


@dataclass
class Progress:
    """The part of the run that goes on, and what a process that continues it has to know.

    Attributes:
        path: the file; None if nobody reads it.
        section: the section that runs.
        way: the way of running a model that is compared; empty outside of comparisons.
        until: when what runs should have ended, as `time.time()`.
        began_s: when the run began, as `time.perf_counter()`, which all processes share.
        requested: the peak in bytes of each way that was measured, by model and way.
    """

    path: Path | None = None
    section: str = ""
    way: str = ""
    until: float = math.inf
    began_s: float = field(default_factory=time.perf_counter)
    requested: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Progress:
        """Returns what a process wrote, or a fresh one if it has not written yet."""
        written = json.loads(path.read_text()) if path.exists() else {}
        return cls(path, **written)

    def note(self, **changes: Any) -> None:
        """Changes attributes, and writes all of them."""
        for name, value in changes.items():
            setattr(self, name, value)
        if self.path is not None:
            whole = self.path.with_suffix(".new")
            whole.write_text(json.dumps({k: v for k, v in asdict(self).items() if k != "path"}))
            whole.replace(self.path)

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Raises `TimeoutError` if what is inside takes longer. Not to be nested.

        A call that is stuck outside of Python is not interrupted: the parent ends this process.
        """

        def stop(*_: Any) -> None:
            raise TimeoutError(f"took longer than {seconds:.0f} s")

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        self.note(until=time.time() + seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            self.note(until=math.inf)

    def sections_left(self, names: Sequence[str]) -> list[str]:
        """Returns the sections to run: the one with the way that was ended, and those after it."""
        if self.section not in names:
            return list(names)
        return list(names[names.index(self.section) + (not self.way) :])

    def ways_left(self, ways: Sequence[Named]) -> list[Named]:
        """Returns the ways after the one that was ended, behind the first, which is compared with.

        Later calls return all ways.
        """
        names = [way[0] for way in ways]
        ended, self.way = self.way, ""
        if ended not in names:
            return list(ways)
        place = names.index(ended)
        return [*ways[: min(place, 1)], *ways[place + 1 :]]
