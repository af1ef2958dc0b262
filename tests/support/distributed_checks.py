"""Run by `test_distributed.py`, one process per rank.

Checks that several ranks make together; their outcomes are JSON files.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, final

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.face.blocks import PlannedBlocks
from remat.solvers.core.base import Solver
from tests.support.planned import call_of

WIDTH, TOKENS, BATCH = 32, 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


class WithCollective(nn.Module):
    """Between its two blocks the ranks agree on a mean, as in a batch norm over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        mean = collectives.all_reduce(x.detach().mean(0), "avg", list(range(dist.get_world_size())))
        return self.second((x - mean).sin()).square().mean()  # type: ignore[no-any-return]


@final
@dataclass(frozen=True)
class Counting(Solver):
    """Counts how often this rank solved."""

    count: ClassVar[list[int]] = [0]

    def solve(self, graph: remat.Graph, *, budget_bytes: int) -> remat.Solution:
        self.count[0] += 1
        return remat.make_solver("auto", gap=0.2).solve(graph, budget_bytes=budget_bytes)


def planned(model: Any, budget: str = "70%", **options: Any) -> Any:
    return remat.checkpoint(model, budget, solver=Counting(), costs="flops", **options)


def plan_of(model: nn.Module) -> tuple[remat.Solution, int]:
    """The plan of the last step, and the budget that it was made for."""
    call = call_of(model)
    if isinstance(call, PlannedBlocks):
        plan = call.piecewise.plan
        assert plan is not None
        return plan.solution, plan.solution.budget_bytes + plan.unplanned_bytes
    return call.pieces[-1].solution, call.pieces[-1].solution.budget_bytes


