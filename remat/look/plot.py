"""Pictures: memory over time, a schedule, and the trade-off of memory against compute.

Each function returns a `matplotlib.figure.Figure` of its own and touches no global state; `save`
writes it as PNG, SVG or PDF.

>>> from remat.core.graph import Graph
>>> from remat.core.schedule import Schedule
>>> graph = Graph.from_arrays([1, 1, 2], [8, 8, 4], [(0, 1), (1, 2)], first_backward=2)
>>> timeline = Timeline.of_schedule("keep everything", graph, Schedule.keep_all(graph))
>>> figure = plot_memory([timeline], units=Units.of(graph))
>>> figure.axes[0].get_xlabel()
'compute (units)'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from remat.core.files import write_whole
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.core.units import Scale, Units
from remat.look.labels import bound_source
from remat.look.plot_schedule import plot_schedule
from remat.look.plot_style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LINES,
    PALE,
    RED,
    axis_label,
    label_line,
    legend,
    mark_forward_end,
    new_figure,
    quiet,
    scale_axis,
)

__all__ = [
    "PLOT_SUFFIXES",
    "Timeline",
    "draw",
    "plot_memory",
    "plot_schedule",
    "plot_tradeoff",
    "save",
]

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Memory over one training step: what a schedule promises, or what was measured.

    Attributes:
        label: what the legend says.
        edges: where each piece begins, and where the last ends, in units of cost; (n + 1,).
        size_bytes: memory during each piece; (n,).
        forward_end: where the forward pass ends, if known.
        resident_bytes: what parameters, buffers and inputs hold all the time.
    """

    label: str
    edges: NDArray[np.float64]
    size_bytes: NDArray[np.int64]
    forward_end: float | None = None
    resident_bytes: int = 0

    @classmethod
    def of_schedule(cls, label: str, graph: Graph, schedule: Schedule) -> Timeline:
        """Returns the simulated memory of a schedule over its computing time, or over steps where
        computing is free.
        """
        edges = np.zeros(len(schedule.steps) + 1)
        np.cumsum(
            graph.arrays.cost_s[schedule.array] if graph.cost_s else np.ones(len(schedule.steps)),
            out=edges[1:],
        )
        bytes_at = simulate(graph, schedule).bytes_at
        return cls(
            label, edges, bytes_at, float(edges[schedule.num_forward_steps]), graph.resident_bytes
        )

    @property
    def peak_bytes(self) -> int:
        """Returns the largest memory of the step."""
        return int(self.size_bytes.max(initial=self.resident_bytes))


def plot_memory(
    timelines: Sequence[Timeline],
    *,
    budget_bytes: int | None = None,
    units: Units | None = None,
    x_label: str = "compute",
    title: str = "",
) -> Figure:
    """Returns memory over time of one or several steps, with their peaks and the budget.

    Args:
        timelines: drawn in this order; the last one is filled.
        budget_bytes: drawn as a line, where given.
        units: of sizes and costs; bytes and seconds where not given.
        x_label: what the x axis counts.
        title: above the picture.
    """
    units = units or Units()
    figure = new_figure(title)
    axes = figure.subplots()
    top = max([1, budget_bytes or 0, *(t.peak_bytes for t in timelines)])
    end = max((float(t.edges[-1]) for t in timelines), default=0.0) or 1.0
    y_scale, x_scale = Scale.for_largest(top, units.size), Scale.for_largest(end, units.cost)
    quiet(
        axes,
        x_label=axis_label(x_label, x_scale, units.cost),
        y_label=axis_label("memory", y_scale, units.size),
    )
    colours = _timeline_colours(len(timelines))
    for index, (timeline, colour) in enumerate(zip(timelines, colours, strict=True)):
        _draw_timeline(axes, timeline, colour, units, is_last=index == len(timelines) - 1)
    ends = [
        (t.forward_end, colour)
        for t, colour in zip(timelines, colours, strict=True)
        if t.forward_end is not None
    ]
    if ends:
        mark_forward_end(axes, *ends[-1])
    _draw_resident(axes, max((t.resident_bytes for t in timelines), default=0), top)
    if budget_bytes is not None:
        label_line(axes, budget_bytes, f"budget {units.size_text(budget_bytes)}", RED)
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1.18 * top)
    scale_axis(axes, "x", x_scale)
    scale_axis(axes, "y", y_scale)
    legend(figure, axes)
    return figure


