"""Writes output files whole or not at all; every output of the package goes through here.

The content is written to a temporary file in the same folder, synced to disk, and renamed over the
target. If the process is killed or the disk is full, the old file stays. A temporary file that is
left behind is removed by a later write to the same file, once it is an hour old.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

import platformdirs

_OLD_S = 3600.0  # seconds after which a temporary file counts as left behind


def cache_folder() -> Path:
    """Returns the user's cache folder of the package; a user without a home has none.

    Writing into the path that they get is an `OSError`, which caches expect.
    """
    try:
        return platformdirs.user_cache_path("remat")
    except RuntimeError:  # an account without a home folder, and no XDG_CACHE_HOME
        return Path(os.devnull) / "remat"


def write_whole(path: str | Path, content: bytes) -> None:
    """Replaces a file and keeps its permissions, or creates it with those of the umask.

    A link is followed. A pipe or a device, such as `/dev/stdout`, is written directly.

    Raises:
        OSError: it can't be written; the old file is unchanged.
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
    """Removes the temporary files of killed writes that are over an hour old.

    Args:
        folder: where to look.
        pattern: the glob pattern of their names.
        now_s: the present time by the file system's clock, which may be another machine's.
    """
    for path in folder.glob(pattern):
        with suppress(OSError):  # another process removed it
            if now_s - path.stat().st_mtime > _OLD_S:
                path.unlink()


def _prefix(target: Path) -> str:
    """Returns the prefix of a file's temporary files; short for any file name."""
    return f".remat-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:12]}-"
