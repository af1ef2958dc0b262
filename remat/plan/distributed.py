"""Several processes that train together: one rank makes each plan, the others read it.

Plans go through the key-value store that `torch.distributed` was initialised with, not through a
collective: a rank whose last batch is smaller plans a step of its own while the others continue,
and a collective would wait forever.
"""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
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

_BEAT_S, _POLL_S = 1.0, 0.1
_SILENT_S = 60.0  # a planning rank without a heartbeat for this long counts as lost
# longest wait, in time limits of the solver; the process group's timeout, if that is longer
_MOST_LIMITS = 2.0


@dataclass(frozen=True)
class _Answer:
    """What the rank that solved sends to the others: a solution, or why there is none."""

    rank: int
    solution: Solution | None = None
    message: str = ""
    budget_bytes: int = 0
    minimum_bytes: int = 0
    is_proved: bool = False


def is_distributed() -> bool:
    """True if this process is one of several that were initialised to train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def solve_once(
    graph: Graph, asked: str, solve: Callable[[], Solution], *, time_limit_s: float
) -> Solution:
    """Returns the solution of `solve()`, called by the first rank that asks.

    The others wait for its answer. A failure is raised once on each rank that asks; the next call
    solves again.

    Args:
        graph: the step. Ranks share an answer if their graphs differ in nothing but measured costs.
        asked: the budget and everything else that the answer depends on.
        solve: makes the plan.
        time_limit_s: time limit of the solver.

    Raises:
        BudgetError: there is no plan; raised on every rank that asks.
        SolverError: the rank that solves failed, was killed or does not answer, or the ranks' store
            can't be reached.
    """
    if not is_distributed():
        return solve()
    workspaces = graph.arrays.workspace_bytes.tobytes()
    step = hashlib.sha256(f"{graph.fingerprint} {asked} ".encode() + workspaces).hexdigest()[:32]

    with _naming_a_lost_store():
        store = rank_store("remat")
        tries = _counts_of(store)
        key = f"{step}/{tries.get(step, 0)}"
        try:
            if store.add(f"{key}/asked", 1) == 1:
                return _solve_for_all(store, key, solve)
            return _read(_wait(store, key, time_limit_s))
        except BaseException:
            tries[step] = tries.get(step, 0) + 1
            raise


@contextmanager
def _naming_a_lost_store() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise SolverError(
            "the ranks can't share a plan: the store that torch.distributed was initialised with "
            f"does not answer ({type(error).__name__}: {str(error).splitlines()[0]}); the process "
            "that holds it, rank 0 or torchrun's agent, has ended or can't be reached"
        ) from error


_counts: dict[int, dict[str, int]] = {}  # store -> step -> tries of this rank that failed


def _counts_of(store: Any) -> dict[str, int]:
    """Returns this rank's counts since `torch.distributed` was initialised.

    They are the same on ranks that made the same calls.
    """
    place = id(store.underlying_store)
    if place not in _counts:
        _counts.clear()
    return _counts.setdefault(place, {})


def least_of_all_ranks(own: int) -> int:
    """Waits for each rank's number and returns the smallest; `own` without other ranks.

    Raises:
        SolverError: a rank gave no number within the process group's timeout.
    """
    if not is_distributed():
        return own

    with _naming_a_lost_store():
        store = rank_store("remat")
        counts, num_ranks = _counts_of(store), dist.get_world_size()
        counts["least"] = counts.get("least", 0) + 1
        key, began = f"least/{counts['least']}", time.monotonic()
        store.append(key, f"{own} ")

        while len(said := store.get(key).split()) < num_ranks:
            if time.monotonic() - began > store.timeout.total_seconds():
                raise SolverError(
                    f"{num_ranks - len(said)} of {num_ranks} ranks did not report what their GPU "
                    "has; with budget=None all ranks have to plan their first step at the same "
                    "time; give a budget if they don't"
                )
            time.sleep(_POLL_S)
        return min(map(int, said))


def _wait(store: Any, key: str, time_limit_s: float) -> _Answer:
    """Waits for the answer of the rank that solves, and returns it.

    Raises:
        SolverError: that rank gave no heartbeat, or no answer, for too long.
    """
    timeout_s = store.timeout.total_seconds()  # the process group's
    silent_s = min(_SILENT_S, timeout_s / 2)
    most_s = max(timeout_s, _MOST_LIMITS * time_limit_s)
    began = heard = time.monotonic()
    beats = 0

    while not store.check([key]):
        now, latest = time.monotonic(), store.add(f"{key}/alive", 0)
        if latest != beats:
            beats, heard = latest, now

        if now - heard > silent_s or now - began > most_s:
            store.set(f"{key}/given-up", "")
            gone = now - heard > silent_s
            raise SolverError(
                f"the rank that plans this step has given no sign of life for {silent_s:.0f} s: it "
                "was killed, or its machine is lost or stopped; see its output"
                if gone
                else f"the rank that plans this step has not answered for {most_s:.0f} s; see its "
                "output"
            )
        time.sleep(_POLL_S)

    return msgspec.json.decode(zlib.decompress(store.get(key)), type=_Answer)


def _solve_for_all(store: Any, key: str, solve: Callable[[], Solution]) -> Solution:
    answer = _Answer(dist.get_rank(), message="it was interrupted")

    try:
        with _beating(store, key):
            solution = solve()
        answer = _Answer(dist.get_rank(), solution)
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

    if store.check([f"{key}/given-up"]):
        raise SolverError(
            "other ranks gave up waiting for this rank's plan, which took too long; run the step "
            "again, or lower time_limit_s"
        )
    return solution


@contextmanager
def _beating(store: Any, key: str) -> Iterator[None]:
    """Sends a heartbeat to the ranks that wait, until the `with` block ends."""
    is_over = threading.Event()

    def beat() -> None:
        with suppress(dist.DistError):  # a lost store is reported where the answer is written
            while not is_over.wait(_BEAT_S):
                store.add(f"{key}/alive", 1)

    thread = threading.Thread(target=beat, name="remat-planning", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


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
    """A size that the ranks with the same plan agree on: the largest that any of them found.

    No rank waits. Each writes its own size at the start of one step and reads all sizes at the
    start of the next. In between the ranks exchange gradients, so all have written before one
    reads.

    Attributes:
        name: must be the same on all ranks that have to agree.
    """

    name: str
    _asked: int = field(default=0, init=False, repr=False)

    @property
    def is_settled(self) -> bool:
        """True once asking again changes nothing."""
        return self._asked > 1 or not is_distributed()

    def of_all_ranks(self, own: int) -> int:
        """Returns the largest size at the second call, and 0 at any other.

        Without other ranks it returns `own` at every call.
        """
        if not is_distributed():
            return own
        self._asked += 1
        if self._asked > 2:
            return 0

        with _naming_a_lost_store():
            store, key = rank_store("remat"), f"agreement/{self.name}"
            if self._asked == 1:
                if own:
                    store.append(key, f"{own} ")
                return 0
            return max(map(int, store.get(key).split())) if store.check([key]) else 0


def planned_part(model: nn.Module) -> nn.Module:
    """Returns the module that is planned: `model`, or what `DistributedDataParallel` wraps.

    Raises:
        TraceError: it is wrapped in a way that can't be planned; the message says what to do.
    """
    model = original_module(model)  # the module inside a compiled one
    if isinstance(model, DistributedDataParallel):
        return model.module  # type: ignore[no-any-return]

    if isinstance(model, DataParallel):
        raise TraceError(
            "nn.DataParallel copies the module at every step, its plan included; use "
            "DistributedDataParallel, with one process per GPU"
        )

    if is_first_fsdp(model):
        raise TraceError(
            "FullyShardedDataParallel (FSDP1) flattens parameters and takes them out of the "
            "module; use torch.distributed.fsdp.fully_shard (FSDP2), and call "
            "remat.checkpoint(model, budget, blocks=...) before it"
        )

    return model


def run_around_ddp(module: nn.Module, run: Callable[[], Any]) -> Any:
    """Runs a step that calls modules wrapped in `DistributedDataParallel` somewhere inside.

    DDP's work around its module's forward is done once, around the whole step.
    """
    ddps = ddps_in(module)
    for ddp in ddps:
        run = partial(inside_ddp, ddp, run)
    with called_directly(ddps):
        return run()


def bucket_bytes() -> int:
    """Returns the bytes of the buckets in which DDP reduces gradients, 0 outside of DDP.

    It counts each `DistributedDataParallel` around the forward that runs now.
    """
    parameters = {id(p): p for ddp in active_ddps() for p in ddp.parameters()}
    return sum(p.numel() * p.element_size() for p in parameters.values() if p.requires_grad)


def are_gradients_in_buckets() -> bool:
    """True under DDP with `gradient_as_bucket_view`, whose gradients are views of its buckets."""
    ddps = active_ddps()
    return bool(ddps) and all(ddp.gradient_as_bucket_view for ddp in ddps)


def refuse_sharded(module: nn.Module) -> None:
    """Raises `TraceError` for a module sharded by FSDP2, which gathers it part by part."""
    if any(is_fully_sharded(part) for part in module.modules()):
        raise TraceError(
            f"{type(module).__name__} is sharded by fully_shard, which gathers parameters block by "
            "block and not for the step as a whole; plan the module's blocks under one budget "
            "first, remat.checkpoint(model, budget, blocks=model.layers), then shard the blocks "
            "and the model"
        )