def train(
    model: nn.Module, sizes: list[int] | None = None, seed: int | None = None
) -> list[torch.Tensor]:
    """Five steps; returns their losses and the last gradients.

    Each rank has data and dropout of its own where no seed is given.
    """
    seed = dist.get_rank() if seed is None else seed
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(100 + seed)

    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for size in sizes or [BATCH] * 5:
        optimizer.zero_grad()
        loss = model(torch.randn(size, TOKENS, WIDTH, generator=generator))
        loss.backward()
        optimizer.step()
        found.append(loss.detach())

    return [local(t) for t in (*found, *(p.grad for p in model.parameters() if p.grad is not None))]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def difference(plain: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest relative difference of losses and gradients, 0.0 if equal to the bit."""
    pairs = zip(plain, found, strict=True)
    return max(
        float((a - b).abs().max() / a.abs().max()) if a.numel() and not torch.equal(a, b) else 0.0
        for a, b in pairs
    )


def of_all_ranks(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def compared(
    base: nn.Module,
    plain: Callable[[nn.Module], nn.Module],
    ours: Callable[[nn.Module], nn.Module],
    seed: int | None = None,
) -> dict[str, Any]:
    """Trains both, and returns what the ranks found."""
    expected, before = train(plain(copy.deepcopy(base)), seed=seed), Counting.count[0]
    model = ours(copy.deepcopy(base))
    differs = difference(expected, train(model, seed=seed))

    (solution, budget_bytes), report = plan_of(model), remat.report(model)
    assert solution.schedule is not None and report.measured_peak_bytes is not None
    return {
        "difference": max(of_all_ranks(differs)),
        "plans": len(set(of_all_ranks(solution.schedule.steps))),
        "solved": sum(of_all_ranks(Counting.count[0] - before)),
        "overhead": solution.overhead,
        "measured": max(of_all_ranks(report.measured_peak_bytes)) / budget_bytes,
    }


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if isinstance(part, Block)]


def sharded(model: nn.Module) -> nn.Module:
    for block in blocks_of(model):
        fully_shard(block)
    fully_shard(model)
    return model


def ddp() -> dict[str, Any]:
    return compared(
        Net(), DistributedDataParallel, lambda m: DistributedDataParallel(planned(m, "60%"))
    )


def ddp_from_outside() -> dict[str, Any]:
    return compared(
        Net(), DistributedDataParallel, lambda m: planned(DistributedDataParallel(m), "60%")
    )


def ddp_blocks() -> dict[str, Any]:
    return compared(
        Net(),
        DistributedDataParallel,
        lambda m: DistributedDataParallel(planned(m, "75%", blocks=blocks_of(m))),
    )


def fsdp() -> dict[str, Any]:
    return compared(Net(), sharded, lambda m: sharded(planned(m, "75%", blocks=blocks_of(m))))


def ddp_through_inductor() -> dict[str, Any]:
    torch._dynamo.config.optimize_ddp = False  # otherwise plain DDP is cut at its buckets
    return compared(
        Net(),
        lambda m: torch.compile(DistributedDataParallel(m)),  # type: ignore[arg-type, return-value]
        lambda m: planned(DistributedDataParallel(m), "90%", executor="inductor"),
    )


def fsdp_through_inductor() -> dict[str, Any]:
    def compiled(model: nn.Module) -> nn.Module:
        for block in blocks_of(model):
            block.compile()
        return sharded(model)

    return compared(
        Net(),
        compiled,
        lambda m: sharded(planned(m, "75%", blocks=blocks_of(m), executor="inductor")),
    )


def fsdp_sharded_first() -> dict[str, Any]:
    return compared(Net(), sharded, lambda m: planned(sharded(m), "75%", blocks=blocks_of(m)))


def fsdp_whole_is_refused() -> dict[str, Any]:
    return {"message": refusal(lambda: sharded(planned(Net()))(torch.randn(2, TOKENS, WIDTH)))}


def tensor_parallel() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def parallel(model: nn.Module) -> nn.Module:
        for block in blocks_of(model):
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    return compared(Net(), parallel, lambda m: planned(parallel(m)), seed=0)


def a_collective_runs_once() -> dict[str, Any]:
    trained: list[nn.Module] = []

    def ours(model: nn.Module) -> nn.Module:
        trained.append(planned(model, "50%"))
        return trained[0]

    found = compared(WithCollective(), lambda m: m, ours)

    counts, batch = [], torch.randn(BATCH, TOKENS, WIDTH)
    for model in (WithCollective(), *trained):
        model.zero_grad()
        before = number_of_collectives()
        model(batch).backward()
        counts.append(number_of_collectives() - before)

    return {**found, "collectives": counts}


def a_function_over_several_ddps() -> dict[str, Any]:
    """Two modules that train, each in DDP, one of them called twice, and one that is frozen."""

    def modules() -> list[nn.Module]:
        torch.manual_seed(0)
        body, head, frozen = Block(), Net(), Block().requires_grad_(False)
        return [DistributedDataParallel(body), DistributedDataParallel(head), frozen]

    def step_of(body: nn.Module, head: nn.Module, frozen: nn.Module) -> Callable[..., Any]:
        def step(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = frozen(x)
            beside: torch.Tensor = (body(x) - target).square().mean()
            return beside + head(body(x) + body(x.flip(0)))  # type: ignore[no-any-return]

        return step

    def trained(plan: Callable[[Any], Any]) -> tuple[Any, list[torch.Tensor]]:
        parts = modules()
        step = plan(step_of(*parts))
        parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
        generator = torch.Generator().manual_seed(100 + dist.get_rank())
        torch.manual_seed(dist.get_rank())
        optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []

        for _ in range(4):
            optimizer.zero_grad()
            loss = step(torch.randn(BATCH, TOKENS, WIDTH, generator=generator))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        return step, [*losses, *(p.grad for p in parameters if p.grad is not None)]

    _, expected = trained(lambda step: step)
    before = Counting.count[0]
    step, found = trained(lambda step: planned(step, "80%"))

    report = remat.report(step)
    assert report.solution.schedule is not None and report.measured_peak_bytes is not None
    return {
        "difference": max(of_all_ranks(difference(expected, found))),
        "plans": len(set(of_all_ranks(report.solution.schedule.steps))),
        "solved": sum(of_all_ranks(Counting.count[0] - before)),
        "overhead": report.solution.overhead,
        "measured": max(of_all_ranks(report.measured_peak_bytes)) / report.solution.budget_bytes,
    }


def number_of_collectives() -> int:
    return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr, no-any-return]


def a_smaller_last_batch_on_one_rank() -> dict[str, Any]:
    """Its rank plans it alone, and waits for no other rank."""
    sizes = [BATCH, BATCH, 21 if dist.get_rank() == dist.get_world_size() - 1 else BATCH]
    base, before = Net(), Counting.count[0]
    expected = train(DistributedDataParallel(copy.deepcopy(base)), sizes)
    found = train(DistributedDataParallel(planned(copy.deepcopy(base), "60%")), sizes)

    return {
        "difference": max(of_all_ranks(difference(expected, found))),
        "solved": of_all_ranks(Counting.count[0] - before),
    }


def a_budget_that_cannot_be_met() -> dict[str, Any]:
    model = DistributedDataParallel(planned(Net(), "10KiB"))
    return {"messages": of_all_ranks(refusal(lambda: model(torch.randn(3, TOKENS, WIDTH))))}


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except remat.RematError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


CHECKS: dict[int, list[Callable[[], dict[str, Any]]]] = {
    2: [
        ddp_from_outside, ddp_blocks, fsdp, tensor_parallel, a_collective_runs_once,
        a_smaller_last_batch_on_one_rank, a_budget_that_cannot_be_met, fsdp_whole_is_refused,
        a_function_over_several_ddps, ddp_through_inductor, fsdp_through_inductor,
    ],
    4: [ddp, fsdp_sharded_first],
}  # fmt: skip


def main(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()  # as the fixtures of `conftest.py` do
    patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
    patch.setattr("remat.pieces.captured_piece._PROVISIONAL_S", 0.1)
    patch.setattr("torch._inductor.config.cpp.simdlen", 1)

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=120),
    )

    for check in CHECKS[num_ranks]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        found = check()
        if rank == 0:
            (folder / f"{check.__name__}.json").write_text(json.dumps(found))

    dist.destroy_process_group()
