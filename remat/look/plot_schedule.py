"""A picture of a schedule: the operator of each step, and the values in memory."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from remat.core.graph import Graph
from remat.core.limits import shortened
from remat.core.schedule import Schedule, lifetimes, simulate
from remat.core.units import Scale, Units
from remat.look.plot_style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PALE,
    RED,
    label_line,
    mark_forward_end,
    new_figure,
    quiet,
    scale_axis,
)

_HELD = LinearSegmentedColormap.from_list("held", ["#eaf0f7", "#8fb3dc"])
_MAX_GROUPS = 26  # module names that fit beside the axis
_LEAST_NAMED = 1 / 45  # share of all operators; the names of smaller modules would overlap


def plot_schedule(
    graph: Graph, schedule: Schedule, *, budget_bytes: int | None = None, title: str = ""
) -> Figure:
    """Returns the picture of a schedule: x is the step, y the operator.

    First computations rise along the diagonal; recomputations are below it, in another colour. The
    bar to the right of a computation shows how long its value is in memory, darker for larger
    values. The panel above shows the memory at every step.
    """
    height = 5.5 + 2.5 * min(1.0, graph.num_operators / 400)
    figure = new_figure(title, width=10, height=height)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3.2))

    _draw_memory(above, graph, schedule, budget_bytes)
    _draw_held(below, graph, schedule)
    _draw_computed(below, graph, schedule)
    _name_operators(below, graph)

    below.set_xlim(0, max(1, len(schedule.steps)))
    below.set_ylim(-0.5, max(1, graph.num_operators) - 0.5)

    mark_forward_end(above, schedule.num_forward_steps, INK)
    below.axvline(schedule.num_forward_steps, color=INK, linewidth=1.0, linestyle=(0, (2, 2)))
    return figure


def _draw_memory(axes: Axes, graph: Graph, schedule: Schedule, budget_bytes: int | None) -> None:
    units, simulation = Units.of(graph), simulate(graph, schedule)
    top = max(1, simulation.peak_bytes, budget_bytes or 0)
    scale = Scale.for_largest(top, units.size)

    edges = np.arange(len(schedule.steps) + 1)
    axes.stairs(simulation.bytes_at, edges, fill=True, color=BLUE, alpha=0.25)
    axes.stairs(simulation.bytes_at, edges, baseline=None, color=BLUE, linewidth=1.0)
    axes.plot(simulation.peak_step + 0.5, simulation.peak_bytes, "o", color=BLUE, markersize=4)

    quiet(axes, y_label=scale.label("memory", units.size))
    axes.set_ylim(0, 1.25 * top)
    scale_axis(axes, "y", scale)

    if budget_bytes is not None:
        label_line(
            axes,
            budget_bytes,
            f"budget {units.size_text(budget_bytes)}, peak "
            f"{units.size_text(simulation.peak_bytes)}",
            RED,
        )


def _draw_held(axes: Axes, graph: Graph, schedule: Schedule) -> None:
    value, first, last = lifetimes(graph, schedule.array)
    size = graph.arrays.size_bytes[value]
    is_held = (last > first) & (size > 0)

    row, left, right = (
        graph.arrays.producer[value][is_held] - 0.5,
        first[is_held],
        last[is_held] + 1,
    )
    corners = np.stack(
        [
            np.stack([x, y], 1)
            for x, y in ((left, row), (right, row), (right, row + 1), (left, row + 1))
        ],
        1,
    )

    shade = np.sqrt(size[is_held] / max(1, size.max(initial=1)))
    axes.add_collection(
        PolyCollection(
            list(corners),
            facecolors=_HELD(shade),
            edgecolors="none",
            zorder=1,
            rasterized=True,
            snap=False,
        )
    )


def _draw_computed(axes: Axes, graph: Graph, schedule: Schedule) -> None:
    steps = schedule.array
    is_first = is_first_time(steps)
    # in points squared; about the size of one cell
    area = float(np.clip(90_000 / max(1, len(steps)) / max(1, graph.num_operators) * 4, 3, 60))

    step = np.arange(len(steps)) + 0.5
    # recomputations are rarer, and drawn larger
    for is_drawn, colour, factor in ((is_first, BLUE, 1.0), (~is_first, ORANGE, 1.8)):
        axes.scatter(
            step[is_drawn],
            steps[is_drawn],
            s=factor * area,
            marker="s",
            color=colour,
            linewidths=0,
            zorder=3,
        )

    num_again = int(np.sum(~is_first))
    extra = (
        100 * float(graph.arrays.cost_s[steps[~is_first]].sum()) / graph.cost_s
        if graph.cost_s
        else 0.0
    )

    _add_legend(
        axes,
        f"computed ({len(steps) - num_again:,})",
        f"computed again ({num_again:,}: {extra:.1f} % more compute)",
    )


def _add_legend(axes: Axes, first: str, again: str) -> None:
    handles = [
        Line2D([], [], marker="s", linestyle="", color=BLUE, markersize=6, label=first),
        Line2D([], [], marker="s", linestyle="", color=ORANGE, markersize=6, label=again),
        Patch(facecolor=_HELD(0.75), label="held in memory (darker: larger)"),
    ]

    axes.legend(
        handles=handles,
        loc="upper left",
        fontsize=9,
        frameon=True,
        facecolor="white",
        edgecolor="none",
        framealpha=0.9,
    )


def is_first_time(steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns for each step whether it is the first computation of its operator."""
    is_first = np.zeros(len(steps), np.bool_)
    is_first[np.unique(steps, return_index=True)[1]] = True
    return is_first


def _name_operators(axes: Axes, graph: Graph) -> None:
    quiet(axes, x_label="step", y_label="operator, in the order of the model", grid="")
    if 0 < graph.num_forward < graph.num_operators:
        axes.axhline(graph.num_forward - 0.5, color=GREY, linewidth=0.7)
        for text, offset in (("backward", 4), ("forward", -11)):
            axes.annotate(
                text, (0, graph.num_forward - 0.5), xycoords=("axes fraction", "data"),
                xytext=(5, offset),
                textcoords="offset points", fontsize=8.5, color=GREY,
            )  # fmt: skip

    groups = module_groups(graph)
    if not 2 <= len(groups) <= _MAX_GROUPS:
        return

    for _, _, stop in groups:
        axes.axhline(stop - 0.5, color=PALE, linewidth=0.6, zorder=0)

    named = [group for group in groups if group[2] - group[1] > graph.num_operators * _LEAST_NAMED]
    axes.set_yticks(
        [(start + stop - 1) / 2 for _, start, stop in named],
        [shortened(name) for name, _, _ in named],
        parse_math=False,
    )
    axes.tick_params(axis="y", length=0, labelsize=8)


def module_groups(graph: Graph) -> list[tuple[str, int, int]]:
    """Returns (block, first operator, end) of each run of forward operators of one block.

    A block is a module's path up to its first number, as in `model.layers.3`, or the outermost
    module if the path has no number.
    """
    groups: list[tuple[str, int, int]] = []
    for index, op in enumerate(graph.operators[: graph.num_forward]):
        parts = op.module.split(".")
        depth = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
        name = ".".join(parts[: depth + 1])

        if groups and (groups[-1][0] == name or not name):
            groups[-1] = (groups[-1][0], groups[-1][1], index + 1)
        elif name:
            groups.append((name, index, index + 1))

    return groups
