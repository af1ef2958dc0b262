"""The GPU run side by side: one process per group of sections; a process that hangs is replaced."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.gpu.progress import Progress

LANES = (
    ("environment", "correct", "medium", "autocast"),
    ("oom", "vision", "foretold", "operators", "autocast_vision"),
    ("billions", "large", "autocast_billions", "autocast_large"),
    ("fused",),
    ("pieces",),
    ("fused_dropout",),
    ("fused_vision",),
)
_GRACE_S = 20.0  # after a time limit, until a process that did not notice it is ended
_POLL_S = 0.5


def run_side_by_side(
    only: Sequence[str], command: Callable[..., list[str]], output: Path, say: Callable[..., None]
) -> None:
    """Runs each lane's sections among `only` in a process of its own, with its own cores.

    Args:
        only: the sections to run.
        command: returns the command for sections (positional arguments) and a progress file.
        output: the file of facts; progress files are written beside it.
        say: writes a fact.
    """
    lanes = [[name for name in lane if name in only] for lane in LANES]
    lanes = [lane for lane in lanes if lane]
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // max(1, len(lanes)))

    with ThreadPoolExecutor(max(1, len(lanes))) as threads:
        running = []
        for index, lane in enumerate(lanes):
            own = set(cores[index * share : (index + 1) * share]) or set(cores)
            progress = output.with_suffix(f".{index}.progress")
            progress.unlink(missing_ok=True)
            running.append(
                threads.submit(supervise, command(*lane, progress=progress), progress, own, say)
            )

        for each in running:
            each.result()


def supervise(
    command: Sequence[str],
    path: Path,
    cores: set[int],
    say: Callable[..., None],
    grace_s: float = _GRACE_S,
) -> None:
    """Runs a command to its end; ends and starts it again whenever it exceeds its time limit.

    It continues after the way, or the section, that its progress file names.
    """
    while _is_ended_late(command, path, cores, grace_s):
        late = Progress.read(path)
        names = {"section": late.section, **({"way": late.way} if late.way else {})}
        say(**names, error="TimeoutError: did not stop at its time limit; its process was ended")
        late.note(until=float("inf"))
    path.unlink(missing_ok=True)


def _is_ended_late(command: Sequence[str], path: Path, cores: set[int], grace_s: float) -> bool:
    """Runs a command once; returns whether it was ended for exceeding its time limit."""
    with subprocess.Popen(command) as process:
        if cores:
            os.sched_setaffinity(process.pid, cores)
        while process.poll() is None:
            time.sleep(_POLL_S)
            if time.time() > Progress.read(path).until + grace_s:
                process.kill()
                return True
    return False
