"""The common parts of the HTML report's charts: colours, axes, legends, marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bokeh.core.property.vectorization import value as literal
from bokeh.models.annotations import Label, Legend, LegendItem, Span
from bokeh.models.formatters import BasicTickFormatter
from bokeh.models.ranges import Range1d
from bokeh.plotting import figure

from remat.analysis.composition import Category
from remat.core.schedule import Schedule
from remat.look.plot_style import BLUE, GREEN, GREY, INK, ORANGE, PALE

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
FONT = "system-ui, sans-serif"
_TOOLS = "pan,xwheel_zoom,box_zoom,reset,save"
_LEGEND: dict[str, Any] = {
    "border_line_color": None,
    "label_text_font": FONT, "label_text_font_size": "12px", "label_text_color": INK,
    "background_fill_alpha": 0,
    "spacing": 16, "padding": 4,
}  # fmt: skip


def step_range(schedule: Schedule) -> Range1d:
    """Returns the steps of a schedule as a range; charts that share it zoom together."""
    return Range1d(start=0, end=max(1, len(schedule.steps)), bounds="auto")


def new_chart(*, x_label: str, y_label: str, height: int, **options: Any) -> Any:
    """Returns an empty chart in the report's style."""
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
        quiet_axis(axis)

    chart.xgrid.grid_line_color = None
    chart.ygrid.grid_line_color = PALE

    # the same in the two charts over steps, so that their steps are aligned
    chart.min_border_left, chart.min_border_right = 140, 24
    return chart


def quiet_axis(axis: Any) -> Any:
    """Gives an axis the report's fonts and colours, and returns it."""
    axis.axis_label_text_font_style, axis.axis_label_text_font = "normal", FONT
    axis.major_label_text_font, axis.major_label_text_font_size = FONT, "12px"
    axis.axis_label_text_color = axis.major_label_text_color = INK
    axis.axis_line_color = axis.major_tick_line_color = GREY
    axis.minor_tick_line_color = None
    axis.formatter = BasicTickFormatter(use_scientific=False)
    return axis


def add_legend(chart: Any, renderers_of: Mapping[str, list[Any]]) -> None:
    """Adds a legend below the chart, with one item per label."""
    items = [
        LegendItem(label=literal(label), renderers=drawn) for label, drawn in renderers_of.items()
    ]
    legend = Legend(
        items=items, orientation="horizontal", location="bottom_left", ncols=4, **_LEGEND
    )
    chart.add_layout(legend, "below")


def mark_height(chart: Any, y: float, text: str, colour: str) -> None:
    """Draws a dashed line at the height `y`, and writes `text` above it."""
    chart.add_layout(
        Span(location=y, dimension="width", line_color=colour, line_dash="dashed", line_width=1.5)
    )

    chart.add_layout(
        Label(
            x=6, x_units="screen", y=y, text=text,
            text_font=FONT, text_font_size="13px", text_color=colour, y_offset=3,
        )
    )  # fmt: skip


def mark_forward_end(chart: Any, schedule: Schedule) -> None:
    """Draws a dotted line between forward and backward, if the schedule has both."""
    if not 0 < schedule.num_forward_steps < len(schedule.steps):
        return

    end = schedule.num_forward_steps
    chart.add_layout(Span(location=end, dimension="height", line_color=INK, line_dash="dotted"))
    chart.add_layout(
        Label(
            x=end, y=chart.y_range.end, text="backward begins",
            text_font=FONT, text_font_size="12px",
            text_color=INK, text_baseline="top", x_offset=5, y_offset=-3,
        )
    )  # fmt: skip
