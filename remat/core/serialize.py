"""Versioned JSON of graphs, schedules and solutions: checked when read, whole when written."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from remat.core.errors import RematError
from remat.core.files import write_whole
from remat.core.limits import shortened

T = TypeVar("T")

_LONGEST_REASON = 300  # letters; a reason quotes what it found


def save(record: Any, path: str | Path) -> None:
    """Writes a dataclass as JSON; an interrupted write leaves what was there before."""
    write_whole(path, msgspec.json.encode(record))


def load(kind: type[T], path: str | Path, error: type[RematError]) -> T:
    """Reads what `save` wrote, or raises `error` with one line that names the file."""
    return decode(kind, read(path, error), path, error)


def read(path: str | Path, error: type[RematError]) -> bytes:
    """Returns the content of a file, or raises `error` with one line that names it."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise error(f"{path} is a device, and a file is needed")
        return path.read_bytes()
    except (OSError, ValueError) as reason:  # a name with a zero in it is a ValueError
        raise error(f"{path}: {getattr(reason, 'strerror', None) or reason}") from None
    except MemoryError:
        raise error(f"{path} is too large for this machine's memory") from None


def decode(
    kind: type[T], content: bytes, path: str | Path, error: type[RematError], what: str = ""
) -> T:
    """Returns what the content of a file says, or raises `error` with one line that names it.

    Args:
        kind: what it is to be.
        content: JSON.
        path: where it is from.
        error: what is raised.
        what: `kind` in words.
    """
    what = what or f"{kind.__name__.lower()} that this remat reads"
    try:
        return msgspec.json.decode(content, type=kind)
    except RecursionError:
        raise error(f"{path} is no {what}: it is nested too deeply") from None
    except MemoryError:
        raise error(f"{path} is too large for this machine's memory") from None
    except (msgspec.DecodeError, RematError, UnicodeDecodeError) as reason:
        text = shortened(" ".join(str(reason).split()), _LONGEST_REASON)
        raise error(f"{path} is no {what}: {text}") from None
