"""What PyTorch offers and what `remat` does, on the same training steps.

Measured peak against measured step time.

    python -m experiments.side_by_side [--pairs N] [--resume] [--redraw]

A GPT with dropout and a ResNet on this machine's CPU, one thread:

- plain PyTorch;
- `torch.utils.checkpoint` around every block;
- the same with selective checkpointing: products and convolutions are saved, the rest is
  recomputed;
- `torch.compile` with `activation_memory_budget` from 1 to 0 (Inductor, its own random numbers
  replaced by PyTorch's so that masks can be compared);
- `remat` from 100 % to the least budget, and its predicted peak; and two of its plans run through
  Inductor, if their budgets can be met. Should kernels hold more than was predicted, a plan
  that was measured above its budget is made again with the excess reserved.

Peaks are the allocator's, with parameters, buffers and inputs. Times are CPU time of forward and
backward over the plain step's, medians of alternating pairs. Gradients of one step from the same
seed are compared with plain's: equal to the bit, close, or wrong; in the picture a cross marks
wrong ones. *Close* means within twice Inductor's own rounding: its difference at a budget of 1,
where it recomputes nothing. That is 3e-7 of the largest gradient on the GPT, and 1.4e-2 on the
ResNet, whose untrained batch norms make it that large. Every row is written as it is measured;
`--resume` keeps the existing rows. Writes `results/side_by_side.json` and `.png`.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import remat
from experiments.comparison import peak_bytes, state_after_step
from experiments.figures import (
    arguments,
    draw,
    label_marks,
    legend_below,
    read,
    table,
    titled,
    write,
)
from experiments.models import GPT, Workload
from remat.core.budget import parse_budget
from remat.core.schedule import Schedule
from remat.look.plot_style import BLUE, GREEN, GREY, LINES, ORANGE, RED, new_figure, quiet

SEED = 0
BUDGETS = ("100%", "80%", "60%", "45%", "least")
INDUCTOR_BUDGETS = ("80%", "60%")
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
TIME_LIMIT_S = 10.0
INDUCTOR = "Inductor, activation_memory_budget"
_PRODUCTS = {
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
}  # fmt: skip
Make = Callable[[Workload], Workload]


def gpt() -> Workload:
    """Six layers of width 128, 8 x 128 tokens, dropout 0.1."""
    return Workload(GPT(), {"ids": torch.randint(0, 512, (8, 128))})


def resnet() -> Workload:
    """ResNet-18's blocks, half as wide, 16 images of 96 x 96."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32, depths=[2, 2, 2, 2], hidden_sizes=[32, 64, 128, 256], layer_type="basic"
    )
    model = ResNetForImageClassification(config).train()
    return Workload(
        model, {"pixel_values": torch.randn(16, 3, 96, 96), "labels": torch.arange(16) % 2}
    )


MODELS: dict[str, Callable[[], Workload]] = {"GPT": gpt, "ResNet-18": resnet}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks that a user would checkpoint."""
    if isinstance(model, GPT):
        return list(model.blocks)
    return [layer for stage in model.resnet.encoder.stages for layer in stage.layers]  # type: ignore[union-attr]


def checkpointed(workload: Workload, **options: Any) -> Workload:
    """Puts `torch.utils.checkpoint` around every block."""
    for block in blocks_of(workload.model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    return workload


def selective(workload: Workload) -> Workload:
    """The same, with products and convolutions saved."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE
            if operator in _PRODUCTS
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return checkpointed(
        workload, context_fn=functools.partial(create_selective_checkpoint_contexts, policy)
    )


def compiled(workload: Workload, share: float) -> Workload:
    """Compiles with Inductor; the budget is a share of the saved activations."""
    torch._functorch.config.activation_memory_budget = share
    torch._inductor.config.fallback_random = True
    call: Any = torch.compile(workload.model)
    return Workload(call, workload.kwargs)


