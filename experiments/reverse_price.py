"""What reverse mode costs.

Gradient over forward, rooflines, and model FLOP utilisation with recomputation.

    python -m experiments.reverse_price [--time-limit S] [--redraw]

*Cost.* The cheap gradient principle (Baur and Strassen, 1983; Griewank and Walther, "Evaluating
derivatives", 2008): a function and its gradient together cost at most a small constant, five or
less, times the function. The ratio (forward and backward over forward) is counted for eight
architectures, in FLOP and in seconds by an H100's roofline. *Roofline.* Each operator of a GPT-2
and of a ResNet-50 step in bf16: FLOP over bytes moved, and FLOP over its roofline time.
*Utilisation.* Model FLOP over the step's roofline time and the device's peak (Chowdhery et al.,
2022, appendix B: recomputed FLOP do not count): with everything kept, with checkpoints block by
block, and with our plan in the same memory as those.

All numbers are computed from shapes and the device's data sheet: they bound what a device can
reach. Writes `results/reverse_price.json` and `.png`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

import remat
from experiments.figures import (
    arguments,
    draw,
    fake_tensors,
    legend_below,
    read,
    table,
    titled,
    write,
)
from experiments.models import GPT, MODELS, make
from remat.core.graph import Graph
from remat.core.operators import Phase
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.face.tracing import trace_step
from remat.look.plot_style import BLUE, GREY, INK, ORANGE, new_figure, quiet
from remat.solvers import make_solver
from remat.tracers.calls import Call
from remat.tracers.counts import bytes_moved, flop_of, is_contraction
from remat.tracers.devices import device
from remat.tracers.traced_step import TracedStep

SEED = 0
DEVICE = device("H100")
COSTS = f"roofline:{DEVICE.name}"
FACTOR = 5.0  # the constant of the theorem


def price(name: str) -> dict[str, Any]:
    """Returns gradient over forward of one architecture, in FLOP and in seconds."""
    workload = make(name, seed=SEED)
    row: dict[str, Any] = {"model": name}
    for costs, unit in (("flops", "flop"), (COSTS, "seconds")):
        graph = remat.trace(workload.model, kwargs=dict(workload.kwargs), costs=costs)
        forward = sum(op.cost_s for op in graph.operators if op.phase is Phase.FORWARD)
        row[unit] = graph.cost_s / forward
        row["operators"] = graph.num_operators
    return row


def large_steps() -> dict[str, TracedStep]:
    """Returns steps of real size in bf16: GPT-2's shapes, and ResNet-50."""
    from transformers import ResNetConfig, ResNetForImageClassification

    with fake_tensors(torch.bfloat16):
        gpt = GPT(num_layers=12, width=768, num_heads=12, vocabulary=50257, dropout=0.0)
        ids = torch.zeros(8, 1024, dtype=torch.long)

    steps = {
        "GPT-2 small, 8 x 1,024 tokens": trace_step(gpt.train(), kwargs={"ids": ids}, costs=COSTS)
    }

    resnet: nn.Module = ResNetForImageClassification(ResNetConfig())
    resnet.to(torch.bfloat16)
    images = {
        "pixel_values": torch.zeros(64, 3, 224, 224, dtype=torch.bfloat16),
        "labels": torch.zeros(64, dtype=torch.long),
    }
    steps["ResNet-50, 64 images"] = trace_step(resnet.train(), kwargs=images, costs=COSTS)

    return steps


def roofline(step: TracedStep) -> Iterator[dict[str, Any]]:
    """Yields FLOP, bytes and seconds of each operator that runs a kernel."""
    for op, node in zip(step.graph.operators, step.nodes, strict=True):
        if not op.cost_s or node.op != "call_function":
            continue
        call = Call.of(node)
        yield {
            "operator": op.target, "phase": str(op.phase), "flop": flop_of(call),
            "bytes": bytes_moved(call), "seconds": op.cost_s,
            "is_product": is_contraction(call),
        }  # fmt: skip


