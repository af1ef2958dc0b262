"""Memory of a ResNet and an LSTM against depth and unrolled steps (Chen et al., 2016, arXiv:1604.06174, figures 5 and 6).

    python -m experiments.depth_growth [--longest N]

The paper's allocations, and ours, for a training step without what is held anyway (parameters, buffers, inputs) and without
the gradients of parameters that the step returns, which grow with depth whatever is done:

- *no optimization*: every value has memory of its own for the whole step;
- *in place*: elementwise operators write over inputs that die with them;
- *sharing*: and memory is given back after the last read: keeping everything as PyTorch does it;
- *drop cheap*: batch norm, activations and pooling are computed again (the paper's section 4.2);
- *sublinear*: the square root heuristic of the paper;
- *ours, least*: the smallest peak that `remat.minimum` finds.

Growth is fitted as memory = c N^p, p from the larger half of the depths. The paper's claim for sublinear plans is p = 1/2 at the
price of one more forward pass ("about 30 % slower"): the step of one network is measured here with that plan and without.
A logarithm shows as a p that falls with depth. Measured: 1.30 times the step that keeps everything (1.33 by its costs), p = 0.44 on the
ResNet. Not reproduced: the paper's sublinear LSTM. Two states cross every cut of a written-out LSTM, and neither the square root heuristic
of single cuts nor its linearized form finds a schedule leaner than keeping everything (p = 0.86); the paper cuts between cells by hand.
Writes `results/depth_growth.json` and `.png`.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import remat
from experiments.figures import draw, leanest, legend_below, table, write
from experiments.static_memory import LSTM
from remat.arena import Blocks
from remat.graph import Graph
from remat.plot_style import BLUE, GREEN, GREY, INK, ORANGE, RED, new_figure, quiet
from remat.schedule import Schedule, simulate
from remat.solution import Solution
from remat.solvers import make_solver
from remat.solvers.minimum import minimum

SEED = 0
MEASURED = {"ResNet": 16, "LSTM": 64}  # the size that is run for real
PAIRS = 9


class Residual(nn.Module):
    """Two convolutions with batch norm and a skip, of 16 channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the block's output; shape (batch, channels, height, width)."""
        inner = functional.relu(self.norms[0](self.convolutions[0](x)))
        return functional.relu(self.norms[1](self.convolutions[1](inner)) + x)


class ResNet(nn.Module):
    """A chain of residual blocks at one resolution (He et al., 2015, for CIFAR, without its two halvings)."""

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
    """A number of blocks, 8 images of 32 x 32."""
    return ResNet(num_blocks), (torch.randn(8, 3, 32, 32),)


