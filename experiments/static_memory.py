"""Static memory planning.

The values of a training step placed in one arena, and what in-place and sharing save.

    python -m experiments.static_memory [--time-limit S] [--redraw]

For an MLP, ResNet-50, an LSTM written out over 32 steps and GPT-2 small, each with everything kept
and at 60 % of that:

- *own memory*: each value has memory of its own for the whole step.
- *in place alone*: an elementwise operator writes over an input that nothing reads later.
- *shared alone*: memory is taken when a value is computed and given back after its last read
  (liveness counting).
- *both*: what the simulator counts and the executor does. The bytes live at once are a lower bound
  on every arena.
- *placed*: three arenas, relative to that lower bound: from an allocator that puts each new value
  into the best-fitting hole; from greedy by size (Pisarchyk and Lee, 2020, arXiv:2001.03288); and
  from our search over orders (`remat.analysis.arena.search`).

Parameters, buffers and inputs are held anyway and not counted. Writes `results/static_memory.json`
and `.png`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

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
from experiments.models import GPT, resnet50
from remat.analysis.arena import Blocks, greedy_by_size, in_time_order, search
from remat.core.budget import format_bytes
from remat.core.graph import Graph
from remat.core.schedule import Schedule
from remat.look.plot_style import BLUE, GREEN, GREY, LINES, ORANGE, new_figure, quiet

SEED = 0
BUDGET = "60%"


class LSTM(nn.Module):
    """A long short-term memory written out.

    One cell runs for a number of steps; the loss is the mean square of the last state.
    """

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.Linear(2 * width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss; `x` is (steps, batch, width)."""
        hidden = cell = x.new_zeros(x.shape[1], self.width)
        for moment in x.unbind(0):
            into, keep, new, out = self.gates(torch.cat([moment, hidden], 1)).chunk(4, 1)
            cell = torch.sigmoid(keep) * cell + torch.sigmoid(into) * torch.tanh(new)
            hidden = torch.sigmoid(out) * torch.tanh(cell)
        return hidden.square().mean()