def blocks_plan(graph: Graph) -> Solution:
    """Returns the schedule with the lowest peak and one segment per block."""
    most, solver = simulate(graph, Schedule.keep_all(graph)).peak_bytes, make_solver("per-block")
    answers = (
        solver.solve(graph, budget_bytes=most * percent // 100) for percent in range(5, 101, 3)
    )
    return next(answer for answer in answers if answer.is_solved)


def utilisation(name: str, step: TracedStep, time_limit_s: float) -> Iterator[dict[str, Any]]:
    """Yields MFU (fraction of the device's peak FLOP/s) for each plan."""
    graph = step.graph
    model_flop = sum(row["flop"] for row in roofline(step))

    keep_all = make_solver("keep-all").solve(
        graph, budget_bytes=simulate(graph, Schedule.keep_all(graph)).peak_bytes
    )

    blocks = blocks_plan(graph)
    ours = remat.solve(graph, blocks.peak_bytes, time_limit_s=time_limit_s)

    for way, solution in (
        ("everything kept", keep_all),
        ("block by block", blocks),
        ("ours, same memory", ours),
    ):
        share = model_flop / (solution.cost_s * DEVICE.bf16)
        yield {
            "model": name,
            "way": way,
            "peak_bytes": solution.peak_bytes,
            "overhead": solution.overhead,
            "utilisation": share,
        }


def points(rows: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Returns FLOP per byte and FLOP per second of the operators that have FLOP.

    Matrix products are listed separately, equal points once.
    """
    found: dict[str, set[tuple[float, ...]]] = {"products, convolutions": set(), "the rest": set()}
    for row in rows:
        if row["flop"]:
            place = found["products, convolutions" if row["is_product"] else "the rest"]
            place.add(
                tuple(float(f"{row['flop'] / row[over]:.4g}") for over in ("bytes", "seconds"))
            )
    return {kind: [list(point) for point in sorted(place)] for kind, place in found.items()}


def picture(record: Mapping[str, Any]) -> None:
    """Draws the three parts."""
    prices, operators, shares = record["prices"], record["operators"], record["utilisation"]
    figure = new_figure(
        "What reverse mode costs, and where the time goes (computed for an H100)",
        width=14,
        height=5,
    )

    left, middle, right = figure.subplots(1, 3, width_ratios=(1.1, 1.5, 1))
    _draw_prices(left, prices)
    _draw_roofline(middle, operators)

    quiet(right, y_label="model FLOP utilisation, at most (%)")
    titled(right, "MFU of each plan")

    ways = list(dict.fromkeys(row["way"] for row in shares))
    names = list(operators)
    for place, (way, colour) in enumerate(zip(ways, (GREY, ORANGE, BLUE), strict=True)):
        heights = [100 * row["utilisation"] for row in shares if row["way"] == way]
        bars = right.bar(
            np.arange(len(names)) + 0.27 * (place - 1), heights, 0.26, color=colour, label=way
        )
        right.bar_label(bars, fmt="%.1f", fontsize=8)

    right.set_xticks(
        np.arange(len(names)), [name.replace(", ", "\n") for name in names], fontsize=8
    )

    legend_below(figure, [left, middle, right], columns=5)
    draw("reverse_price", figure)


def _draw_prices(axes: Any, prices: list[dict[str, Any]]) -> None:
    quiet(axes, x_label="forward and backward over forward", grid="x")
    titled(axes, "the price of a gradient")

    at = np.arange(len(prices))
    axes.barh(at - 0.2, [row["flop"] for row in prices], 0.38, color=BLUE, label="in FLOP")
    axes.barh(
        at + 0.2,
        [row["seconds"] for row in prices],
        0.38,
        color="#a5c8ec",
        label="in seconds, by roofline",
    )

    axes.axvline(FACTOR, color=INK, linestyle="--", linewidth=1.2, label="the theorem's factor, 5")
    axes.set_yticks(at, [row["model"] for row in prices])
    axes.invert_yaxis()


def _draw_roofline(axes: Any, operators: Mapping[str, Mapping[str, list[list[float]]]]) -> None:
    quiet(
        axes,
        x_label="arithmetic intensity (FLOP per byte moved)",
        y_label="attainable rate (TFLOP/s)",
        grid="both",
    )
    titled(axes, "every operator of a step (below the roof: launches)")

    for (name, kinds), colour in zip(operators.items(), (BLUE, ORANGE), strict=True):
        for (kind, found), marker in zip(kinds.items(), "ox", strict=True):
            x, y = [intensity for intensity, _ in found], [rate / 1e12 for _, rate in found]
            axes.plot(
                x,
                y,
                marker,
                color=colour,
                markersize=4,
                alpha=0.6,
                label=f"{name.split(',')[0]}: {kind}",
            )

    roof = np.logspace(-2, 4, 200)
    axes.plot(
        roof,
        np.minimum(roof * DEVICE.bandwidth, DEVICE.bf16) / 1e12,
        color=INK,
        linewidth=1.2,
        label="roof: bandwidth, then bf16 peak",
    )

    axes.set_xscale("log")
    axes.set_yscale("log")


def computed(time_limit_s: float) -> dict[str, Any]:
    """Returns the three parts."""
    steps = large_steps()
    operators = {name: list(roofline(step)) for name, step in steps.items()}
    return {
        "prices": [price(name) for name in MODELS],
        "totals": {name: _totals(rows) for name, rows in operators.items()},
        "utilisation": [
            row for name, step in steps.items() for row in utilisation(name, step, time_limit_s)
        ],
        "operators": {name: points(rows) for name, rows in operators.items()},
    }


def main() -> None:
    """Counts, prints, writes and draws."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--time-limit", type=float, default=15.0, help="seconds for each solve (default: 15)"
    )
    options = parser.parse_args()

    if not options.redraw:
        write(
            "reverse_price",
            {"device": DEVICE.name, "factor": FACTOR, **computed(options.time_limit)},
            seed=SEED,
        )

    record = read("reverse_price")
    picture(record)

    prices = record["prices"]
    print(
        table(
            [[r["model"], f"{r['flop']:.2f}", f"{r['seconds']:.2f}"] for r in prices],
            ["gradient over forward", "FLOP", "seconds"],
        )
    )

    cells = [
        [
            f"{r['model']}: {r['way']}",
            f"{100 * r['overhead']:.1f} %",
            f"{100 * r['utilisation']:.1f} %",
        ]
        for r in record["utilisation"]
    ]
    print(table(cells, ["", "more compute", "utilisation, at most"]))


def _totals(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the shares of FLOP and time in products, and of time bound by memory."""
    flop, seconds = sum(row["flop"] for row in rows), sum(row["seconds"] for row in rows)
    products = [row for row in rows if row["is_product"]]
    by_memory = sum(
        row["seconds"] for row in rows if row["bytes"] / DEVICE.bandwidth > 0.5 * row["seconds"]
    )

    return {
        "flop": flop, "seconds": seconds,
        "flop_in_products": sum(row["flop"] for row in products) / flop,
        "seconds_in_products": sum(row["seconds"] for row in products) / seconds,
        "seconds_bound_by_memory": by_memory / seconds,
    }  # fmt: skip


if __name__ == "__main__":
    main()
