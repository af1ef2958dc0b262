"""Draws memory over time, and memory against compute; saves any picture.

Each function returns a new `matplotlib.figure.Figure` and changes no global state; `save` writes it
as PNG, SVG or PDF.

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
from remat.core.solution import Solution
from remat.core.units import Scale, Units
from remat.look.labels import bound_source, largest_infeasible
from remat.look.plot_schedule import plot_schedule
from remat.look.plot_style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LINES,
    PALE,
    RED,
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
    """Memory over one training step, simulated or measured.

    Attributes:
        label: its name in the legend.
        edges: where each interval begins, and where the last ends, in units of cost; (n + 1,).
        size_bytes: memory during each interval; (n,).
        forward_end: where the forward pass ends, if known.
        resident_bytes: the bytes of parameters, buffers and inputs.
    """

    label: str
    edges: NDArray[np.float64]
    size_bytes: NDArray[np.int64]
    forward_end: float | None = None
    resident_bytes: int = 0

    @classmethod
    def of_schedule(cls, label: str, graph: Graph, schedule: Schedule) -> Timeline:
        """Returns the simulated memory of a schedule over cost, or over steps if all cost 0."""
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
        """The largest memory of the step."""
        return int(self.size_bytes.max(initial=self.resident_bytes))


def plot_memory(
    timelines: Sequence[Timeline],
    *,
    budget_bytes: int | None = None,
    units: Units | None = None,
    x_label: str = "compute",
    title: str = "",
) -> Figure:
    """Returns a picture of the memory of steps over time, with their peaks and the budget.

    Args:
        timelines: drawn in this order; the last one is filled.
        budget_bytes: drawn as a line, if given.
        units: of sizes and costs; bytes and seconds if not given.
        x_label: the label of the x axis, without a unit.
        title: text above the picture.
    """
    units = units or Units()
    figure = new_figure(title)
    axes = figure.subplots()

    top = max([1, budget_bytes or 0, *(t.peak_bytes for t in timelines)])
    end = max((float(t.edges[-1]) for t in timelines), default=0.0) or 1.0
    y_scale, x_scale = Scale.for_largest(top, units.size), Scale.for_largest(end, units.cost)

    quiet(
        axes,
        x_label=x_scale.label(x_label, units.cost),
        y_label=y_scale.label("memory", units.size),
    )

    _draw_timelines(axes, timelines, units)
    _draw_resident(axes, max((t.resident_bytes for t in timelines), default=0), top)
    if budget_bytes is not None:
        label_line(axes, budget_bytes, f"budget {units.size_text(budget_bytes)}", RED)

    axes.set_xlim(0, end)
    axes.set_ylim(0, 1.18 * top)
    scale_axis(axes, "x", x_scale)
    scale_axis(axes, "y", y_scale)

    legend(figure, axes)
    return figure


def _draw_timelines(axes: Axes, timelines: Sequence[Timeline], units: Units) -> None:
    """Draws all timelines, and where the forward of the last one ends that says so."""
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


def _timeline_colours(count: int) -> Sequence[str]:
    """Returns one colour per timeline; grey for the first of several, the baseline."""
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
    """Returns overhead against memory: the solutions found, and the lower bound.

    A solution is valid for every budget from its peak upwards, and its bound for every budget up to
    the one it was proved for. So both are drawn as steps.

    Args:
        solutions: of one graph, for several budgets. The largest budget that was proved infeasible
            is marked.
        keep_all_bytes: the peak of keeping everything, marked if given.
        others: solutions of other methods by name, drawn as points.
        units: of sizes; bytes if not given.
        title: above the picture.
    """
    units = units or Units()
    solved = sorted((s for s in solutions if s.is_solved), key=lambda s: (s.peak_bytes, -s.cost_s))
    figure = new_figure(title)
    axes = figure.subplots()

    of_others = [s for group in (others or {}).values() for s in group if s.is_solved]
    known = [s.peak_bytes for s in (*solved, *of_others)]
    right = max([1, *known, *(s.budget_bytes for s in solved), keep_all_bytes or 0])
    scale = Scale.for_largest(right, units.size)

    memory, extra = "memory of the whole step", "extra compute over keeping everything (%)"
    quiet(axes, x_label=scale.label(memory, units.size), y_label=extra, grid="both")

    if solved:
        _draw_frontier(axes, solved, right)
    _draw_others(axes, others or {})

    impossible = largest_infeasible(solutions)
    left = min([*known, impossible] if impossible else known, default=0)
    axes.set_xlim(left - 0.06 * (right - left), right + 0.03 * (right - left))
    axes.set_ylim(bottom=-0.04 * axes.get_ylim()[1])

    if impossible:
        _draw_impossible(axes, impossible)
    if keep_all_bytes:
        _mark_keep_all(axes, keep_all_bytes, units)

    scale_axis(axes, "x", scale)
    legend(figure, axes)
    return figure


def _draw_impossible(axes: Axes, end_bytes: int) -> None:
    label = "proved: no schedule fits"
    axes.axvspan(0, end_bytes, facecolor=RED, alpha=0.1, linewidth=0, label=label)


def _draw_others(axes: Axes, others: Mapping[str, Sequence[Solution]]) -> None:
    for (name, group), colour in zip(others.items(), LINES[1:] * 3, strict=False):
        points = [s for s in group if s.is_solved]
        peaks, overheads = [s.peak_bytes for s in points], [100 * s.overhead for s in points]
        axes.plot(peaks, overheads, "D", color=colour, markersize=5, label=name)


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
    percent.set_xlabel("% of the peak of keeping everything", fontsize=9, color=GREY)
    percent.tick_params(colors=GREY, length=3, labelsize=8)
    percent.spines["top"].set_color(GREY)


def _draw_frontier(axes: Axes, solved: Sequence[Solution], right: int) -> None:
    peak, overhead = (
        [s.peak_bytes for s in solved],
        np.minimum.accumulate([100 * s.overhead for s in solved]),
    )

    budget, least = _bounds_by_budget(solved)
    edges = np.unique([*peak, *budget, right])
    found = [overhead[np.searchsorted(peak, at, side="right") - 1] for at in edges[:-1]]
    # nothing is proved for memory above the largest budget
    proved = [[*least, 0.0][np.searchsorted(budget, at)] for at in edges[1:]]

    axes.stairs(
        found,
        edges,
        baseline=proved,
        fill=True,
        color=BLUE,
        alpha=0.12,
        linewidth=0,
        label="gap: between found and bound",
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


def _bounds_by_budget(solved: Sequence[Solution]) -> tuple[list[int], list[float]]:
    """Returns the budgets in order, and the overhead in percent that is proved up to each."""
    by_budget = sorted(solved, key=lambda s: s.budget_bytes)
    budget = [s.budget_bytes for s in by_budget]
    least = [
        100 * (s.lower_bound_s / s.keep_all_cost_s - 1) if s.keep_all_cost_s else 0.0
        for s in by_budget
    ]
    return budget, list(np.maximum.accumulate(least[::-1])[::-1])


def draw(graph: Graph, solutions: Sequence[tuple[str, Solution]], picture: str, path: Path) -> None:
    """Draws and saves the picture that `remat plot` was called for.

    Args:
        graph: the graph of the solutions.
        solutions: pairs of label and solution. `memory` draws all of them and keeping everything;
            `schedule` draws the first one that is solved, or keeping everything if none is.
        picture: `memory`, `schedule` or `tradeoff`.
        path: where to save it.
    """
    units, keep_all = Units.of(graph), Schedule.keep_all(graph)
    solved = [(label, s) for label, s in solutions if s.schedule is not None]

    if picture == "tradeoff":
        figure = plot_tradeoff(
            [s for _, s in solutions],
            keep_all_bytes=simulate(graph, keep_all).peak_bytes,
            units=units,
            title="What memory costs in compute",
        )
    elif picture == "schedule":
        label, plan = solved[0] if solved else ("keep everything", None)
        schedule = plan.schedule if plan and plan.schedule else keep_all
        budget = plan.budget_bytes if plan else None

        figure = plot_schedule(graph, schedule, budget_bytes=budget, title=f"Schedule: {label}")
    else:
        lines = [("keep everything", keep_all)] + [
            (label, s.schedule) for label, s in solved if s.schedule is not None
        ]
        timelines = [Timeline.of_schedule(label, graph, schedule) for label, schedule in lines]

        figure = plot_memory(
            timelines,
            budget_bytes=min((s.budget_bytes for _, s in solved), default=None),
            units=units,
            title="Memory over one training step",
        )

    save(figure, path)


def save(figure: Figure, path: str | Path) -> None:
    """Writes a figure in the format of the suffix of `path` (`.png`, `.svg`, `.pdf`)."""
    content = BytesIO()
    figure.savefig(content, format=Path(path).suffix.lower().removeprefix("."))
    write_whole(path, content.getvalue())
