"""Too little memory: what needs less goes on, with a word; no inner error reaches the caller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOGGER = logging.getLogger(__name__)


@contextmanager
def leaving_out(what: str, note: Callable[[str], None]) -> Iterator[None]:
    """Leaves out what is done inside where memory does not suffice for it.

    Args:
        what: its name, for the log and for `note`.
        note: called with the reason, in the words of a solution.
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
    """True where an error says that memory, for a thread's stack or a library too, is used up."""
    text = str(error).lower()
    words = ("can't start new thread", "cannot allocate memory", "failed to map segment", "libllvm")
    return isinstance(error, MemoryError) or any(word in text for word in words)
