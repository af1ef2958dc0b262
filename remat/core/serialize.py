"""Versioned JSON of graphs, schedules and solutions: checked when read, whole when written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from remat.core.errors import RematError

T = TypeVar("T")


def save(record: Any, path: str | Path) -> None:
    """Writes a dataclass as JSON; an interrupted write leaves what was there before."""
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(record))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def load(kind: type[T], path: str | Path, error: type[RematError]) -> T:
    """Reads what `save` wrote, or raises `error` with one line that names the file."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except OSError as reason:
        raise error(f"{path}: {reason.strerror or reason}") from None
    except (msgspec.DecodeError, RematError, UnicodeDecodeError) as reason:
        raise error(
            f"{path} is no {kind.__name__.lower()} that this remat reads: {reason}"
        ) from None
