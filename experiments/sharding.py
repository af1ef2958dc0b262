"""Mixed precision and sharding.

What a rank holds in a training step, by category, with and without rematerialization.

    python -m experiments.sharding [--redraw]

A GPT-2 medium (24 layers, width 1,024, 8 x 1,024 tokens per rank, fused attention) with AdamW,
computed from traces:

- *fp32*: parameters, gradients and two moments of 4 bytes;
- *bf16-mixed*: the same master copies; activations as `torch.autocast` makes them, with its casts
  of the weights;
- *FSDP* over N ranks: a rank holds 1/N of the parameters, gradients and moments, and the whole of
  the largest piece that is gathered while it is used (a block or the head).

Activations (what the step holds beyond parameters, inputs and returned gradients, at its peak) are
not sharded. With enough ranks almost nothing else is left, and there a plan helps. The plan with
the lowest peak that `remat.minimum` finds is shown with its extra compute.

Each bar is the sum of the categories' own peaks, an upper bound on the peak of their sum.

A small GPT checks this by measurement, on 1, 2 and 4 local processes under `fully_shard` (gloo,
CPU), in fp32 and bf16-mixed (FSDP's mixed precision policy): the bytes of the shards of parameters,
gradients and moments after a step, against the computed 1/N (shards are cut along the first
dimension, so they are equal if N divides it); and what a step holds at its peak beyond those
shards, plain and planned to 60 % of what its blocks need to keep everything. Writes
`results/sharding.json` and `.png`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import remat
from experiments.figures import arguments, draw, fake_tensors, legend_below, read, table, write
from experiments.models import GPT
from experiments.transformer_arithmetic import FusedBlock
from remat.analysis.composition import Category, Composition
from remat.core.budget import format_bytes
from remat.core.graph import Graph
from remat.core.schedule import Schedule
from remat.look.plot_style import BLUE, GREEN, GREY, LINES, ORANGE, new_figure, quiet
from remat.solvers.auto.minimum import minimum

SEED = 0
SHAPE: dict[str, Any] = {
    "num_layers": 24,
    "width": 1024,
    "num_heads": 16,
    "vocabulary": 50257,
    "dropout": 0.0,
}
BATCH, TOKENS = 8, 1024
RANKS = (1, 2, 4, 8, 16, 64, 256, 1024)
MEASURED_RANKS = (1, 2, 4)
COSTS = "roofline:H100"
SMALL: dict[str, Any] = {"num_layers": 4, "width": 128, "num_heads": 4, "vocabulary": 512}
SMALL_BATCH, SMALL_TOKENS = 8, 128
SHARE = "60%"
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
        model.blocks = nn.Sequential(
            *(
                FusedBlock(SHAPE["width"], SHAPE["num_heads"], 0.0)
                for _ in range(SHAPE["num_layers"])
            )
        )

        ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
        model = Autocast(model) if is_mixed else model

    return remat.trace(model.train(), (ids,), costs=COSTS)


def activation_bytes(graph: Graph, schedule: Schedule) -> int:
    """Returns the peak beyond parameters, buffers, inputs and returned gradients."""
    parts = Composition.of(graph, schedule)
    return max(
        sum(size for category, size in parts.at(step).items() if category not in _HELD)
        for step in range(len(schedule.steps))
    )


def parameter_counts() -> tuple[int, int]:
    """Returns the number of parameters of the medium GPT, and of its largest gathered piece.

    FSDP gathers the blocks and the tied head.
    """
    with fake_tensors():
        model = GPT(**SHAPE)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    return sum(p.numel() for p in model.parameters()), max(block, model.token.weight.numel())


def computed() -> Iterator[dict[str, Any]]:
    """Yields bytes per rank by precision, ranks and plan."""
    count, gathered = parameter_counts()
    for precision, is_mixed in (("fp32", False), ("bf16-mixed", True)):
        graph = traced(is_mixed=is_mixed)
        least = Schedule.from_steps(graph, minimum(graph, time_limit_s=30.0).steps)

        for plan, schedule in (
            ("everything kept", Schedule.keep_all(graph)),
            ("remat, least", least),
        ):
            activations = activation_bytes(graph, schedule)
            overhead = remat.simulate(graph, schedule).cost_s / graph.cost_s - 1

            for ranks in RANKS:
                one = 4 * count // ranks
                unit = 0 if ranks == 1 else gathered * (2 if is_mixed else 4)

                held = {
                    "parameters": one + unit,
                    "gradients": one,
                    "optimizer": 2 * one,
                    "activations": activations,
                }

                yield {
                    "precision": precision,
                    "plan": plan,
                    "ranks": ranks,
                    "overhead": overhead,
                    "bytes": held,
                    "total": sum(held.values()),
                }


def _small() -> GPT:
    torch.manual_seed(SEED)
    return GPT(**SMALL)


def _sharded(*, is_mixed: bool, is_planned: bool) -> nn.Module:
    """The small GPT under FSDP2, plain or planned block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = _small()
    if is_planned:
        remat.checkpoint(model, SHARE, blocks=model.blocks, costs="flops", time_limit_s=10.0)

    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_mixed else MixedPrecisionPolicy()
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    return model


