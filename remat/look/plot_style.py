"""The common style of the pictures: colours, axes, legends."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from remat.core.units import Scale

INK, GREY, PALE = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, RED, GREEN = "#1f5fa8", "#e8762c", "#c2263f", "#2f855a"
LINES = (BLUE, ORANGE, GREEN, "#7b4fa3", "#a0522d", "#0f8b8d")  # of lines, in this order


def new_figure(title: str, *, width: float = 9.0, height: float = 4.8) -> Figure:
    """Returns an empty figure with its title at the left."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(width, height), dpi=150, layout=layout, facecolor="white")
    if title:
        figure.suptitle(
            title, x=0.015, ha="left", fontsize=12.5, fontweight="bold", color=INK, parse_math=False
        )
    return figure


def quiet(axes: Axes, *, x_label: str = "", y_label: str = "", grid: str = "y") -> None:
    """Gives axes the common style (two spines, short ticks, a pale grid) and their labels."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=INK, length=3, labelsize=9)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color=PALE, linewidth=0.8)  # type: ignore[arg-type]  # "x", "y" or "both"
    axes.set_xlabel(x_label, fontsize=10, color=INK)
    axes.set_ylabel(y_label, fontsize=10, color=INK)


def scale_axis(axes: Axes, which: str, scale: Scale) -> None:
    """Writes the ticks of the `x` or `y` axis in `scale`, at round numbers of its unit."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(_ScaledLocator(scale.factor))
    axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number / scale.factor:,.5g}"))


def legend(figure: Figure, axes: Axes) -> None:
    """Adds the legend below the axes."""
    shown = figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower left",
        ncols=3,
        fontsize=9,
        frameon=False,
    )

    for text in shown.get_texts():
        text.set_parse_math(False)  # a dollar in a file's name is not a formula


def mark_forward_end(axes: Axes, x: float, colour: str) -> None:
    """Draws a line where the forward pass ends, labelled at the top of the axes."""
    axes.axvline(x, color=colour, linewidth=1.0, linestyle=(0, (2, 2)))
    axes.annotate(
        "forward ends", (x, 1), xycoords=("data", "axes fraction"), xytext=(-4, -9),
        textcoords="offset points",
        ha="right", fontsize=8.5, color=colour,
    )  # fmt: skip


def label_line(axes: Axes, y: float, text: str, colour: str) -> None:
    """Draws a line across the axes, labelled at its left end, where memory is usually low."""
    axes.axhline(y, color=colour, linewidth=1.3, linestyle=(0, (6, 3)))
    axes.annotate(
        text,
        (0.0, y),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
        color=colour,
        fontsize=9,
    )


class _ScaledLocator(MaxNLocator):
    def __init__(self, factor: float) -> None:
        super().__init__(nbins=7, steps=[1, 2, 5, 10])
        self._factor = factor

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        return [
            tick * self._factor
            for tick in super().tick_values(vmin / self._factor, vmax / self._factor)
        ]
