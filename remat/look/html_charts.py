"""The interactive charts of the HTML report, made with Bokeh.

Trade-off, memory by category, schedule.

Each function returns a Bokeh model; `html_page` puts them into one page. Everything is drawn on
canvas by Bokeh's own script, so that 10,000 operators stay usable: zoom, pan, and what is under the
pointer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

try:
    from bokeh.core.property.vectorization import value as literal
    from bokeh.models.annotations import Label, Legend, LegendItem, Span
    from bokeh.models.axes import LinearAxis
    from bokeh.models.formatters import BasicTickFormatter
    from bokeh.models.ranges import Range1d
    from bokeh.models.sources import ColumnDataSource
    from bokeh.models.tickers import FixedTicker
    from bokeh.models.tools import HoverTool
    from bokeh.plotting import figure
except ModuleNotFoundError as missing:  # the extra is not installed
    raise ImportError(
        "the HTML report needs Bokeh; install it with: pip install 'remat[report]'"
    ) from missing

from remat.analysis.composition import Category, Composition
from remat.analysis.decisions import Decision
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.core.units import Scale, Units
from remat.look.labels import bound_source, shape_text, short_target
from remat.look.plot_schedule import is_first_time, module_groups
from remat.look.plot_style import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED

COLOUR_OF = {
    Category.PARAMETERS: "#56636f",
    Category.INPUTS: "#aab4be",
    Category.SAVED: BLUE,
    Category.RECOMPUTED: ORANGE,
    Category.TEMPORARY: "#a5c8ec",
    Category.PARAMETER_GRADIENTS: GREEN,
    Category.GRADIENTS: "#93d2ab",
    Category.WORKSPACE: "#7b4fa3",
}
_FONT = "system-ui, sans-serif"
_MAX_NAMES = 30  # module names that fit beside the schedule
_TOOLS = "pan,xwheel_zoom,box_zoom,reset,save"


def step_range(schedule: Schedule) -> Range1d:
    """Returns the steps of a schedule as a range that several charts share: they zoom together."""
    return Range1d(start=0, end=max(1, len(schedule.steps)), bounds="auto")


def memory_chart(
    parts: Composition, schedule: Schedule, steps: Range1d, *, budget_bytes: int | None
) -> Any:
    """Returns memory over the steps, stacked by category, with the budget, the peak and the end of
    the forward.
    """
    graph = parts.graph
    units, simulation = Units.of(graph), simulate(graph, schedule)
    top = max(1, simulation.peak_bytes, budget_bytes or 0)
    scale = Scale.for_largest(top, units.size)
    chart = _figure(
        x_label="step: one operator computed",
        y_label=labelled("memory", scale, units),
        height=390,
        x_range=steps,
    )
    chart.y_range = Range1d(start=0, end=1.25 * top / scale.factor)
    source = _memory_source(parts, schedule, scale)
    shown = [category for category in Category if category in source.data]
    _stack(chart, source, shown)
    line = chart.line("middle", "total", source=_step_source(parts, schedule, scale), line_alpha=0)
    chart.add_tools(
        HoverTool(
            renderers=[line],
            mode="vline",
            line_policy="nearest",
            tooltips=_memory_tooltips(shown, scale),
            attachment="horizontal",
        )
    )
    if budget_bytes is not None:
        _mark_height(
            chart, budget_bytes / scale.factor, f"budget {units.size_text(budget_bytes)}", RED
        )
    if simulation.peak_step >= 0:
        chart.scatter(
            [simulation.peak_step + 0.5],
            [simulation.peak_bytes / scale.factor],
            size=9,
            color=INK,
            line_color="white",
        )
        at_right = simulation.peak_step > 0.6 * len(schedule.steps)
        chart.add_layout(
            Label(
                x=simulation.peak_step + 0.5, y=simulation.peak_bytes / scale.factor,
                text=f"peak {units.size_text(simulation.peak_bytes)}",
                text_font=_FONT, text_font_size="13px", text_color=INK,
                x_offset=-8 if at_right else 8, y_offset=5,
                text_align="right" if at_right else "left", background_fill_color="white",
                background_fill_alpha=0.8,
            )
        )  # fmt: skip
    _mark_forward_end(chart, schedule)
    return chart


def schedule_chart(
    parts: Composition, schedule: Schedule, decisions: Sequence[Decision], steps: Range1d
) -> Any:
    """Returns the schedule as a picture: steps to the right, operators upwards.

    Computed, held, computed again.
    """
    graph = parts.graph
    height = int(np.clip(420 + 0.35 * graph.num_operators, 420, 760))
    chart = _figure(
        x_label="step: one operator computed",
        y_label="operator, in the order of the model",
        height=height,
        x_range=steps,
    )
    chart.y_range = Range1d(start=-1, end=graph.num_operators, bounds="auto")
    chart.xgrid.visible = chart.ygrid.visible = False
    _name_operators(chart, graph)
    bars: dict[str, Any] = {
        "y": "operator",
        "left": "left",
        "right": "right",
        "color": "colour",
        "alpha": "alpha",
    }
    held = chart.hbar(**bars, height=1.0, line_color=None, source=_held_source(parts, decisions))
    first, again = _computed_sources(graph, schedule)
    size = float(np.clip(2400 / max(1, len(schedule.steps)), 2.5, 7))
    computed = chart.scatter(
        "step", "operator", source=first, size=size, marker="square", color=INK, line_color=None
    )
    recomputed = chart.scatter(
        "step",
        "operator",
        source=again,
        size=size + 1.5,
        marker="square",
        color=RED,
        line_color=None,
    )
    chart.add_tools(HoverTool(renderers=[held], tooltips=_HELD_TIPS, attachment="horizontal"))
    chart.add_tools(
        HoverTool(
            renderers=[computed, recomputed], tooltips=_COMPUTED_TIPS, attachment="horizontal"
        )
    )
    _schedule_legend(
        chart,
        {"computed": computed, f"computed again ({len(again.data['step']):,})": recomputed},
        parts,
    )
    _mark_forward_end(chart, schedule)
    return chart


def tradeoff_chart(
    solutions: Sequence[Solution], chosen: Solution | None, *, keep_all_bytes: int, units: Units
) -> Any:
    """Returns what each size of memory costs in extra compute, the least that it must cost, and the
    chosen point.
    """
    solved = sorted((s for s in solutions if s.is_solved), key=lambda s: (s.peak_bytes, -s.cost_s))
    right = max([1, keep_all_bytes, *(s.budget_bytes for s in solved)])
    scale = Scale.for_largest(right, units.size)
    chart = _figure(
        x_label=labelled("memory of the whole step", scale, units),
        y_label="extra compute (%)",
        height=360,
    )
    chart.min_border_left = 60
    lines: dict[str, Any] = {}
    if solved:
        lines |= _frontier(chart, solved, right, scale, units)
    if chosen is not None and chosen.is_solved:
        _mark_plan(chart, chosen, scale, units)
    impossible = max(
        (s.budget_bytes for s in solutions if s.status is Status.INFEASIBLE), default=0
    )
    left = min([s.peak_bytes for s in solved] + ([impossible] if impossible else []) or [0])
    if impossible:
        lines["proved: no schedule fits"] = chart.harea(
            [0, 0],
            [impossible / scale.factor] * 2,
            [0, 100 * max((s.overhead for s in solved), default=1.0)],
            color=RED,
            alpha=0.1,
        )
    top = 108 * max([0.01, *(s.overhead for s in solved)])
    lines[f"keeping everything: {units.size_text(keep_all_bytes)}"] = chart.line(
        [keep_all_bytes / scale.factor] * 2, [0, top], color=GREY, line_dash="dotted", line_width=2
    )
    chart.x_range = Range1d(
        start=(left - 0.05 * (right - left)) / scale.factor,
        end=(right + 0.04 * (right - left)) / scale.factor,
    )
    percent = 100 * scale.factor / max(1, keep_all_bytes)
    chart.extra_x_ranges = {
        "percent": Range1d(start=percent * chart.x_range.start, end=percent * chart.x_range.end)
    }
    chart.add_layout(
        _quiet_axis(
            LinearAxis(x_range_name="percent", axis_label="% of what keeping everything needs")
        ),
        "above",
    )
    _legend_below(chart, lines)
    return chart


_HELD_TIPS = (
    """<b>@name</b> @shape<br>@module @target<br>@size, steps @left to @last<br>@fate: @reason"""
)
_COMPUTED_TIPS = """step @at: <b>@target</b> @again<br>@module<br>@line"""


def _figure(*, x_label: str, y_label: str, height: int, **options: Any) -> Any:
    chart = figure(
        height=height,
        sizing_mode="stretch_width",
        tools=_TOOLS,
        toolbar_location="above",
        active_drag="box_zoom",
        outline_line_color=None,
        **options,
    )
    chart.toolbar.logo = None
    for axis, text in ((chart.xaxis, x_label), (chart.yaxis, y_label)):
        axis.axis_label = text
        _quiet_axis(axis)
    chart.xgrid.grid_line_color = None
    chart.ygrid.grid_line_color = PALE
    # the same for both charts over steps, so that these stand above each other
    chart.min_border_left, chart.min_border_right = 140, 24
    return chart


def _quiet_axis(axis: Any) -> Any:
    axis.axis_label_text_font_style, axis.axis_label_text_font, axis.axis_label_text_color = (
        "normal",
        _FONT,
        INK,
    )
    axis.major_label_text_font, axis.major_label_text_color, axis.major_label_text_font_size = (
        _FONT,
        INK,
        "12px",
    )
    axis.axis_line_color = axis.major_tick_line_color = GREY
    axis.minor_tick_line_color = None
    axis.formatter = BasicTickFormatter(use_scientific=False)
    return axis


def labelled(text: str, scale: Scale, units: Units) -> str:
    """Returns `text` with its unit; an instance has units of its own."""
    return (
        f"{text} ({scale.name})"
        if units.size
        else f"{text} ({scale.name} units)".replace("( ", "(")
    )


def _memory_source(parts: Composition, schedule: Schedule, scale: Scale) -> Any:
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


def _stack(chart: Any, source: Any, shown: Sequence[Category]) -> None:
    items = []
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
        items.append((str(category), [area]))
    _add_legend(chart, items)


_LEGEND: dict[str, Any] = {
    "border_line_color": None,
    "label_text_font": _FONT, "label_text_font_size": "12px", "label_text_color": INK,
    "background_fill_alpha": 0,
    "spacing": 16, "padding": 4,
}  # fmt: skip


def _add_legend(chart: Any, items: list[Any]) -> None:
    chart.add_layout(
        Legend(items=items, orientation="horizontal", location="bottom_left", ncols=4, **_LEGEND),
        "below",
    )


def _step_source(parts: Composition, schedule: Schedule, scale: Scale) -> Any:
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


def _memory_tooltips(shown: Sequence[Category], scale: Scale) -> str:
    lines = "".join(
        f'<tr><td style="color:{COLOUR_OF[c]}">&#9632;</td><td>{c}</td>'
        f'<td style="text-align:right">@{{{c}}}{{0,0.0}} {scale.name}</td></tr>'
        for c in reversed(shown)
    )
    return (
        f"step @at, compute so far @time<br><b>@target</b> @module <i>@again</i><table>{lines}"
        '<tr><td></td><td><b>total</b></td><td style="text-align:right">'
        f"<b>@total{{{{0,0.0}}}} {scale.name}</b></td></tr></table>"
    )


def _mark_height(chart: Any, y: float, text: str, colour: str) -> None:
    chart.add_layout(
        Span(location=y, dimension="width", line_color=colour, line_dash="dashed", line_width=1.5)
    )
    chart.add_layout(
        Label(
            x=6,
            x_units="screen",
            y=y,
            text=text,
            text_font=_FONT,
            text_font_size="13px",
            text_color=colour,
            y_offset=3,
        )
    )


def _mark_forward_end(chart: Any, schedule: Schedule) -> None:
    if not 0 < schedule.num_forward_steps < len(schedule.steps):
        return
    chart.add_layout(
        Span(
            location=schedule.num_forward_steps,
            dimension="height",
            line_color=INK,
            line_dash="dotted",
        )
    )
    chart.add_layout(
        Label(
            x=schedule.num_forward_steps, y=chart.y_range.end, text="backward begins",
            text_font=_FONT, text_font_size="12px",
            text_color=INK, text_baseline="top", x_offset=5, y_offset=-3,
        )
    )  # fmt: skip


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
    return ColumnDataSource(
        {
            "operator": graph.arrays.producer[value].astype(np.int32),
            "left": parts.first[chosen].astype(np.int32),
            "right": np.minimum(parts.last[chosen] + 1, end).astype(np.int32),
            "last": np.minimum(parts.last[chosen], end - 1).astype(np.int32),
            "colour": [COLOUR_OF[order[place]] for place in parts.category[chosen]],
            "alpha": (0.3 + 0.65 * np.sqrt(size[chosen] / max(1, size.max(initial=1)))).astype(
                np.float32
            ),
            "name": [graph.values[v].name for v in value],
            "shape": [shape_text(graph.values[v].dtype, graph.values[v].shape) for v in value],
            "module": [op.module for op in operators],
            "target": [short_target(op.target) for op in operators],
            "size": [units.size_text(graph.values[v].size_bytes) for v in value],
            "fate": [str(decision_of[int(v)].fate) for v in value],
            "reason": [decision_of[int(v)].reason for v in value],
        }
    )


def _computed_sources(graph: Graph, schedule: Schedule) -> tuple[Any, Any]:
    is_first = is_first_time(schedule.array)

    def source(steps: Any, note: str) -> Any:
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

    return source(np.flatnonzero(is_first), ""), source(np.flatnonzero(~is_first), "computed again")


def _name_operators(chart: Any, graph: Graph) -> None:
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
            chart.add_layout(
                Span(location=stop - 0.5, dimension="width", line_color=PALE, level="underlay")
            )
    if 0 < graph.num_forward < graph.num_operators:
        chart.add_layout(
            Span(
                location=graph.num_forward - 0.5,
                dimension="width",
                line_color=GREY,
                level="underlay",
            )
        )


def _schedule_legend(chart: Any, points: dict[str, Any], parts: Composition) -> None:
    items = [
        LegendItem(label=literal(text), renderers=[renderer]) for text, renderer in points.items()
    ]
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
            items.append(LegendItem(label=literal(f"held: {category}"), renderers=[patch]))
    _add_legend(chart, items)


def _frontier(
    chart: Any, solved: Sequence[Solution], right: int, scale: Scale, units: Units
) -> dict[str, Any]:
    peak = [s.peak_bytes for s in solved]
    overhead = np.minimum.accumulate([100 * s.overhead for s in solved])
    by_budget = sorted(solved, key=lambda s: s.budget_bytes)
    budget = [s.budget_bytes for s in by_budget]
    least = np.maximum.accumulate([100 * s.overhead_bound for s in by_budget][::-1])[::-1]
    found_x, found_y = np.array([*peak, right]) / scale.factor, [*overhead, overhead[-1]]
    proved_x, proved_y = np.array([min(peak), *budget]) / scale.factor, [least[0], *least]
    found = chart.step(found_x, found_y, mode="after", color=BLUE, line_width=2.2)
    source = ColumnDataSource(
        {
            "x": np.array(peak) / scale.factor,
            "y": overhead,
            "bound": [100 * s.overhead_bound for s in solved],
            "size": [units.size_text(size) for size in peak],
        }
    )
    points = chart.scatter("x", "y", source=source, size=8, color=BLUE, line_color="white")
    chart.add_tools(
        HoverTool(
            renderers=[points],
            tooltips="<b>@size</b><br>@y{0.00} % more compute, at least @bound{0.00} %",
        )
    )
    proved = chart.step(
        proved_x, proved_y, mode="before", color=GREEN, line_width=2, line_dash=[6, 3]
    )
    edges = np.unique([*peak, *budget, right])
    above = [overhead[np.searchsorted(peak, at, side="right") - 1] for at in edges[:-1]]
    # nothing is proved beyond the last budget
    below = [[*least, 0.0][np.searchsorted(budget, at)] for at in edges[1:]]
    gap = chart.quad(
        left=edges[:-1] / scale.factor,
        right=edges[1:] / scale.factor,
        top=above,
        bottom=below,
        color=BLUE,
        alpha=0.1,
        line_color=None,
    )
    gap.level = "underlay"
    return {
        "found": [found, points],
        f"{bound_source(solved)}: less is impossible": proved,
        "not known: between found and proved": gap,
    }


def _mark_plan(chart: Any, plan: Solution, scale: Scale, units: Units) -> None:
    x, y = plan.peak_bytes / scale.factor, 100 * plan.overhead
    chart.scatter([x], [y], size=17, marker="star", color=RED, line_color="white")
    text = f"this plan: {units.size_text(plan.peak_bytes)}, {y:.2f} % more"
    chart.add_layout(
        Label(
            x=x,
            y=y,
            text=text,
            text_font=_FONT,
            text_font_size="13px",
            text_color=RED,
            x_offset=9,
            y_offset=7,
        )
    )


def _legend_below(chart: Any, lines: dict[str, Any]) -> None:
    items = [
        LegendItem(label=literal(text), renderers=lines_ if isinstance(lines_, list) else [lines_])
        for text, lines_ in lines.items()
    ]
    _add_legend(chart, items)
