"""Starts ranks as forks of one process that has imported torch and this package.

Imports take longer than most of what ranks do in a test.
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import ProcessContext, start_processes

IMPORTED = ["tests.support.distributed_checks", "tests.support.rank_failures"]


def start_ranks(num_ranks: int, run: Callable[..., None], *args: Any) -> ProcessContext:
    """Starts `run(rank, num_ranks, port, *args)` for each rank."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context: ProcessContext = start_processes(
        run, (num_ranks, port, *args), nprocs=num_ranks, join=False, start_method="forkserver"
    )
    return context
