"""The chart of the schedule in the HTML report: operators computed, held and recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models.annotations import Span
from bokeh.models.ranges import Range1d
from bokeh.models.sources import ColumnDataSource
from bokeh.models.tickers import FixedTicker
from bokeh.models.tools import HoverTool

from remat.analysis.composition import Category, Composition
from remat.analysis.decisions import Decision
from remat.core.graph import Graph
from remat.core.schedule import Schedule
from remat.core.units import Units
from remat.look.html_style import COLOUR_OF, add_legend, mark_forward_end, new_chart
from remat.look.labels import shape_text, short_target
from remat.look.plot_schedule import is_first_time, module_groups
from remat.look.plot_style import GREY, INK, PALE, RED

_MAX_NAMES = 30  # module names that fit beside the schedule
_HELD_TIPS = (
    """<b>@name</b> @shape<br>@module @target<br>@size, steps @left to @last<br>@fate: @reason"""
)
_COMPUTED_TIPS = """step @at: <b>@target</b> @again<br>@module<br>@line"""


def schedule_chart(
    parts: Composition, schedule: Schedule, decisions: Sequence[Decision], steps: Range1d
) -> Any:
    """Returns the schedule as a chart: x is the step, y the operator.

    Squares are computations, bars are values held in memory.
    """
    graph = parts.graph
    height = int(np.clip(420 + 0.35 * graph.num_operators, 420, 760))
    chart = new_chart(
        x_label="step: one operator computed",
        y_label="operator, in the order of the model",
        height=height,
        x_range=steps,
    )
    chart.y_range = Range1d(start=-1, end=graph.num_operators, bounds="auto")
    chart.xgrid.visible = chart.ygrid.visible = False

    _name_operators(chart, graph)
    _draw_held(chart, parts, decisions)
    points = _draw_computed(chart, graph, schedule)

    add_legend(chart, points | _held_patches(chart, parts))
    mark_forward_end(chart, schedule)
    return chart


def _draw_held(chart: Any, parts: Composition, decisions: Sequence[Decision]) -> None:
    held = chart.hbar(
        y="operator",
        left="left",
        right="right",
        color="colour",
        alpha="alpha",
        height=1.0,
        line_color=None,
        source=_held_source(parts, decisions),
    )

    chart.add_tools(HoverTool(renderers=[held], tooltips=_HELD_TIPS, attachment="horizontal"))


def _draw_computed(chart: Any, graph: Graph, schedule: Schedule) -> dict[str, list[Any]]:
    """Draws a square per step and returns the renderers with their labels."""
    is_first = is_first_time(schedule.array)
    first = _computed_source(graph, schedule, np.flatnonzero(is_first), "")
    again = _computed_source(graph, schedule, np.flatnonzero(~is_first), "computed again")
    size = float(np.clip(2400 / max(1, len(schedule.steps)), 2.5, 7))
    shape: dict[str, Any] = {"marker": "square", "line_color": None}

    computed = chart.scatter("step", "operator", source=first, size=size, color=INK, **shape)
    recomputed = chart.scatter(
        "step", "operator", source=again, size=size + 1.5, color=RED, **shape
    )

    chart.add_tools(
        HoverTool(
            renderers=[computed, recomputed], tooltips=_COMPUTED_TIPS, attachment="horizontal"
        )
    )
    num_again = int((~is_first).sum())
    return {"computed": [computed], f"computed again ({num_again:,})": [recomputed]}


def _held_source(parts: Composition, decisions: Sequence[Decision]) -> Any:
    graph, units = parts.graph, Units.of(parts.graph)
    decision_of = {d.value: d for d in decisions}

    size = graph.arrays.size_bytes[parts.value]
    is_held = (parts.last > parts.first) & (size > 0)
    chosen = np.flatnonzero(is_held)

    value = parts.value[chosen]
    order = list(Category)
    operators = [graph.operators[graph.producer[v]] for v in value]
    end = len(parts.bytes_of[0])
    alpha = 0.3 + 0.65 * np.sqrt(size[chosen] / max(1, size.max(initial=1)))

    return ColumnDataSource(
        {
            "operator": graph.arrays.producer[value].astype(np.int32),
            "left": parts.first[chosen].astype(np.int32),
            "right": np.minimum(parts.last[chosen] + 1, end).astype(np.int32),
            "last": np.minimum(parts.last[chosen], end - 1).astype(np.int32),
            "colour": [COLOUR_OF[order[place]] for place in parts.category[chosen]],
            "alpha": alpha.astype(np.float32),
            "name": [graph.values[v].name for v in value],
            "shape": [shape_text(graph.values[v].dtype, graph.values[v].shape) for v in value],
            "module": [op.module for op in operators],
            "target": [short_target(op.target) for op in operators],
            "size": [units.size_text(graph.values[v].size_bytes) for v in value],
            "fate": [str(decision_of[int(v)].fate) for v in value],
            "reason": [decision_of[int(v)].reason for v in value],
        }
    )


def _computed_source(graph: Graph, schedule: Schedule, steps: Any, note: str) -> Any:
    operators = [graph.operators[schedule.steps[step]] for step in steps]
    return ColumnDataSource(
        {
            "step": (steps + 0.5).astype(np.float32),
            "at": steps.astype(np.int32),
            "operator": schedule.array[steps].astype(np.int32),
            "target": [short_target(op.target) or op.name for op in operators],
            "module": [op.module for op in operators],
            "line": [op.source for op in operators],
            "again": [note] * len(operators),
        }
    )


def _name_operators(chart: Any, graph: Graph) -> None:
    """Writes the modules beside the operators, and draws lines between them."""
    groups = module_groups(graph)
    if 2 <= len(groups) <= _MAX_NAMES:
        name_of = {
            (start + stop - 1) / 2: name
            for name, start, stop in groups
            if stop - start > graph.num_operators / 60
        }

        chart.yaxis.ticker = FixedTicker(ticks=list(name_of))
        chart.yaxis.major_label_overrides = {
            middle: ".".join(name.split(".")[-2:]) for middle, name in name_of.items()
        }
        chart.yaxis.major_tick_line_color = None

        for _, _, stop in groups:
            _draw_line(chart, stop - 0.5, PALE)

    if 0 < graph.num_forward < graph.num_operators:
        _draw_line(chart, graph.num_forward - 0.5, GREY)


def _draw_line(chart: Any, y: float, colour: str) -> None:
    chart.add_layout(Span(location=y, dimension="width", line_color=colour, level="underlay"))


def _held_patches(chart: Any, parts: Composition) -> dict[str, list[Any]]:
    """Returns one patch of colour per category of values, by the category's legend label."""
    patches = {}
    present = {int(place) for place in np.unique(parts.category[parts.last > parts.first])}

    for place, category in enumerate(Category):
        if place in present:
            patch = chart.hbar(
                y=[-10],
                left=[-1],
                right=[-1],
                height=1,
                color=COLOUR_OF[category],
                line_color=None,
                alpha=0.85,
            )
            patches[f"held: {category}"] = [patch]

    return patches
