"""The stages of work that are running; a thread shows the innermost one.

Stages nest. The status line shows the text of the innermost stage, and the time since the outermost
one began. The thread updates it a few times a second, from when the first stage begins until the
last one ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from remat.narration.status_line import StatusLine

_BETWEEN_LOOKS_S = 0.25


class Stage:
    """A stage of work.

    Attributes:
        text: what is done, such as "solving 594 operators".
        began_s: when it began, by `time.perf_counter`.
    """

    def __init__(self, text: str) -> None:
        """Begins the stage now."""
        self.text, self.began_s = text, time.perf_counter()
        self._detail = ""

    def say(self, detail: str) -> None:
        """Sets the detail that is shown after the text, such as the progress."""
        self._detail = detail

    @property
    def elapsed_s(self) -> float:
        """Seconds since the stage began."""
        return time.perf_counter() - self.began_s

    def __str__(self) -> str:
        return f"{self.text}: {self._detail}" if self._detail else self.text


class _Narrator:
    """The running stages of this process, and the thread that shows them."""

    def __init__(self) -> None:
        self._stages: list[Stage] = []
        self._changed = threading.Condition()
        self._line = StatusLine()
        self._thread: threading.Thread | None = None

    def begin(self, stage: Stage) -> None:
        with self._changed:
            self._stages.append(stage)
            if self._thread is None:
                thread = threading.Thread(target=self._tell, daemon=True, name="remat-status")
                with suppress(RuntimeError):  # no memory for its stack: nothing is shown
                    thread.start()
                    self._thread = thread

    def end(self, stage: Stage) -> None:
        with self._changed:
            self._stages.remove(stage)
            if not self._stages:
                self._line.clear()
                self._changed.notify()

    def _tell(self) -> None:
        with self._changed:
            while self._stages:
                self._line.show(str(self._stages[-1]), self._stages[0].elapsed_s)
                self._changed.wait(_BETWEEN_LOOKS_S)

            self._thread = None


_narrator = _Narrator()


def _forget_stages() -> None:
    """Starts without stages in a forked process, which has none of its parent's threads."""
    global _narrator
    _narrator = _Narrator()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_stages)


@contextmanager
def stage(text: str) -> Iterator[Stage]:
    """Shows `text` on stderr while the block runs, if that takes over a second.

    On a terminal it is one line that is rewritten, otherwise a new line every few seconds.

    >>> with stage("counting") as told:
    ...     told.say("1 of 2")
    """
    begun, narrator = Stage(text), _narrator
    narrator.begin(begun)
    try:
        yield begun
    finally:
        narrator.end(begun)
