"""Skips parts of a solve that run out of memory, with a warning in place of an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOGGER = logging.getLogger(__name__)


@contextmanager
def leaving_out(what: str, note: Callable[[str], None]) -> Iterator[None]:
    """Abandons the block inside when memory runs out, and goes on after it.

    Args:
        what: name of the block's work, for the log and for `note`.
        note: called with the reason, in the words of `Solution.cut_short`.
    """
    try:
        yield
    except (MemoryError, RuntimeError, ImportError, OSError) as error:
        if not is_too_little(error):
            raise
        _LOGGER.warning(
            "too little memory for %s, which is left out: %s", what, str(error) or "it is full"
        )
        note(f"too little memory for {what}")


def is_too_little(error: BaseException) -> bool:
    """True for errors that mean lack of memory, even for a thread's stack or a library."""
    text = str(error).lower()
    words = ("can't start new thread", "cannot allocate memory", "failed to map segment", "libllvm")
    return isinstance(error, MemoryError) or any(word in text for word in words)
