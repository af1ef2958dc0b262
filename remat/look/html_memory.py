"""The chart of memory over steps in the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models.annotations import Label
from bokeh.models.ranges import Range1d
from bokeh.models.sources import ColumnDataSource
from bokeh.models.tools import HoverTool

from remat.analysis.composition import Category, Composition
from remat.core.schedule import Schedule, Simulation, simulate
from remat.core.units import Scale, Units
from remat.look.html_style import (
    COLOUR_OF,
    FONT,
    add_legend,
    mark_forward_end,
    mark_height,
    new_chart,
)
from remat.look.labels import short_target
from remat.look.plot_schedule import is_first_time
from remat.look.plot_style import INK, RED


def memory_chart(
    parts: Composition, schedule: Schedule, steps: Range1d, *, budget_bytes: int | None
) -> Any:
    """Returns memory over the steps, stacked by category.

    Marks the budget, the peak and the end of the forward.
    """
    units, simulation = Units.of(parts.graph), simulate(parts.graph, schedule)
    top = max(1, simulation.peak_bytes, budget_bytes or 0)
    scale = Scale.for_largest(top, units.size)
    chart = new_chart(
        x_label="step: one operator computed",
        y_label=scale.label("memory", units.size),
        height=390,
        x_range=steps,
    )
    chart.y_range = Range1d(start=0, end=1.25 * top / scale.factor)

    source = _stacked_source(parts, schedule, scale)
    shown = [category for category in Category if category in source.data]
    _draw_stack(chart, source, shown)
    _add_tooltips(chart, _step_source(parts, schedule, scale), shown, scale)

    if budget_bytes is not None:
        text = f"budget {units.size_text(budget_bytes)}"
        mark_height(chart, budget_bytes / scale.factor, text, RED)
    if simulation.peak_step >= 0:
        _mark_peak(chart, simulation, scale, units)
    mark_forward_end(chart, schedule)
    return chart


def _stacked_source(parts: Composition, schedule: Schedule, scale: Scale) -> Any:
    """Returns the upper and lower edge of each category that takes memory."""
    edges = np.arange(len(schedule.steps) + 1)
    heights = np.cumsum(parts.bytes_of, axis=0) / scale.factor

    data: dict[str, Any] = {"edge": edges.astype(np.int32)}
    lower = np.zeros(len(edges), np.float32)

    for place, category in enumerate(Category):
        upper = np.append(heights[place], heights[place][-1:]).astype(np.float32)
        if parts.bytes_of[place].any():
            data[category], data[f"{category} below"] = upper, lower
        lower = upper

    return ColumnDataSource(data)


def _draw_stack(chart: Any, source: Any, shown: Sequence[Category]) -> None:
    areas = {}
    for category in shown:
        area = chart.varea_step(
            x="edge",
            y1=f"{category} below",
            y2=str(category),
            source=source,
            step_mode="after",
            color=COLOUR_OF[category],
            alpha=0.85,
        )
        areas[str(category)] = [area]

    add_legend(chart, areas)


def _step_source(parts: Composition, schedule: Schedule, scale: Scale) -> Any:
    """Returns what the tooltip of each step shows."""
    graph, steps = parts.graph, schedule.array
    operators, units, is_first = graph.operators, Units.of(graph), is_first_time(steps)
    ends_s = np.cumsum(graph.arrays.cost_s[steps])

    data: dict[str, Any] = {
        "middle": (np.arange(len(steps)) + 0.5).astype(np.float32),
        "at": np.arange(len(steps), dtype=np.int32),
        "total": (parts.bytes_of.sum(0) / scale.factor).astype(np.float32),
        "target": [short_target(operators[i].target) or operators[i].name for i in schedule.steps],
        "module": [operators[i].module for i in schedule.steps],
        "again": ["" if first else "computed again" for first in is_first],
        "time": [units.cost_text(float(end)) for end in ends_s],
    }

    for place, category in enumerate(Category):
        data[category] = (parts.bytes_of[place] / scale.factor).astype(np.float32)

    return ColumnDataSource(data)


def _add_tooltips(chart: Any, source: Any, shown: Sequence[Category], scale: Scale) -> None:
    lines = "".join(
        f'<tr><td style="color:{COLOUR_OF[c]}">&#9632;</td><td>{c}</td>'
        f'<td style="text-align:right">@{{{c}}}{{0,0.0}} {scale.name}</td></tr>'
        for c in reversed(shown)
    )

    text = (
        f"step @at, compute so far @time<br><b>@target</b> @module <i>@again</i><table>{lines}"
        '<tr><td></td><td><b>total</b></td><td style="text-align:right">'
        f"<b>@total{{{{0,0.0}}}} {scale.name}</b></td></tr></table>"
    )

    line = chart.line("middle", "total", source=source, line_alpha=0)
    chart.add_tools(
        HoverTool(
            renderers=[line],
            mode="vline",
            line_policy="nearest",
            tooltips=text,
            attachment="horizontal",
        )
    )


def _mark_peak(chart: Any, simulation: Simulation, scale: Scale, units: Units) -> None:
    x, y = simulation.peak_step + 0.5, simulation.peak_bytes / scale.factor
    chart.scatter([x], [y], size=9, color=INK, line_color="white")
    at_right = simulation.peak_step > 0.6 * len(simulation.bytes_at)

    chart.add_layout(
        Label(
            x=x, y=y, text=f"peak {units.size_text(simulation.peak_bytes)}",
            text_font=FONT, text_font_size="13px", text_color=INK,
            x_offset=-8 if at_right else 8, y_offset=5,
            text_align="right" if at_right else "left", background_fill_color="white",
            background_fill_alpha=0.8,
        )
    )  # fmt: skip
