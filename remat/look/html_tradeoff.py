"""The HTML report's chart of memory against compute: the frontier, its bound, the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models.annotations import Label
from bokeh.models.axes import LinearAxis
from bokeh.models.ranges import Range1d
from bokeh.models.sources import ColumnDataSource
from bokeh.models.tools import HoverTool

from remat.core.solution import Solution
from remat.core.units import Scale, Units
from remat.look.html_style import FONT, add_legend, new_chart, quiet_axis
from remat.look.labels import bound_source, largest_infeasible
from remat.look.plot_style import BLUE, GREEN, GREY, RED


def tradeoff_chart(
    solutions: Sequence[Solution], chosen: Solution | None, *, keep_all_bytes: int, units: Units
) -> Any:
    """Returns overhead against memory: solutions, the proved bound, and the chosen plan."""
    solved = sorted((s for s in solutions if s.is_solved), key=lambda s: (s.peak_bytes, -s.cost_s))
    impossible = largest_infeasible(solutions)
    right = max([1, keep_all_bytes, *(s.budget_bytes for s in solved)])
    left = min([s.peak_bytes for s in solved] + ([impossible] if impossible else []) or [0])
    scale = Scale.for_largest(right, units.size)

    chart = new_chart(
        x_label=scale.label("memory of the whole step", units.size),
        y_label="extra compute (%)",
        height=360,
    )
    chart.min_border_left = 60

    lines: dict[str, list[Any]] = {}
    if solved:
        lines |= _draw_found(chart, solved, right, scale, units)

    if chosen is not None and chosen.is_solved:
        _mark_plan(chart, chosen, scale, units)

    overheads, factor = [s.overhead for s in solved], scale.factor
    if impossible:
        area = _draw_impossible(chart, impossible / factor, max(overheads, default=1.0))
        lines["proved: no schedule fits"] = [area]

    edge, top = [keep_all_bytes / factor] * 2, 108 * max([0.01, *overheads])
    line = chart.line(edge, [0, top], color=GREY, line_dash="dotted", line_width=2)
    lines[f"keeping everything: {units.size_text(keep_all_bytes)}"] = [line]

    add_legend(chart, lines)

    width = right - left
    chart.x_range = Range1d(
        start=(left - 0.05 * width) / factor, end=(right + 0.04 * width) / factor
    )
    _add_percent_axis(chart, 100 * factor / max(1, keep_all_bytes))
    return chart


def _draw_impossible(chart: Any, end: float, overhead: float) -> Any:
    """Returns the area of memory, up to `end`, in which no schedule fits."""
    return chart.harea([0, 0], [end] * 2, [0, 100 * overhead], color=RED, alpha=0.1)


def _add_percent_axis(chart: Any, percent: float) -> None:
    """Adds a percent axis above the chart; one unit of the axis below is `percent` on it."""
    below = chart.x_range
    chart.extra_x_ranges = {
        "percent": Range1d(start=percent * below.start, end=percent * below.end)
    }
    axis = LinearAxis(x_range_name="percent", axis_label="% of the peak of keeping everything")
    chart.add_layout(quiet_axis(axis), "above")


def _draw_found(
    chart: Any, solved: Sequence[Solution], right: int, scale: Scale, units: Units
) -> dict[str, list[Any]]:
    """Draws solutions, bound and the gap between them; returns the renderers by label."""
    peak = [s.peak_bytes for s in solved]
    overhead = np.minimum.accumulate([100 * s.overhead for s in solved])
    by_budget = sorted(solved, key=lambda s: s.budget_bytes)
    budget = [s.budget_bytes for s in by_budget]
    least = np.maximum.accumulate([100 * s.overhead_bound for s in by_budget][::-1])[::-1]

    found_x, found_y = np.array([*peak, right]) / scale.factor, [*overhead, overhead[-1]]
    found = chart.step(found_x, found_y, mode="after", color=BLUE, line_width=2.2)
    points = _draw_points(chart, solved, overhead, scale, units)

    proved_x, proved_y = np.array([min(peak), *budget]) / scale.factor, [least[0], *least]
    proved = chart.step(
        proved_x, proved_y, mode="before", color=GREEN, line_width=2, line_dash=[6, 3]
    )

    edges = np.unique([*peak, *budget, right])
    above = [overhead[np.searchsorted(peak, at, side="right") - 1] for at in edges[:-1]]
    # nothing is proved for memory above the largest budget
    below = [[*least, 0.0][np.searchsorted(budget, at)] for at in edges[1:]]
    left_x, right_x = edges[:-1] / scale.factor, edges[1:] / scale.factor
    gap = chart.quad(
        left=left_x, right=right_x, top=above, bottom=below, color=BLUE, alpha=0.1, line_color=None
    )
    gap.level = "underlay"

    return {
        "found": [found, points],
        f"{bound_source(solved)}: less is impossible": [proved],
        "gap: between found and bound": [gap],
    }


def _draw_points(
    chart: Any, solved: Sequence[Solution], overhead: Any, scale: Scale, units: Units
) -> Any:
    source = ColumnDataSource(
        {
            "x": np.array([s.peak_bytes for s in solved]) / scale.factor,
            "y": overhead,
            "bound": [100 * s.overhead_bound for s in solved],
            "size": [units.size_text(s.peak_bytes) for s in solved],
        }
    )

    points = chart.scatter("x", "y", source=source, size=8, color=BLUE, line_color="white")
    text = "<b>@size</b><br>@y{0.00} % more compute, at least @bound{0.00} %"
    chart.add_tools(HoverTool(renderers=[points], tooltips=text))
    return points


def _mark_plan(chart: Any, plan: Solution, scale: Scale, units: Units) -> None:
    x, y = plan.peak_bytes / scale.factor, 100 * plan.overhead
    chart.scatter([x], [y], size=17, marker="star", color=RED, line_color="white")
    text = f"this plan: {units.size_text(plan.peak_bytes)}, {y:.2f} % more compute"

    chart.add_layout(
        Label(
            x=x, y=y, text=text, text_font=FONT, text_font_size="13px", text_color=RED,
            x_offset=9, y_offset=7,
        )
    )  # fmt: skip
