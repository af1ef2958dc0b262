"""Memory of a ResNet and an LSTM against depth and unrolled steps (Chen et al., 2016,
arXiv:1604.06174, figures 5 and 6).

    python -m experiments.depth_growth [--longest N] [--redraw]

Compares the paper's ways of allocating memory for a training step with ours. The bytes exclude
parameters, buffers and inputs, which are held anyway, and the returned gradients of parameters,
which grow with depth in any case:

- *no optimization*: every value has memory of its own for the whole step;
- *in place*: elementwise operators write over inputs that nothing reads later;
- *sharing*: as above, and memory is freed after the last read, as PyTorch does when it keeps
  everything;
- *drop cheap*: batch norm, activations and pooling are recomputed (the paper's section 4.2);
- *sublinear*: the lowest peak of three heuristics: the paper's square root rule at single values,
  its linearized form, and segments of about equal length, cut where the fewest bytes cross. The
  third cuts between the cells of an LSTM, as the paper does by hand; no single value cuts there;
- *ours, same price*: the smallest peak found for at most the compute of the sublinear plan;
- *ours, least*: the smallest peak that `remat.minimum` finds, at any price.

Growth is fitted twice: as memory = c N^p, with p from the larger half of the sizes, and as
a + b f(N), where f is linear, a square root or a logarithm, whichever fits best; memory that varies
by less than 1 % is called constant. For one network of each kind, the step time with each plan is
measured relative to the step that keeps everything. In the paper a sublinear plan costs one more
forward pass, "about 30 % slower". Writes `results/depth_growth.json` and `.png`.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import remat
from experiments.figures import arguments, draw, legend_below, read, table, titled, write
from experiments.growth_plans import PLANNED, plans
from experiments.static_memory import LSTM
from remat.analysis.arena import Blocks
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.look.plot_style import BLUE, GREEN, GREY, INK, ORANGE, RED, new_figure, quiet
from remat.solvers import make_solver

SEED = 0
MEASURED = {"ResNet": 16, "LSTM": 64}  # sizes of the networks that are timed
PAIRS = 9
# used where memory is compared, the same on every machine; timed plans use measured costs
COSTS = "roofline:A100"


class Residual(nn.Module):
    """Two convolutions with batch norm and a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the block's output; shape (batch, channels, height, width)."""
        inner = functional.relu(self.norms[0](self.convolutions[0](x)))
        return functional.relu(self.norms[1](self.convolutions[1](inner)) + x)


class ResNet(nn.Module):
    """A chain of residual blocks at one resolution.

    As in He et al., 2015, for CIFAR, without the two halvings.
    """

    def __init__(self, num_blocks: int, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(num_blocks))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns the mean square of the last block's output."""
        x = self.stem(pixels)
        for block in self.blocks:
            x = block(x)
        loss: torch.Tensor = x.square().mean()
        return loss


