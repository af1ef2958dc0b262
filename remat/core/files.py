"""Files that are whole or absent: every output of the package is written here.

A file is written beside its place, brought to the disk and renamed onto it. Whoever is killed, or
finds the disk full, leaves what was there before, and at most a part that the next write collects.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

_OLD_S = 3600.0  # no write takes as long


def write_whole(path: str | Path, content: bytes) -> None:
    """Replaces a file, or makes it with the permissions that the user's umask leaves.

    A link is followed. A pipe or a device, such as `/dev/stdout`, is written as it is.

    Raises:
        OSError: it can't be written; what was there before still is.
    """
    mode = Path(path).stat().st_mode if Path(path).exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        Path(path).write_bytes(content)
        return

    target = Path(os.path.realpath(path))
    part = target.with_name(f"{_prefix(target)}{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            written = os.fstat(file.fileno())
        if mode is not None:
            with suppress(PermissionError):  # another user's file in a shared folder
                part.chmod(stat.S_IMODE(mode))
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise

    collect_parts(target.parent, f"{_prefix(target)}*.part", now_s=written.st_mtime)


def collect_parts(folder: Path, pattern: str = ".remat-*.part", *, now_s: float) -> None:
    """Removes what writes that were killed left behind, an hour ago or longer.

    Args:
        folder: where to look.
        pattern: of their names.
        now_s: by the clock of the file system, which may be another machine's.
    """
    for path in folder.glob(pattern):
        with suppress(OSError):  # another process collected it
            if now_s - path.stat().st_mtime > _OLD_S:
                path.unlink()


def _prefix(target: Path) -> str:
    """Begins the names of a file's parts; short, however long the file's own name is."""
    return f".remat-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:12]}-"