def planned(workload: Workload, budget: int | str, executor: str = "eager") -> Workload:
    """Plans with remat."""
    torch._functorch.config.activation_memory_budget = 1.0
    return Workload(
        remat.checkpoint(workload.model, budget, time_limit_s=TIME_LIMIT_S, executor=executor),
        workload.kwargs,
    )


def ways(workload: Workload) -> Iterator[tuple[str, str, Make]]:
    """Yields the family, the label and the maker of each way of training."""
    yield "plain PyTorch", "plain", lambda plain: plain
    yield "checkpoint a block", "blocks", checkpointed
    yield "selective checkpoint a block", "selective", selective

    for share in SHARES:
        yield INDUCTOR, f"{share:g}", functools.partial(compiled, share=share)

    graph = remat.trace(workload.model, kwargs=dict(workload.kwargs), costs="profile")
    least, most = (
        remat.minimum(graph).peak_bytes,
        remat.simulate(graph, Schedule.keep_all(graph)).peak_bytes,
    )

    for budget in BUDGETS:
        if budget == "least" or parse_budget(budget, keep_all_bytes=most) > least:
            yield (
                "remat",
                budget,
                functools.partial(planned, budget=least if budget == "least" else budget),
            )

    for budget in INDUCTOR_BUDGETS:
        yield (
            "remat, run by Inductor",
            budget,
            functools.partial(planned, budget=budget, executor="inductor"),
        )


def difference(found: list[torch.Tensor], plain: list[torch.Tensor]) -> float:
    """Returns the largest difference of gradients over the largest plain one."""
    scale = max(g.abs().max().item() for g in plain)
    return max((a - b).abs().max().item() for a, b in zip(found, plain, strict=True)) / scale


def judged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with a verdict on their gradients: equal, close or wrong."""
    rounding = {
        row["model"]: row["gradient_difference"]
        for row in rows
        if (row["family"], row["label"]) == (INDUCTOR, "1")
    }

    def verdict(row: Mapping[str, Any]) -> str:
        off = row["gradient_difference"]
        return (
            "equal"
            if off == 0
            else "close"
            if off <= 2 * rounding.get(row["model"], 0.0)
            else "wrong"
        )

    return [dict(row) if "refused" in row else {**row, "gradients": verdict(row)} for row in rows]


def gradients(workload: Workload) -> list[torch.Tensor]:
    """Returns the gradients of a step from a fixed seed."""
    state_after_step(workload, SEED)
    return [p.grad.clone() for p in workload.model.parameters() if p.grad is not None]


def paces(workload: Workload, plain: Workload, pairs: int) -> tuple[float, float]:
    """Returns the medians of a step's CPU time, and of its ratio to the plain step beside it."""
    times = []
    for _ in range(pairs):
        pair = []
        for one in (workload, plain):
            one.model.zero_grad(set_to_none=True)
            start = time.process_time()
            one.step()
            pair.append(time.process_time() - start)
        times.append(pair)

    return statistics.median(t for t, _ in times), statistics.median(
        mine / theirs for mine, theirs in times
    )


def measured(
    name: str, pairs: int, known: Container[tuple[str, str, str]]
) -> Iterator[dict[str, Any]]:
    """Yields one row for each way of training a model that has no row yet."""
    torch.manual_seed(SEED)
    original = MODELS[name]()
    plain = copy.deepcopy(original)
    truth = gradients(plain)

    for family, label, make in ways(copy.deepcopy(original)):
        if (name, family, label) in known:
            continue

        torch._dynamo.reset()
        workload = make(copy.deepcopy(original))
        try:
            for _ in range(2):  # plans and compiles
                gradients(workload)
        except remat.BudgetError as error:
            yield {"model": name, "family": family, "label": label, "refused": str(error)}
            continue

        off = difference(gradients(workload), truth)
        step_s, ratio = paces(workload, plain, pairs)

        row = {
            "model": name,
            "family": family,
            "label": label,
            "peak_bytes": peak_bytes(workload),
            "step_s": step_s,
            "ratio": ratio,
        }

        if family.startswith("remat"):
            solution = remat.report(workload.model).solution
            row |= {
                "predicted_peak_bytes": solution.peak_bytes,
                "predicted_overhead": solution.overhead,
                "gap": solution.gap,
            }

        yield row | {"gradient_difference": off}

    torch._functorch.config.activation_memory_budget = 1.0


