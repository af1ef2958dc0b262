"""Mixed precision and sharding: what a rank holds in a training step, by category, with and without rematerialization.

    python -m experiments.sharding

A GPT-2 medium (24 layers, width 1,024, 8 x 1,024 tokens a rank, fused attention) with AdamW, computed from traces:

- *fp32*: parameters, gradients and two moments of 4 bytes;
- *bf16-mixed*: the same master copies; activations as `torch.autocast` makes them, with its casts of the weights;
- *FSDP* over N ranks: parameters, gradients and moments are N-th parts; one block and the head are gathered in full while they are used.

Activations (what the step holds beyond parameters, inputs and returned gradients, at its peak) are no part of what is sharded: beyond
some ranks they are all that is left, and that is where a plan (the least that `remat.minimum` finds, its extra compute beside it) helps.

Bars add each category's own peak, an upper bound on the peak of their sum. The least plans of both precisions hold about the same: the
loss in float32 over a vocabulary of 50,257 is what neither can drop.

Checked by measurement: a small GPT on 1, 2 and 4 local processes under `fully_shard` (gloo, CPU); bytes of the shards of parameters,
gradients and moments after a step against the computed N-th parts. Shards are cut along the first dimension, so that parts are equal where
it divides by N. Writes `results/sharding.json` and `.png`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import remat
from experiments.figures import draw, fake_tensors, legend_below, table, write
from experiments.models import GPT
from experiments.transformer_arithmetic import FusedBlock
from remat.budget import format_bytes
from remat.composition import Category, Composition
from remat.graph import Graph
from remat.plot_style import BLUE, GREEN, LINES, ORANGE, new_figure, quiet
from remat.schedule import Schedule
from remat.solvers.minimum import minimum

SEED = 0
SHAPE: dict[str, Any] = {"num_layers": 24, "width": 1024, "num_heads": 16, "vocabulary": 50257, "dropout": 0.0}
BATCH, TOKENS = 8, 1024
RANKS = (1, 2, 4, 8, 16, 64, 256, 1024)
MEASURED_RANKS = (1, 2, 4)
COSTS = "roofline:H100"
_HELD = (Category.PARAMETERS, Category.INPUTS, Category.PARAMETER_GRADIENTS)


class Autocast(nn.Module):
    """Runs a model under bf16 autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the model's loss."""
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = self.model(ids)
        return loss


def traced(*, is_mixed: bool) -> Graph:
    """Returns the step of the medium GPT, on fake tensors."""
    with fake_tensors():
        model: nn.Module = GPT(**SHAPE)
        assert isinstance(model, GPT)
        model.blocks = nn.Sequential(*(FusedBlock(SHAPE["width"], SHAPE["num_heads"], 0.0) for _ in range(SHAPE["num_layers"])))
        ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
        model = Autocast(model) if is_mixed else model
    return remat.trace(model.train(), (ids,), costs=COSTS)


def activation_bytes(graph: Graph, schedule: Schedule) -> int:
    """Returns what the step holds at its peak beyond parameters, buffers, inputs and returned gradients."""
    parts = Composition.of(graph, schedule)
    return max(sum(size for category, size in parts.at(step).items() if category not in _HELD) for step in range(len(schedule.steps)))


def parameter_counts() -> tuple[int, int]:
    """Returns the parameters of the medium GPT, and those of the largest piece that FSDP gathers: a block or the tied head."""
    with fake_tensors():
        model = GPT(**SHAPE)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    return sum(p.numel() for p in model.parameters()), max(block, model.token.weight.numel())


def computed() -> Iterator[dict[str, Any]]:
    """Yields bytes a rank by precision, ranks and plan."""
    count, gathered = parameter_counts()
    for precision, is_mixed in (("fp32", False), ("bf16-mixed", True)):
        graph = traced(is_mixed=is_mixed)
        least = Schedule.from_steps(graph, minimum(graph, time_limit_s=30.0).steps)
        for plan, schedule in (("everything kept", Schedule.keep_all(graph)), ("remat, least", least)):
            activations = activation_bytes(graph, schedule)
            overhead = remat.simulate(graph, schedule).cost_s / graph.cost_s - 1
            for ranks in RANKS:
                one = 4 * count // ranks
                unit = 0 if ranks == 1 else gathered * (2 if is_mixed else 4)
                held = {"parameters": one + unit, "gradients": one, "optimizer": 2 * one, "activations": activations}
                yield {
                    "precision": precision,
                    "plan": plan,
                    "ranks": ranks,
                    "overhead": overhead,
                    "bytes": held,
                    "total": sum(held.values()),
                }


