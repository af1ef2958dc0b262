"""Versioned JSON of graphs, schedules and solutions, checked when it is read."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from remat.core.errors import RematError
from remat.core.files import write_whole
from remat.core.limits import shortened

T = TypeVar("T")

_LONGEST_REASON = 300  # characters; a reason may quote a long text from the file


def save(record: Any, path: str | Path) -> None:
    """Writes a dataclass as JSON; an interrupted write leaves the old file."""
    write_whole(path, msgspec.json.encode(record))


def load(kind: type[T], path: str | Path, error: type[RematError]) -> T:
    """Reads a record that `save` wrote, or raises `error` with one line that names the file."""
    return decode(kind, read(path, error), path, error)


def read(path: str | Path, error: type[RematError]) -> bytes:
    """Returns the content of a file, or raises `error` with one line that names it."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise error(f"{path} is a device; a file is needed")
        return path.read_bytes()
    except (OSError, ValueError) as reason:  # ValueError: a null byte in the name
        raise error(f"{path}: {getattr(reason, 'strerror', None) or reason}") from None
    except MemoryError:
        raise error(f"{path} is too large for this machine's memory") from None


def decode(
    kind: type[T], content: bytes, path: str | Path, error: type[RematError], what: str = ""
) -> T:
    """Returns the record in a file's content, or raises `error` with one line that names it.

    Args:
        kind: the type of the record.
        content: JSON.
        path: the file, for the error.
        error: the type of the error.
        what: `kind` in words with its article, for the error.
    """
    what = what or f"a {kind.__name__.lower()} that this remat reads"
    try:
        return msgspec.json.decode(content, type=kind)
    except RecursionError:
        raise error(f"{path} is not {what}: it is nested too deeply") from None
    except MemoryError:
        raise error(f"{path} is too large for this machine's memory") from None
    except (msgspec.DecodeError, RematError, UnicodeDecodeError) as reason:
        text = shortened(" ".join(str(reason).split()), _LONGEST_REASON)
        raise error(f"{path} is not {what}: {text}") from None
