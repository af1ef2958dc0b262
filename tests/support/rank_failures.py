"""Run by `test_rank_failures.py`, one process per rank: ranks plan while one fails.

Writes the outcome of each try, one JSON document per line.
"""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import remat
from remat.plan.distributed import solve_once
from remat.torch_border.sharded import rank_store

TIMEOUT_S = 8.0
GRAPH = remat.Graph.from_arrays([1.0] * 4, [1] * 4, [(0, 1), (1, 2), (2, 3), (0, 3)])


def solve() -> remat.Solution:
    return remat.solve(GRAPH, 4)


def no_memory() -> remat.Solution:
    raise MemoryError("no room for the model")


def killed() -> remat.Solution:
    os.kill(os.getpid(), signal.SIGKILL)
    return solve()


def stopped() -> remat.Solution:
    """Is stopped, continues, and answers after the others gave up."""
    if os.fork() == 0:
        time.sleep(TIMEOUT_S)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    return solve()


SCENARIOS = {"memory": no_memory, "killed": killed, "lost": killed, "stopped": stopped}


def tell(output: Path, method: object) -> None:
    began = time.monotonic()
    try:
        found = solve_once(GRAPH, "budget", method, time_limit_s=60.0)  # type: ignore[arg-type]
        outcome = str(found.status)
    except (remat.RematError, MemoryError) as error:
        outcome = f"{type(error).__name__}: {error}"
    with output.open("a") as file:
        file.write(f"{json.dumps([outcome, time.monotonic() - began])}\n")


def main(rank: int, num_ranks: int, port: int, scenario: str, folder: Path) -> None:
    # the rank that plans is the second one: the first holds the store
    planner = 0 if scenario == "lost" else 1
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    if rank != planner:
        time.sleep(1.0)  # so that the planner asks first
    output = folder / f"{scenario}{rank}"
    fails = SCENARIOS[scenario]
    tell(output, fails if rank == planner else solve)
    tell(output, solve)
    tell(output, solve)
    if scenario == "stopped":  # the store stays until both are done
        rank_store("tests").set(str(rank), "")
        rank_store("tests").wait(["0", "1"], timedelta(seconds=60))
