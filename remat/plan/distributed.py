"""Several processes that train together: each plan is found by one rank and read by the others.

Plans go through the key-value store that `torch.distributed` was initialised with, not through a
collective: a rank whose last batch is smaller plans a step of its own while the others go on, and a
collective would wait forever.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from remat.core.errors import BudgetError, SolverError, TraceError
from remat.core.graph import Graph
from remat.core.solution import Solution
from remat.torch_border.other_compiles import original_module
from remat.torch_border.sharded import (
    active_ddps,
    called_directly,
    ddps_in,
    inside_ddp,
    is_first_fsdp,
    is_fully_sharded,
    rank_store,
)

_SOLVING_S = 600.0  # beyond the solver's own limit: reading models, loaded machines


@dataclass(frozen=True)
class _Answer:
    """What the rank that solved tells the others: a solution, or why there is none."""

    rank: int
    solution: Solution | None = None
    message: str = ""
    budget_bytes: int = 0
    minimum_bytes: int = 0
    is_proved: bool = False


def is_distributed() -> bool:
    """True where this process is one of several that were initialised to train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def solve_once(
    graph: Graph, asked: str, solve: Callable[[], Solution], *, time_limit_s: float
) -> Solution:
    """Returns the solution of `solve()`, called by the first rank that asks.

    The others wait for its answer.

    Args:
        graph: the step. Ranks share an answer where their graphs agree in all but measured costs.
        asked: the budget and all else that the answer depends on.
        solve: finds it.
        time_limit_s: of the solver.

    Raises:
        BudgetError: there is no plan, on every rank that asks.
        SolverError: the rank that solves failed or does not answer.
    """
    if not is_distributed():
        return solve()
    store = rank_store("remat")
    workspaces = graph.arrays.workspace_bytes.tobytes()
    key = hashlib.sha256(f"{graph.fingerprint} {asked} ".encode() + workspaces).hexdigest()[:32]
    if store.add(f"{key}/asked", 1) == 1:
        return _solve_for_all(store, key, solve)
    try:
        store.wait([key], timedelta(seconds=time_limit_s + _SOLVING_S))
    except dist.DistStoreError as error:
        raise SolverError(
            "the rank that plans this step has not answered for "
            f"{time_limit_s + _SOLVING_S:.0f} s; see its output"
        ) from error
    return _read(msgspec.json.decode(zlib.decompress(store.get(key)), type=_Answer))


def _solve_for_all(store: Any, key: str, solve: Callable[[], Solution]) -> Solution:
    answer = _Answer(dist.get_rank(), message="it was interrupted")
    try:
        solution = solve()
        answer = _Answer(dist.get_rank(), solution)
        return solution
    except BudgetError as error:
        answer = _Answer(
            dist.get_rank(),
            None,
            str(error),
            error.budget_bytes,
            error.minimum_bytes,
            error.is_proved,
        )
        raise
    except Exception as error:
        answer = _Answer(dist.get_rank(), message=f"{type(error).__name__}: {error}")
        raise
    finally:
        store.set(key, zlib.compress(msgspec.json.encode(answer)))


def _read(answer: _Answer) -> Solution:
    if answer.solution is not None:
        return answer.solution
    if answer.minimum_bytes:
        raise BudgetError(
            answer.message,
            budget_bytes=answer.budget_bytes,
            minimum_bytes=answer.minimum_bytes,
            is_proved=answer.is_proved,
        )
    raise SolverError(f"rank {answer.rank} could not plan this step: {answer.message}")


@dataclass
class Agreement:
    """A size that the ranks which run the same plan agree on: the largest that any of them found.

    No rank waits. Each says its own at the start of one step and reads all at the start of the
    next: what the ranks send each other within a step, gradients at least, comes in between.

    Attributes:
        name: the same on ranks that are to agree.
    """

    name: str
    _asked: int = field(default=0, init=False, repr=False)

    def of_all_ranks(self, own: int) -> int:
        """Returns what is agreed on, 0 until it is.

        `own` at once in a process that trains alone.
        """
        if not is_distributed():
            return own
        self._asked += 1
        if self._asked > 2:
            return 0
        store, key = rank_store("remat"), f"agreement/{self.name}"
        if self._asked == 1:
            if own:
                store.append(key, f"{own} ")
            return 0
        return max(map(int, store.get(key).split())) if store.check([key]) else 0


def planned_part(model: nn.Module) -> nn.Module:
    """Returns what is planned of `model`.

    The module inside of `DistributedDataParallel`, whose own forward talks to other ranks.

    Raises:
        TraceError: it is wrapped in a way that can't be planned; the message says what to do.
    """
    model = original_module(model)  # a plan inside of what is compiled stays
    if isinstance(model, DistributedDataParallel):
        return model.module  # type: ignore[no-any-return]
    if isinstance(model, DataParallel):
        raise TraceError(
            "nn.DataParallel copies the module at every step, plan and all; use "
            "DistributedDataParallel, one process a GPU"
        )
    if is_first_fsdp(model):
        raise TraceError(
            "FullyShardedDataParallel (FSDP1) flattens parameters away from the module; use "
            "torch.distributed.fsdp.fully_shard "
            "(FSDP2), and call remat.checkpoint(model, budget, blocks=...) before it"
        )
    return model


def run_around_ddp(module: nn.Module, run: Callable[[], Any]) -> Any:
    """Runs a step that calls what is wrapped in `DistributedDataParallel` somewhere inside.

    Each does once a step, around all of it, what it does around its module's forward.
    """
    ddps = ddps_in(module)
    for ddp in ddps:
        run = partial(inside_ddp, ddp, run)
    with called_directly(ddps):
        return run()


def bucket_bytes() -> int:
    """Bytes of the buckets in which each `DistributedDataParallel` around the present forward
    reduces gradients; 0 outside of one.
    """
    parameters = {id(p): p for ddp in active_ddps() for p in ddp.parameters()}
    return sum(p.numel() * p.element_size() for p in parameters.values() if p.requires_grad)


def refuse_sharded(module: nn.Module) -> None:
    """Refuses to capture whole what FSDP2 gathers part by part."""
    if any(is_fully_sharded(part) for part in module.modules()):
        raise TraceError(
            f"{type(module).__name__} is sharded by fully_shard, whose parameters are "
            "gathered block by block and not for the step as a "
            "whole; plan the blocks of the module under one budget, remat.checkpoint(model, "
            "budget, blocks=model.layers), then shard them and the model"
        )