def lstm(num_steps: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A number of steps, 16 sequences of width 128."""
    return LSTM(128), (torch.randn(num_steps, 16, 128),)


NETWORKS: dict[str, Callable[[int], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {"ResNet": resnet, "LSTM": lstm}
SIZES = {"ResNet": (4, 8, 16, 32, 64), "LSTM": (16, 32, 64, 128, 256)}
WAYS = ("no optimization", "in place", "sharing", "drop cheap", "sublinear", "ours, least")


def sublinear(graph: Graph) -> Solution:
    """Returns the leaner of the square root heuristic and its linearized form: an LSTM has no single value to cut at."""
    answers = [leanest(method, graph) for method in ("chen-sqrt", "linear-sqrt")]
    return min((answer for answer in answers if answer.is_solved), key=lambda answer: answer.peak_bytes)


def peaks(graph: Graph) -> dict[str, dict[str, float]]:
    """Returns bytes and extra compute of each way of running a step."""
    keep_all = Schedule.keep_all(graph)
    held = graph.resident_bytes
    apart, merged = Blocks.of(graph, keep_all, in_place=False), Blocks.of(graph, keep_all)
    returned = int(graph.arrays.size_bytes[graph.arrays.output].sum())
    least = minimum(graph)
    ours = Schedule.from_steps(graph, least.steps)
    rows = {
        "no optimization": (int(apart.size_bytes.sum()), 0.0),
        "in place": (int(merged.size_bytes.sum()), 0.0),
        "sharing": (simulate(graph, keep_all).peak_bytes - held, 0.0),
        "ours, least": (least.peak_bytes - held, simulate(graph, ours).cost_s / graph.cost_s - 1),
    }
    for way, solution in (("drop cheap", leanest("recompute-cheap", graph)), ("sublinear", sublinear(graph))):
        rows[way] = (solution.peak_bytes - held, solution.overhead)
    return {way: {"bytes": rows[way][0] - returned, "overhead": rows[way][1]} for way in WAYS}


def grown(name: str, longest: int) -> Iterator[dict[str, Any]]:
    """Yields the bytes of each way by size of the network."""
    for size in (size for size in SIZES[name] if size <= longest):
        torch.manual_seed(SEED)
        model, args = NETWORKS[name](size)
        graph = remat.trace(model, args)
        row = {"network": name, "size": size, "operators": graph.num_operators, "ways": peaks(graph)}
        print(row, flush=True)
        yield row


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the power of the size that each way's memory grows with, from the larger half of the sizes."""
    large = rows[len(rows) // 2 :]
    x = np.log([row["size"] for row in large])
    return {way: float(np.polyfit(x, np.log([row["ways"][way]["bytes"] for row in large]), 1)[0]) for way in WAYS}


def pace(name: str) -> dict[str, Any]:
    """Returns the measured step time of the sublinear plan over keeping everything, in our executor and in plain PyTorch."""
    torch.manual_seed(SEED)
    plain, args = NETWORKS[name](MEASURED[name])
    graph = remat.trace(plain, args, costs="profile")
    solution = sublinear(graph)
    all_kept = make_solver("keep-all").solve(graph, budget_bytes=simulate(graph, Schedule.keep_all(graph)).peak_bytes)
    planned, kept = (remat.wrap(copy.deepcopy(plain), plan, costs="profile") for plan in (solution, all_kept))
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
    return {
        "network": name,
        "size": MEASURED[name],
        "promised": 1 + solution.overhead,
        "over_keep_all": statistics.median(a / b for a, b, _ in times),
        "over_plain": statistics.median(a / c for a, _, c in times),
    }


def picture(rows: dict[str, list[dict[str, Any]]], powers: dict[str, dict[str, float]]) -> None:
    """Draws memory against size on logarithmic axes."""
    figure = new_figure("Memory against depth: allocations of Chen et al. (2016), and the least found", width=12, height=5.4)
    panels = figure.subplots(1, 2)
    labels = {"ResNet": "residual blocks N", "LSTM": "unrolled steps N"}
    for axes, name in zip(panels, NETWORKS, strict=True):
        quiet(axes, x_label=labels[name], y_label="activations, gradients on the way, workspace (MiB)", grid="both")
        axes.set_title(name, fontsize=10.5, loc="left")
        sizes = [row["size"] for row in rows[name]]
        for way, colour in zip(WAYS, (GREY, INK, ORANGE, "#7b4fa3", GREEN, BLUE), strict=True):
            y = [row["ways"][way]["bytes"] / 2**20 for row in rows[name]]
            axes.loglog(sizes, y, "o-", color=colour, markersize=5, label=way)
            text, at = f"N^{powers[name][way]:.2f}", (sizes[-1], y[-1])
            axes.annotate(text, at, xytext=(6, -3), textcoords="offset points", fontsize=8, color=colour)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlim(right=sizes[-1] * 1.6)
        root = rows[name][-1]["ways"]["sublinear"]["bytes"] / 2**20
        axes.plot(sizes, [root * math.sqrt(size / sizes[-1]) for size in sizes], ":", color=RED, label="slope of the square root")
    legend_below(figure, list(panels), columns=4)
    draw("depth_growth", figure)


def main() -> None:
    """Traces, measures, prints, writes and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=64, help="largest network (default: 64)")
    longest = parser.parse_args().longest
    torch.set_num_threads(1)
    rows = {name: list(grown(name, longest)) for name in NETWORKS}
    powers = {name: exponents(rows[name]) for name in NETWORKS}
    paces = [pace(name) for name in NETWORKS]
    write("depth_growth", {"rows": [row for name in NETWORKS for row in rows[name]], "exponents": powers, "paces": paces}, seed=SEED)
    picture(rows, powers)
    print(table([[way, *(f"{powers[name][way]:.2f}" for name in NETWORKS)] for way in WAYS], ["memory grows as N to the power", *NETWORKS]))
    cells = [[p["network"], *(f"{p[key]:.2f}" for key in ("promised", "over_keep_all", "over_plain"))] for p in paces]
    print(table(cells, ["step of the sublinear plan", "promised", "over keeping everything", "over plain PyTorch"]))


if __name__ == "__main__":
    main()