_COLOURS = {
    "plain PyTorch": GREY,
    "checkpoint a block": ORANGE,
    "selective checkpoint a block": GREEN,
    INDUCTOR: "#7b4fa3",
    "remat": BLUE,
    "remat, run by Inductor": LINES[5],
}


def picture(record: Mapping[str, Any]) -> None:
    """Draws step time against peak, one panel per model."""
    rows = [row for row in record["rows"] if "refused" not in row]
    figure = new_figure(
        "The same training step run in several ways (CPU, one thread)", width=12, height=5.2
    )
    panels = np.atleast_1d(figure.subplots(1, len(MODELS)))

    for axes, name in zip(panels, MODELS, strict=True):
        quiet(
            axes,
            x_label="measured peak of the step (MiB)",
            y_label="measured CPU time over the plain step's",
            grid="both",
        )
        titled(axes, name)
        _draw_ways(axes, [row for row in rows if row["model"] == name])

    legend_below(figure, list(panels), columns=4)
    draw("side_by_side", figure)


def _draw_ways(axes: Any, rows: list[dict[str, Any]]) -> None:
    for family, colour in _COLOURS.items():
        # in the order of their budgets
        group = [row for row in rows if row["family"] == family]
        x, y = [row["peak_bytes"] / 2**20 for row in group], [row["ratio"] for row in group]
        axes.plot(
            x,
            y,
            "o-" if len(group) > 1 else "o",
            color=colour,
            markersize=7,
            linewidth=1.2,
            label=family,
        )

    wrong = [row for row in rows if row["gradients"] == "wrong"]
    axes.plot(
        [row["peak_bytes"] / 2**20 for row in wrong], [row["ratio"] for row in wrong], "x",
        color=RED, markersize=13,
        markeredgewidth=2.2, linestyle="", label="wrong gradients",
    )  # fmt: skip

    axes.set_xlim(0, 1.1 * max(row["peak_bytes"] for row in rows) / 2**20)
    label_marks(
        axes,
        [
            (row["peak_bytes"] / 2**20, row["ratio"], row["label"], _COLOURS[row["family"]])
            for row in rows
        ],
    )


def run(pairs: int, *, is_resumed: bool) -> None:
    """Runs everything on one thread, and writes every row as it is measured."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = read("side_by_side")["rows"] if is_resumed else []
    known = {(row["model"], row["family"], row["label"]) for row in rows}
    for name in MODELS:
        for row in measured(name, pairs, known):
            rows.append(row)
            print(row, flush=True)
            write("side_by_side", {"pairs": pairs, "rows": judged(rows)}, seed=SEED)


def main() -> None:
    """Runs, prints and draws."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--pairs",
        type=int,
        default=9,
        help="steps of each way, each beside a plain one (default: 9)",
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows of an interrupted run")
    options = parser.parse_args()

    if not options.redraw:
        run(options.pairs, is_resumed=options.resume)

    record = read("side_by_side")
    picture(record)

    cells = []
    for row in record["rows"]:
        if "refused" in row:
            cells.append(
                [f"{row['model']}: {row['family']}, {row['label']}", "can't be met", "", ""]
            )
            continue

        peak, ratio = f"{row['peak_bytes'] / 2**20:.1f} MiB", f"{row['ratio']:.2f}"
        cells.append(
            [f"{row['model']}: {row['family']}, {row['label']}", peak, ratio, row["gradients"]]
        )

    print(table(cells, ["", "measured peak", "time over plain", "gradients"]))


if __name__ == "__main__":
    main()
