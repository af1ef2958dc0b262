"""An output is whole or absent: on a full disk, when killed, and for several writers."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import remat
from remat.core.files import collect_parts, write_whole
from remat.core.schedule import Schedule
from remat.look.export import save as export
from remat.look.plot import draw
from remat.look.report import Report
from remat.plan.disk_cache import PlanCache
from remat.tracers.cache import DiskCache
from remat.tracers.synthetic import transformer

GRAPH = transformer(3)
PLAN = remat.solve(GRAPH, "100%", solver="keep-all")
SCHEDULE = Schedule.keep_all(GRAPH)
OUTPUTS: dict[str, Callable[[Path], None]] = {
    "graph.json": GRAPH.save,
    "plan.json": PLAN.save,
    "schedule.json": SCHEDULE.save,
    "page.html": Report(GRAPH, PLAN).save,
    "snapshot.pickle": lambda path: export(GRAPH, SCHEDULE, path),
    "trace.json": lambda path: export(GRAPH, SCHEDULE, path),
    "picture.png": lambda path: draw(GRAPH, [], "memory", path),
    "picture.svg": lambda path: draw(GRAPH, [], "schedule", path),
}


@contextmanager
def full_disk(size_bytes: int) -> Iterator[None]:
    """Limits every file to `size_bytes`, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("before", [b"", b"what was there before"])
def test_a_full_disk_leaves_the_old_file(name: str, before: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    if before:
        path.write_bytes(before)

    with full_disk(100), pytest.raises(OSError, match="File too large"):
        OUTPUTS[name](path)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == ([before] if before else [])

    OUTPUTS[name](path)
    assert path.stat().st_size > 100


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_users_permissions(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        for name in ("plan.json", "trace.json"):
            OUTPUTS[name](tmp_path / name)
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
    finally:
        os.umask(before)


def test_an_overwritten_file_keeps_its_permissions_and_links(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    path.touch(0o640)
    path.chmod(0o640)
    link.symlink_to(path)

    PLAN.save(link)
    assert link.is_symlink()
    assert remat.Solution.load(path) == PLAN
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_pipe_is_written_directly(tmp_path: Path) -> None:
    write_whole("/dev/null", b"nothing")
    assert not Path("/dev/null").is_file()
    reader, writer = os.pipe()
    write_whole(f"/dev/fd/{writer}", b"through")
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert file.read() == b"through"


def test_the_longest_name_is_written(tmp_path: Path) -> None:
    write_whole(tmp_path / ("n" * 255), b"x")
    assert [len(path.name) for path in tmp_path.iterdir()] == [255]


KILLED = """
import os, sys
from remat.core import files

os.fsync = lambda handle: os.kill(os.getpid(), 9)
files.write_whole(sys.argv[1], b"half")
"""


def test_a_killed_writers_part_is_removed_an_hour_later(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    (part,) = set(tmp_path.iterdir()) - {path}
    assert remat.Solution.load(path) == PLAN

    PLAN.save(path)
    assert part.exists()  # another process may still be writing it

    an_hour_ago = part.stat().st_mtime - 3700
    os.utime(part, (an_hour_ago, an_hour_ago))
    PLAN.save(tmp_path / "other.json")
    assert part.exists()  # it belongs to another file
    PLAN.save(path)
    assert set(tmp_path.iterdir()) == {path, tmp_path / "other.json"}


def test_a_cache_folder_removes_old_parts_of_all_its_files(tmp_path: Path) -> None:
    part, foreign = tmp_path / ".remat-0123456789ab-1-00.part", tmp_path / ".hidden"
    for path in (part, foreign):
        path.touch()
        os.utime(path, (0, 0))

    cache = PlanCache(tmp_path)
    cache.get_or_solve(GRAPH, PLAN.budget_bytes, "given", lambda: PLAN)
    assert not part.exists()
    assert foreign.exists()

    collect_parts(tmp_path / "nowhere", now_s=0.0)


@pytest.mark.parametrize("skew_s", [-1e6, 1e6])
def test_a_new_plan_stays_whatever_the_clocks_say(
    skew_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans of another machine may be dated in the future, or ours in the past."""
    for index in range(3):
        old = tmp_path / f"{index}.json"
        PLAN.save(old)
        os.utime(old, (old.stat().st_mtime + skew_s,) * 2)

    size = old.stat().st_size
    cache = PlanCache(tmp_path, limit_bytes=2 * size + 100)
    cache.get_or_solve(GRAPH, PLAN.budget_bytes, "given", lambda: PLAN)
    assert len(list(tmp_path.iterdir())) == 2

    again = cache.get_or_solve(GRAPH, PLAN.budget_bytes, "given", pytest.fail)
    assert again == PLAN


def test_an_unreadable_cache_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In another user's folder, `exists` itself raised `PermissionError` and ended training."""

    def refuse(*_: object, **__: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    cache = PlanCache(tmp_path)
    assert cache.get_or_solve(GRAPH, PLAN.budget_bytes, "given", lambda: PLAN) == PLAN
    assert DiskCache(tmp_path / "cache.json").get("key", (0, 1)) is None
    assert "can't be" in caplog.text


def test_a_trace_is_valid_json(tmp_path: Path) -> None:
    export(GRAPH, SCHEDULE, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