class MLP(nn.Module):
    """Linear layers with ReLU and dropout; the loss is a cross-entropy."""

    def __init__(self, num_layers: int = 12, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy."""
        for layer in self.layers:
            x = functional.dropout(functional.relu(layer(x)), 0.1)
        return functional.cross_entropy(x, labels)


def mlp_graph() -> Graph:
    """Twelve layers of width 512, 1,024 examples."""
    return remat.trace(
        MLP(), kwargs={"x": torch.randn(1024, 512), "labels": torch.zeros(1024, dtype=torch.long)}
    )


def lstm_graph() -> Graph:
    """Width 256, 32 steps, 64 sequences."""
    return remat.trace(LSTM(), (torch.randn(32, 64, 256),))


def resnet_graph() -> Graph:
    """ResNet-50, 16 images of 96 x 96."""
    workload = resnet50()
    return remat.trace(workload.model, kwargs=dict(workload.kwargs))


def gpt_graph() -> Graph:
    """GPT-2 small's shapes, 8 x 512 tokens, on fake tensors."""
    with fake_tensors():
        model = GPT(num_layers=12, width=768, num_heads=12, vocabulary=50257)
        ids = torch.zeros(8, 512, dtype=torch.long)
    return remat.trace(model.train(), kwargs={"ids": ids})


GRAPHS: dict[str, Callable[[], Graph]] = {
    "MLP": mlp_graph,
    "ResNet-50": resnet_graph,
    "LSTM, 32 steps": lstm_graph,
    "GPT-2": gpt_graph,
}


def planned(graph: Graph, schedule: Schedule, time_limit_s: float) -> dict[str, Any]:
    """Returns the bytes of each way of laying out a schedule's values."""
    blocks = Blocks.of(graph, schedule)
    arenas = {
        "best fit, as values come": in_time_order(blocks),
        "greedy by size": greedy_by_size(blocks),
        "our search": search(blocks, time_limit_s=time_limit_s, seed=SEED),
    }

    apart = Blocks.of(graph, schedule, in_place=False)
    return {
        "blocks": len(blocks.first),
        "own memory": int(apart.size_bytes.sum()),
        "in place": int(blocks.size_bytes.sum()),
        "shared": apart.live_bytes,
        "both": blocks.live_bytes,
        "arenas": {name: blocks.arena_bytes(offset) for name, offset in arenas.items()},
    }


_KINDS = {
    "in place": ("in place alone", GREY),
    "shared": ("shared alone: freed after the last read", ORANGE),
    "both": ("both", BLUE),
}


def picture(record: Mapping[str, Any]) -> None:
    """Draws the savings and, beside them, the fragmentation; one row per schedule."""
    rows = record["rows"]
    figure = new_figure(
        "One training step's values in memory: what sharing and working in place save",
        width=12,
        height=7.2,
    )

    left, right = figure.subplots(1, 2, sharey=True)
    at = np.arange(len(rows))

    quiet(left, x_label="memory (% of own memory for each value)", grid="x")
    titled(left, "what is held at once")
    for place, (kind, (label, colour)) in enumerate(_KINDS.items()):
        bars = left.barh(
            at + 0.27 * (place - 1),
            [100 * row[kind] / row["own memory"] for row in rows],
            0.25,
            color=colour,
            label=label,
        )
        left.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)

    quiet(right, x_label="arena over the lower bound, the most held at once (%)", grid="x")
    titled(right, "fragmentation: an arena with a place for every value")
    for place, (kind, colour) in enumerate(
        zip(rows[0]["arenas"], (LINES[3], GREEN, LINES[5]), strict=True)
    ):
        heights = [100 * (row["arenas"][kind] / row["both"] - 1) for row in rows]
        bars = right.barh(
            at + 0.27 * (place - 1), heights, 0.25, color=colour, label=f"arena: {kind}"
        )
        right.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)

    left.set_yticks(at, [f"{row['model']}\n{row['schedule']}" for row in rows], fontsize=8.5)
    left.set_xlim(right=109)
    left.invert_yaxis()

    legend_below(figure, [left, right])
    draw("static_memory", figure)


def rows_of(name: str, time_limit_s: float) -> Iterator[dict[str, Any]]:
    """Yields a row with everything kept, and one for the plan."""
    torch.manual_seed(SEED)
    graph = GRAPHS[name]()
    solution = remat.solve(graph, BUDGET, time_limit_s=time_limit_s)
    assert solution.schedule is not None

    for label, schedule in (
        ("everything kept", Schedule.keep_all(graph)),
        (f"at {BUDGET}", solution.schedule),
    ):
        yield {
            "model": name,
            "schedule": label,
            "operators": graph.num_operators,
            **planned(graph, schedule, time_limit_s),
        }


def main() -> None:
    """Traces, plans, prints, writes and draws."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--time-limit",
        type=float,
        default=10.0,
        help="seconds for each search and solve (default: 10)",
    )
    options = parser.parse_args()

    if not options.redraw:
        found = [row for name in GRAPHS for row in rows_of(name, options.time_limit)]
        write("static_memory", {"time_limit_s": options.time_limit, "rows": found}, seed=SEED)

    record = read("static_memory")
    picture(record)

    rows = record["rows"]
    cells = [
        [
            f"{row['model']}, {row['schedule']}",
            *(format_bytes(row[kind]) for kind in ("own memory", *_KINDS)),
            *(f"{100 * (size / row['both'] - 1):.2f} %" for size in row["arenas"].values()),
        ]
        for row in rows
    ]

    print(
        table(
            cells,
            ["", "own memory", *_KINDS, *(f"over the bound: {kind}" for kind in rows[0]["arenas"])],
        )
    )


if __name__ == "__main__":
    main()