def _rank(rank: int, ranks: int, folder: str) -> None:
    """One process: shards, trains a step, and writes what its shards hold."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.manual_seed(SEED)
    model = GPT(num_layers=4, width=128, num_heads=4, vocabulary=512)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(ids=torch.randint(0, 512, (2, 64))).backward()
    optimizer.step()

    def local(tensor: Any) -> int:
        part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return int(part.numel() * part.element_size())

    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    held = {
        "parameters": sum(map(local, model.parameters())),
        "gradients": sum(local(p.grad) for p in model.parameters() if p.grad is not None),
        "optimizer": sum(map(local, moments)),
    }
    if rank == 0:
        torch.save(held, f"{folder}/held.pt")
    dist.barrier()
    dist.destroy_process_group()


def measured() -> Iterator[dict[str, Any]]:
    """Yields what rank 0 holds after a step, beside the computed N-th parts."""
    count = sum(p.numel() for p in GPT(num_layers=4, width=128, num_heads=4, vocabulary=512).parameters())
    for ranks in MEASURED_RANKS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, args=(ranks, folder), nprocs=ranks)  # type: ignore[no-untyped-call, attr-defined, unused-ignore]
            held = torch.load(os.path.join(folder, "held.pt"))
        expected = {"parameters": 4 * count // ranks, "gradients": 4 * count // ranks, "optimizer": 8 * count // ranks}
        yield {"ranks": ranks, "measured": held, "computed": expected}


def picture(rows: list[dict[str, Any]]) -> None:
    """Draws bytes a rank against ranks, a panel for each precision and plan."""
    figure = new_figure("What a rank holds: GPT-2 medium, AdamW, 8 x 1,024 tokens a rank", width=14, height=4.8)
    cases = list(dict.fromkeys((row["precision"], row["plan"]) for row in rows))
    panels = figure.subplots(1, len(cases), sharey=True)
    for axes, (precision, plan) in zip(panels, cases, strict=True):
        mine = [row for row in rows if (row["precision"], row["plan"]) == (precision, plan)]
        quiet(axes, x_label="FSDP ranks", y_label="memory a rank (GiB)" if axes is panels[0] else "")
        more = f", {100 * mine[0]['overhead']:.0f} % more compute" if mine[0]["overhead"] > 1e-9 else ""
        axes.set_title(f"{precision}: {plan}{more}", fontsize=9.5, loc="left")
        below = np.zeros(len(mine))
        for kind, colour in zip(mine[0]["bytes"], (LINES[3], GREEN, ORANGE, BLUE), strict=True):
            height = np.array([row["bytes"][kind] / 2**30 for row in mine])
            axes.bar(range(len(mine)), height, 0.75, bottom=below, color=colour, label=kind)
            below += height
        axes.set_xticks(range(len(mine)), [f"{row['ranks']:,}" for row in mine], fontsize=8)
    legend_below(figure, list(panels), columns=4)
    draw("sharding", figure)


def main() -> None:
    """Computes, measures, prints, writes and draws."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows, checks = list(computed()), list(measured())
    write("sharding", {"rows": rows, "measured": checks}, seed=SEED)
    picture(rows)
    cells = [
        [
            f"{r['precision']}, {r['plan']}, {r['ranks']:,} ranks",
            *(format_bytes(size) for size in r["bytes"].values()),
            format_bytes(r["total"]),
        ]
        for r in rows
        if r["ranks"] in (1, 8, 1024)
    ]
    print(table(cells, ["", *rows[0]["bytes"], "together"]))
    for check in checks:
        print(check)


if __name__ == "__main__":
    main()