def resnet(num_blocks: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Returns a ResNet of `num_blocks` blocks, and 8 images of 32 x 32."""
    return ResNet(num_blocks), (torch.randn(8, 3, 32, 32),)


def lstm(num_steps: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Returns an LSTM, and 16 sequences of `num_steps` steps and width 128."""
    return LSTM(128), (torch.randn(num_steps, 16, 128),)


NETWORKS: dict[str, Callable[[int], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "ResNet": resnet,
    "LSTM": lstm,
}
SIZES = {"ResNet": (4, 8, 16, 32, 64), "LSTM": (8, 16, 32, 64, 128)}
WAYS = ("no optimization", "in place", "sharing", *PLANNED)
LAWS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda n: n,
    "square root": np.sqrt,
    "logarithm": np.log,
}


def peaks(graph: Graph) -> dict[str, dict[str, float]]:
    """Returns bytes and extra compute of each way of running a step."""
    keep_all = Schedule.keep_all(graph)
    held = graph.resident_bytes
    apart, merged = Blocks.of(graph, keep_all, in_place=False), Blocks.of(graph, keep_all)
    returned = int(graph.arrays.size_bytes[graph.arrays.output].sum())

    rows = {
        "no optimization": (int(apart.size_bytes.sum()), 0.0),
        "in place": (int(merged.size_bytes.sum()), 0.0),
        "sharing": (simulate(graph, keep_all).peak_bytes - held, 0.0),
        **{way: (plan.peak_bytes - held, plan.overhead) for way, plan in plans(graph).items()},
    }

    return {way: {"bytes": rows[way][0] - returned, "overhead": rows[way][1]} for way in WAYS}


def grown(name: str, longest: int) -> Iterator[dict[str, Any]]:
    """Yields the bytes of each way for each size of the network."""
    for size in (size for size in SIZES[name] if size <= longest):
        torch.manual_seed(SEED)
        model, args = NETWORKS[name](size)
        graph = remat.trace(model, args, costs=COSTS)

        row = {
            "network": name,
            "size": size,
            "operators": graph.num_operators,
            "ways": peaks(graph),
        }

        print(row, flush=True)
        yield row


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the exponent of each way's growth, fitted to the larger half of the sizes."""
    large = rows[len(rows) // 2 :]
    x = np.log([row["size"] for row in large])
    return {
        way: float(np.polyfit(x, np.log([row["ways"][way]["bytes"] for row in large]), 1)[0])
        for way in WAYS
    }


def laws(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Returns which of `LAWS` each way's memory follows.

    Fits a + b f(N) by least squares of the relative errors over all sizes.
    """
    sizes = np.array([row["size"] for row in rows], np.float64)

    def off(law: Callable[[Any], Any], y: Any) -> float:
        columns = np.stack([1 / y, law(sizes) / y], 1)
        return float(np.sum((columns @ np.linalg.lstsq(columns, np.ones(len(y)))[0] - 1) ** 2))

    found = {way: np.array([row["ways"][way]["bytes"] for row in rows], np.float64) for way in WAYS}
    return {
        way: "constant"
        if np.ptp(y) < 0.01 * y.max()
        else min(LAWS, key=lambda name: off(LAWS[name], y))
        for way, y in found.items()
    }


def paces(name: str) -> Iterator[dict[str, Any]]:
    """Yields each plan's measured step time over keeping everything and over plain PyTorch."""
    torch.manual_seed(SEED)
    plain, args = NETWORKS[name](MEASURED[name])
    graph = remat.trace(plain, args, costs="profile")
    all_kept = make_solver("keep-all").solve(
        graph, budget_bytes=simulate(graph, Schedule.keep_all(graph)).peak_bytes
    )
    kept = remat.wrap(copy.deepcopy(plain), all_kept, costs="profile")

    for way, solution in plans(graph).items():
        planned = remat.wrap(copy.deepcopy(plain), solution, costs="profile")
        times = []
        for step in range(PAIRS + 2):
            moment = []
            for one in (planned, kept, plain):
                one.zero_grad(set_to_none=True)
                start = time.process_time()
                one(*args).backward()
                moment.append(time.process_time() - start)
            if step >= 2:
                times.append(moment)

        yield {
            "network": name,
            "size": MEASURED[name],
            "way": way,
            "plan": solution.solver,
            "promised": 1 + solution.overhead,
            "over_keep_all": statistics.median(a / b for a, b, _ in times),
            "over_plain": statistics.median(a / c for a, _, c in times),
        }


_COLOURS = dict(zip(WAYS, (GREY, INK, ORANGE, "#7b4fa3", GREEN, "#5aa9e6", BLUE), strict=True))


def picture(record: Mapping[str, Any]) -> None:
    """Draws memory against size on logarithmic axes, and the measured cost of the plans."""
    figure = new_figure(
        "Memory against depth: allocations of Chen et al. (2016), and the least found",
        width=15,
        height=5.4,
    )
    panels = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 0.9))
    labels = {"ResNet": "residual blocks N", "LSTM": "unrolled steps N"}

    for axes, name in zip(panels[:2], NETWORKS, strict=True):
        quiet(
            axes,
            x_label=labels[name],
            y_label="activations, intermediate gradients, workspace (MiB)",
            grid="both",
        )
        titled(axes, f"{name}: memory, the law that fits best, the fitted power")
        _draw_growth(axes, name, record)

    _draw_paces(panels[2], record["paces"])
    legend_below(figure, list(panels), columns=5)
    draw("depth_growth", figure)


def _draw_growth(axes: Any, name: str, record: Mapping[str, Any]) -> None:
    rows = [row for row in record["rows"] if row["network"] == name]
    sizes = [row["size"] for row in rows]
    for way, colour in _COLOURS.items():
        y = [row["ways"][way]["bytes"] / 2**20 for row in rows]
        axes.loglog(sizes, y, "o-", color=colour, markersize=5, label=way)

        power = round(record["exponents"][name][way], 2) + 0.0  # no -0.00
        text = f"{record['laws'][name][way]}, {power:.2f}"
        # these almost coincide on the LSTM
        close = {"sharing": 1, "drop cheap": -8, "sublinear": 3, "ours, same price": -8}
        offset = (6, close.get(way, -3))
        axes.annotate(
            text,
            (sizes[-1], y[-1]),
            xytext=offset,
            textcoords="offset points",
            fontsize=8,
            color=colour,
        )

    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlim(right=sizes[-1] * 3)

    root = rows[-1]["ways"]["sublinear"]["bytes"] / 2**20
    axes.plot(
        sizes,
        [root * math.sqrt(size / sizes[-1]) for size in sizes],
        ":",
        color=RED,
        label="slope of the square root",
    )


def _draw_paces(axes: Any, rows: list[dict[str, Any]]) -> None:
    quiet(axes, y_label="step over keeping everything, measured")
    titled(axes, "price: CPU time of the step")

    at = np.arange(len(NETWORKS))
    for place, way in enumerate(PLANNED):
        mine = [row for row in rows if row["way"] == way]
        bars = axes.bar(
            at + 0.21 * (place - 1.5),
            [row["over_keep_all"] for row in mine],
            0.2,
            color=_COLOURS[way],
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=9, label_type="center", color="white")

        ticks = [row["promised"] for row in mine]
        label = "predicted by the plan's costs" if not place else None
        axes.plot(
            at + 0.21 * (place - 1.5),
            ticks,
            "_",
            color=RED,
            markersize=17,
            markeredgewidth=1.6,
            label=label,
        )

    axes.axhline(
        1.3, color=INK, linestyle=":", linewidth=1.2, label='the paper\'s "about 30 % slower"'
    )
    axes.set_xticks(at, [f"{name}, N = {MEASURED[name]}" for name in NETWORKS])


def main() -> None:
    """Traces, measures, prints, writes and draws."""
    parser = arguments(__doc__)
    parser.add_argument("--longest", type=int, default=128, help="largest network (default: 128)")
    options = parser.parse_args()

    if not options.redraw:
        torch.set_num_threads(1)
        rows = {name: list(grown(name, options.longest)) for name in NETWORKS}
        fitted = {
            "exponents": {name: exponents(rows[name]) for name in NETWORKS},
            "laws": {name: laws(rows[name]) for name in NETWORKS},
        }

        priced = [row for name in NETWORKS for row in paces(name)]
        write(
            "depth_growth",
            {"rows": [row for name in NETWORKS for row in rows[name]], **fitted, "paces": priced},
            seed=SEED,
        )

    record = read("depth_growth")
    picture(record)

    powers, found = record["exponents"], record["laws"]
    cells = [
        [way, *(f"{powers[name][way]:.2f}, {found[name][way]}" for name in NETWORKS)]
        for way in WAYS
    ]
    print(table(cells, ["memory grows as N to the power", *NETWORKS]))

    columns = ("promised", "over_keep_all", "over_plain")
    cells = [
        [f"{row['network']}, {row['way']}", *(f"{row[column]:.2f}" for column in columns)]
        for row in record["paces"]
    ]
    print(table(cells, ["step", "predicted", "over keeping everything", "over plain PyTorch"]))


if __name__ == "__main__":
    main()
