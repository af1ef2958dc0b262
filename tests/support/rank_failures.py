"""Run by `test_rank_failures.py`, one process per rank: ranks plan while one fails.

Prints the outcome of each try, one JSON document per line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta

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


def tell(method: object) -> None:
    began = time.monotonic()
    try:
        found = solve_once(GRAPH, "budget", method, time_limit_s=60.0)  # type: ignore[arg-type]
        outcome = str(found.status)
    except (remat.RematError, MemoryError) as error:
        outcome = f"{type(error).__name__}: {error}"
    sys.stdout.write(f"{json.dumps([outcome, time.monotonic() - began])}\n")
    sys.stdout.flush()


def main(scenario: str, rank: int, port: int) -> None:
    # the rank that plans is the second one: the first holds the store
    planner = 0 if scenario == "lost" else 1
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    fails = {"memory": no_memory, "killed": killed, "lost": killed, "stopped": stopped}[scenario]
    if rank != planner:
        time.sleep(1.0)  # so that the planner asks first
    tell(fails if rank == planner else solve)
    tell(solve)
    tell(solve)
    if scenario == "stopped":  # the store stays until both are done
        rank_store("tests").set(str(rank), "")
        rank_store("tests").wait(["0", "1"], timedelta(seconds=60))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
