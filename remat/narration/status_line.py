"""A status line on stderr: rewritten in place on a terminal, else printed now and then."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import suppress
from typing import TextIO

FIRST_S = 1.0  # seconds before a line is shown
_BETWEEN_LINES_S = 5.0  # seconds between two lines, at least, if stderr is not a terminal
_CLEAR = "\r\x1b[K"


def is_silent() -> bool:
    """True if `REMAT_PROGRESS=0` is set, and in all ranks but the first."""
    return os.environ.get("REMAT_PROGRESS", "1") == "0" or os.environ.get("RANK", "0") != "0"


class StatusLine:
    """Shows a line and clears it.

    It looks up `sys.stderr` each time, as programs and tests replace it. Whatever is wrong with it,
    work goes on: the terminal may be gone, and an object in its place may only write.
    """

    def __init__(self) -> None:
        """Begins with nothing shown."""
        self._shown_on: TextIO | None = None  # a terminal that shows a line now
        self._written_s = 0.0

    def show(self, text: str, elapsed_s: float) -> None:
        """Shows `text` if `elapsed_s` is long enough; off a terminal, only if a line is due."""
        output = sys.stderr
        if elapsed_s < FIRST_S or output is None or is_silent():
            return
        with suppress(Exception):
            self._show_on(output, text, elapsed_s)

    def _show_on(self, output: TextIO, text: str, elapsed_s: float) -> None:
        if getattr(output, "closed", False):
            return

        line = f"remat: {text} ({elapsed_s:.0f} s)"
        if _is_terminal(output):
            width = shutil.get_terminal_size().columns - 1
            output.write(f"{_CLEAR}{line[:width]}")
            self._shown_on = output
        elif elapsed_s >= _BETWEEN_LINES_S and self._is_due():
            output.write(f"{line}\n")
            self._written_s = time.monotonic()

        output.flush()

    def _is_due(self) -> bool:
        return time.monotonic() - self._written_s >= _BETWEEN_LINES_S

    def clear(self) -> None:
        """Removes the line from the terminal."""
        if self._shown_on is not None:
            with suppress(Exception):
                self._shown_on.write(_CLEAR)
                self._shown_on.flush()

        self._shown_on = None


def _is_terminal(output: TextIO) -> bool:
    return hasattr(output, "isatty") and output.isatty() and os.environ.get("TERM", "") != "dumb"