def _timeline_colours(count: int) -> Sequence[str]:
    """Grey for the first of several, which the others are compared with."""
    others = [LINES[i % len(LINES)] for i in range(count)]
    return [GREY, *others[:-1]] if count > 1 else others


def _draw_timeline(
    axes: Axes, timeline: Timeline, colour: str, units: Units, *, is_last: bool
) -> None:
    label = f"{timeline.label}: peak {units.size_text(timeline.peak_bytes)}"
    if is_last:
        axes.stairs(timeline.size_bytes, timeline.edges, fill=True, color=colour, alpha=0.18)
    axes.stairs(
        timeline.size_bytes, timeline.edges, baseline=None, color=colour, linewidth=1.4, label=label
    )
    if len(timeline.size_bytes):
        peak = int(np.argmax(timeline.size_bytes))
        axes.plot(
            (timeline.edges[peak] + timeline.edges[peak + 1]) / 2,
            timeline.size_bytes[peak],
            "o",
            color=colour,
            markersize=5,
        )


def _draw_resident(axes: Axes, resident_bytes: int, top: int) -> None:
    if not resident_bytes:
        return
    text = "parameters, buffers, inputs"
    has_room = resident_bytes > 0.05 * top
    axes.axhspan(
        0,
        resident_bytes,
        facecolor=PALE,
        edgecolor="none",
        zorder=0.5,
        label=None if has_room else text,
    )
    if has_room:
        axes.annotate(
            text, (0, resident_bytes), xycoords=("axes fraction", "data"), xytext=(5, -11),
            textcoords="offset points", fontsize=8, color=INK,
        )  # fmt: skip


def plot_tradeoff(
    solutions: Sequence[Solution],
    *,
    keep_all_bytes: int | None = None,
    others: Mapping[str, Sequence[Solution]] | None = None,
    units: Units | None = None,
    title: str = "",
) -> Figure:
    """Returns what each size of memory costs in extra compute, and the least that it must cost.

    A solution holds for every budget from its peak up, and its bound for every budget up to the
    one it was proved for: both are drawn as the steps they are.

    Args:
        solutions: of one graph, for several budgets; those without a schedule are left out.
        keep_all_bytes: the peak of keeping everything, marked where given.
        others: further methods by name, drawn as points.
        units: of sizes; bytes where not given.
        title: above the picture.
    """
    units = units or Units()
    solved = sorted((s for s in solutions if s.is_solved), key=lambda s: (s.peak_bytes, -s.cost_s))
    figure = new_figure(title)
    axes = figure.subplots()
    known = [s.peak_bytes for s in solved] + [
        s.peak_bytes for group in (others or {}).values() for s in group if s.is_solved
    ]
    right = max([1, *known, *(s.budget_bytes for s in solved), keep_all_bytes or 0])
    scale = Scale.for_largest(right, units.size)
    quiet(
        axes,
        x_label=axis_label("memory of the whole step", scale, units.size),
        y_label="extra compute over keeping everything (%)",
        grid="both",
    )
    if solved:
        _draw_frontier(axes, solved, right)
    for (name, group), colour in zip((others or {}).items(), LINES[1:] * 3, strict=False):
        points = [s for s in group if s.is_solved]
        axes.plot(
            [s.peak_bytes for s in points],
            [100 * s.overhead for s in points],
            "D",
            color=colour,
            markersize=5,
            label=name,
        )
    impossible = max(
        (s.budget_bytes for s in solutions if s.status is Status.INFEASIBLE), default=0
    )
    left = min([*known, impossible] if impossible else known, default=0)
    axes.set_xlim(left - 0.06 * (right - left), right + 0.03 * (right - left))
    axes.set_ylim(bottom=-0.04 * axes.get_ylim()[1])
    if impossible:
        axes.axvspan(
            0, impossible, facecolor=RED, alpha=0.1, linewidth=0, label="proved: no schedule fits"
        )
    if keep_all_bytes:
        _mark_keep_all(axes, keep_all_bytes, units)
    scale_axis(axes, "x", scale)
    legend(figure, axes)
    return figure