def _trained(*, is_mixed: bool, is_planned: bool) -> dict[str, Any]:
    """Trains two steps, measures the next; returns what this rank holds, and its peak."""
    model = _sharded(is_mixed=is_mixed, is_planned=is_planned)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, SMALL["vocabulary"], (SMALL_BATCH, SMALL_TOKENS))

    for _ in range(2):
        optimizer.zero_grad()
        model(ids=ids).backward()
        optimizer.step()

    def local(tensor: Any) -> int:
        part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return int(part.numel() * part.element_size())

    moments = [
        state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    held = {
        "parameters": sum(map(local, model.parameters())),
        "gradients": sum(local(p.grad) for p in model.parameters() if p.grad is not None),
        "optimizer": sum(map(local, moments)),
    }

    found: dict[str, Any] = {"measured": held}
    if is_planned:
        report = remat.report(model)
        found |= {
            "predicted_peak_bytes": report.solution.peak_bytes,
            "measured_peak_bytes": report.measured_peak_bytes,
        }
        found |= {"overhead": report.solution.overhead, "unplanned_bytes": report.unplanned_bytes}

    optimizer.zero_grad()
    return found | {
        "step_bytes": remat.measure(lambda: model(ids=ids).backward(), device="cpu").peak_bytes
    }


def _rank(rank: int, ranks: int, folder: str) -> None:
    """One process: trains in both precisions, plain and planned.

    The first one writes the results.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )

    found = [
        {
            "precision": precision,
            "plan": plan,
            **_trained(is_mixed=precision != "fp32", is_planned=plan != "everything kept"),
        }
        for precision in ("fp32", "bf16-mixed")
        for plan in ("everything kept", f"remat, {SHARE}")
    ]

    if rank == 0:
        torch.save(found, f"{folder}/found.pt")

    dist.barrier()
    dist.destroy_process_group()


def measured() -> Iterator[dict[str, Any]]:
    """Yields what rank 0 holds after a step and at its peak, beside the computed 1/N."""
    count = sum(p.numel() for p in _small().parameters())
    for ranks in MEASURED_RANKS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, args=(ranks, folder), nprocs=ranks)  # type: ignore[no-untyped-call, attr-defined, unused-ignore]
            found = torch.load(os.path.join(folder, "found.pt"))

        expected = {
            "parameters": 4 * count // ranks,
            "gradients": 4 * count // ranks,
            "optimizer": 8 * count // ranks,
        }

        for row in found:
            print(ranks, row, flush=True)
            yield {"ranks": ranks, "computed": expected, **row}


def picture(record: Mapping[str, Any]) -> None:
    """Draws bytes per rank, one panel per precision and plan, and the measured peaks."""
    figure = new_figure(
        "What a rank holds: GPT-2 medium, AdamW, 8 × 1,024 tokens per rank (computed); right: "
        "measured",
        width=17,
        height=4.8,
    )

    rows = record["rows"]
    cases = list(dict.fromkeys((row["precision"], row["plan"]) for row in rows))
    grid = figure.add_gridspec(1, len(cases) + 1, width_ratios=(*[1] * len(cases), 1.15))
    first = figure.add_subplot(grid[0, 0])
    panels = [first, *(figure.add_subplot(grid[0, i], sharey=first) for i in range(1, len(cases)))]

    for axes, (precision, plan) in zip(panels, cases, strict=True):
        mine = [row for row in rows if (row["precision"], row["plan"]) == (precision, plan)]
        quiet(
            axes, x_label="FSDP ranks", y_label="memory per rank (GiB)" if axes is panels[0] else ""
        )
        more = f", +{100 * mine[0]['overhead']:.0f} % compute" if mine[0]["overhead"] > 1e-9 else ""
        axes.set_title(f"{precision}: {plan}{more}", fontsize=9.5, loc="left")

        below = np.zeros(len(mine))
        for kind, colour in zip(mine[0]["bytes"], (LINES[3], GREEN, ORANGE, BLUE), strict=True):
            height = np.array([row["bytes"][kind] / 2**30 for row in mine])
            axes.bar(range(len(mine)), height, 0.75, bottom=below, color=colour, label=kind)
            below += height

        axes.set_xticks(range(len(mine)), [f"{row['ranks']:,}" for row in mine], fontsize=7.5)

    last = figure.add_subplot(grid[0, len(cases)])
    _draw_measured(last, record["measured"])

    legend_below(figure, [*panels, last], columns=8)
    draw("sharding", figure)


def _draw_measured(axes: Any, rows: list[dict[str, Any]]) -> None:
    quiet(
        axes,
        x_label="FSDP ranks (local processes)",
        y_label="peak of a step beyond its state (MiB)",
    )
    axes.set_title("GPT of 4 layers, width 128: measured", fontsize=9.5, loc="left")

    cases = list(dict.fromkeys((row["precision"], row["plan"]) for row in rows))
    for place, (case, colour) in enumerate(
        zip(cases, (GREY, LINES[5], "#b9c1c9", "#8fd0d1"), strict=True)
    ):
        heights = [
            row["step_bytes"] / 2**20 for row in rows if (row["precision"], row["plan"]) == case
        ]

        bars = axes.bar(
            np.arange(len(heights)) + 0.21 * (place - 1.5),
            heights,
            0.2,
            color=colour,
            label=", ".join(case),
        )
        axes.bar_label(bars, fmt="%.0f", fontsize=7.5)

    axes.set_xticks(range(len(MEASURED_RANKS)), [str(ranks) for ranks in MEASURED_RANKS])


def main() -> None:
    """Computes, measures, prints, writes and draws."""
    if not arguments(__doc__).parse_args().redraw:
        write("sharding", {"rows": list(computed()), "measured": list(measured())}, seed=SEED)

    record = read("sharding")
    picture(record)

    rows = record["rows"]
    cells = [
        [
            f"{r['precision']}, {r['plan']}, {r['ranks']:,} ranks",
            *(format_bytes(size) for size in r["bytes"].values()),
            format_bytes(r["total"]),
        ]
        for r in rows
        if r["ranks"] in (1, 8, 1024)
    ]
    print(table(cells, ["", *rows[0]["bytes"], "total"]))

    for check in record["measured"]:
        print(check)


if __name__ == "__main__":
    main()