def _mark_keep_all(axes: Axes, keep_all_bytes: int, units: Units) -> None:
    axes.axvline(
        keep_all_bytes,
        color=GREY,
        linewidth=1.2,
        linestyle=(0, (1, 2)),
        label=f"keep everything: {units.size_text(keep_all_bytes)}",
    )

    def to_percent(size: ArrayLike) -> ArrayLike:
        return 100 * np.asarray(size) / keep_all_bytes

    def from_percent(percent: ArrayLike) -> ArrayLike:
        return np.asarray(percent) * keep_all_bytes / 100

    percent = axes.secondary_xaxis("top", functions=(to_percent, from_percent))
    percent.set_xlabel("% of what keeping everything needs", fontsize=9, color=GREY)
    percent.tick_params(colors=GREY, length=3, labelsize=8)
    percent.spines["top"].set_color(GREY)


def _draw_frontier(axes: Axes, solved: Sequence[Solution], right: int) -> None:
    peak, overhead = (
        [s.peak_bytes for s in solved],
        np.minimum.accumulate([100 * s.overhead for s in solved]),
    )
    by_budget = sorted(solved, key=lambda s: s.budget_bytes)
    budget = [s.budget_bytes for s in by_budget]
    least = [
        100 * (s.lower_bound_s / s.keep_all_cost_s - 1) if s.keep_all_cost_s else 0.0
        for s in by_budget
    ]
    least = list(np.maximum.accumulate(least[::-1])[::-1])
    edges = np.unique([*peak, *budget, right])
    found = [overhead[np.searchsorted(peak, at, side="right") - 1] for at in edges[:-1]]
    # nothing is proved beyond the last budget
    proved = [[*least, 0.0][np.searchsorted(budget, at)] for at in edges[1:]]
    axes.stairs(
        found,
        edges,
        baseline=proved,
        fill=True,
        color=BLUE,
        alpha=0.12,
        linewidth=0,
        label="gap: between found and proved",
    )
    axes.step([*peak, right], [*overhead, overhead[-1]], where="post", color=BLUE, linewidth=1.6)
    axes.plot(peak, overhead, "o-", color=BLUE, markersize=5, linewidth=0, label="found")
    axes.step(
        [min(peak), *budget],
        [least[0], *least],
        where="pre",
        color=GREEN,
        linewidth=1.4,
        linestyle=(0, (4, 2)),
        label=f"{bound_source(solved)}: less is impossible",
    )


def draw(graph: Graph, solutions: Sequence[tuple[str, Solution]], picture: str, path: Path) -> None:
    """Draws what `remat plot` was asked for: `memory`, `schedule` or `tradeoff`, and saves it.

    Args:
        graph: the graph that the solutions are of.
        solutions: with a label each; without any, keeping everything is drawn.
        picture: which of the three.
        path: where to save it.
    """
    units, keep_all = Units.of(graph), Schedule.keep_all(graph)
    solved = [(label, s) for label, s in solutions if s.schedule is not None]
    if picture == "tradeoff":
        peak = simulate(graph, keep_all).peak_bytes
        save(
            plot_tradeoff(
                [s for _, s in solutions],
                keep_all_bytes=peak,
                units=units,
                title="What memory costs in compute",
            ),
            path,
        )
    elif picture == "schedule":
        label, plan = solved[0] if solved else ("keep everything", None)
        schedule = plan.schedule if plan and plan.schedule else keep_all
        save(
            plot_schedule(
                graph,
                schedule,
                budget_bytes=plan.budget_bytes if plan else None,
                title=f"Schedule: {label}",
            ),
            path,
        )
    else:
        lines = [("keep everything", keep_all)] + [
            (label, s.schedule) for label, s in solved if s.schedule is not None
        ]
        budget = min((s.budget_bytes for _, s in solved), default=None)
        timelines = [Timeline.of_schedule(label, graph, schedule) for label, schedule in lines]
        save(
            plot_memory(
                timelines, budget_bytes=budget, units=units, title="Memory over one training step"
            ),
            path,
        )


def save(figure: Figure, path: str | Path) -> None:
    """Writes a figure; the suffix of `path` says the format (`.png`, `.svg`, `.pdf`)."""
    content = BytesIO()
    figure.savefig(content, format=Path(path).suffix.lower().removeprefix("."))
    write_whole(path, content.getvalue())
