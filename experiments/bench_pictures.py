"""Pictures of benchmark results.

A hard instance over time, time against size, and the curves of all methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.bench_frontier import DRAWN
from experiments.bench_rows import Row
from remat.look.plot import save
from remat.look.plot_style import BLUE, GREEN, GREY, LINES, legend, new_figure, quiet

_GIB = 2**30
_HEADROOM = 1.4  # the picture is about the last schedules; the first may cost far more


def draw(rows: Mapping[str, Sequence[Row]], folder: Path) -> list[Path]:
    """Draws each picture for which there are rows; returns the files."""
    pictures = {
        "bench_hard_instance": _hard_instance([*rows["published"], *rows["random"]]),
        "bench_scale": _scale(rows["scale"]),
        "bench_frontier": _frontier(rows["frontier"]),
    }

    written = []
    for name, figure in pictures.items():
        if figure is not None:
            save(figure, folder / f"{name}.png")
            written.append(folder / f"{name}.png")

    return written


def _hard_instance(rows: Sequence[Row]) -> Figure | None:
    """Draws cost and bound over time for the instance with the largest final gap.

    Instances with a published cost come first.
    """
    candidates = [row for row in rows if row["gap_percent"] is not None and len(row["moments"]) > 1]
    hardest = max(
        candidates,
        key=lambda row: (bool(row.get("published_cost")), row["gap_percent"]),
        default=None,
    )
    if hardest is None:
        return None

    keep_all = hardest["cost"] / (1 + hardest["overhead_percent"] / 100)
    figure = new_figure(
        f"{hardest['instance']} at {hardest['budget']}: what is found and what is proved, over time"
    )
    axes = figure.subplots()

    found = [
        (seconds, 100 * (cost / keep_all - 1))
        for seconds, cost, _ in hardest["moments"]
        if cost is not None
    ]

    proved = [(seconds, 100 * (bound / keep_all - 1)) for seconds, _, bound in hardest["moments"]]
    for points, colour, label in (
        (found, BLUE, "found"),
        (proved, GREEN, "proved: less is impossible"),
    ):
        _steps(axes, [*points, (hardest["seconds"], points[-1][1])], colour, label)

    top = found[-1][1]
    if hardest.get("published_cost"):
        level = 100 * (hardest["published_cost"] / keep_all - 1)
        top = max(top, level)
        label = f"published, after {hardest['published_seconds']:,.0f} s"
        axes.axhline(level, color=GREY, linewidth=1.2, linestyle=(0, (6, 3)), label=label)

    quiet(axes, x_label="time (s)", y_label="extra compute over keeping everything (%)")
    axes.set_xscale("log")
    axes.set_ylim(0, _HEADROOM * top)
    legend(figure, axes)
    return figure


def _steps(axes: Axes, points: Sequence[tuple[float, float]], colour: str, label: str) -> None:
    axes.step(
        [max(x, 1e-3) for x, _ in points],
        [y for _, y in points],
        where="post",
        color=colour,
        linewidth=1.6,
        label=label,
    )


def _scale(rows: Sequence[Row]) -> Figure | None:
    """Seconds to a first schedule and to a gap of 1 %, by number of operators."""
    if not rows:
        return None

    figure = new_figure("Time against size, budget 70 % of the peak")
    axes = figure.subplots()
    kinds = (
        ("seconds_to_first", "o-", "first schedule"),
        ("seconds_to_1_percent", "D--", "within 1 % of the bound"),
    )

    for family, colour in zip(dict.fromkeys(row["family"] for row in rows), LINES, strict=False):
        mine = sorted(
            (row for row in rows if row["family"] == family), key=lambda row: row["operators"]
        )

        for column, style, label in kinds:
            points = [
                (row["operators"], max(row[column], 1e-3))
                for row in mine
                if row[column] is not None
            ]

            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                style,
                color=colour,
                markersize=4,
                label=f"{family}: {label}",
            )

    quiet(axes, x_label="operators", y_label="time (s)", grid="both")
    axes.set_xscale("log")
    axes.set_yscale("log")
    legend(figure, axes)
    return figure


def _frontier(rows: Sequence[Row]) -> Figure | None:
    """Overhead against memory of every method on one graph, and what is proved."""
    curve = next((row for row in rows if row["kind"] == "curve" and row["graph"] == DRAWN), None)
    if curve is None:
        return None

    figure = new_figure(
        f"{DRAWN.replace('_', ', ')} layers: what memory costs in compute, by method"
    )
    axes = figure.subplots()

    _draw_own(axes, [point for point in curve["points"] if point[2] is not None])
    _draw_peers(
        axes,
        [
            row
            for row in rows
            if row["kind"] == "peer" and row["graph"] == DRAWN and row["peak_bytes"] is not None
        ],
    )

    quiet(
        axes,
        x_label="simulated peak of the whole step (GiB)",
        y_label="extra compute over keeping everything (%)",
        grid="both",
    )

    legend(figure, axes)
    return figure


def _draw_own(axes: Axes, points: Sequence[Sequence[float]]) -> None:
    """Draws points of a budget, a peak, an overhead and its bound."""
    axes.plot(
        [peak / _GIB for _, peak, _, _ in points],
        [over for _, _, over, _ in points],
        "o-",
        color=BLUE,
        markersize=4,
        label="auto",
    )

    axes.step(
        [budget / _GIB for budget, _, _, _ in points],
        [bound for _, _, _, bound in points],
        where="pre",
        color=GREEN,
        linewidth=1.4,
        linestyle=(0, (4, 2)),
        label="proved",
    )


def _draw_peers(axes: Axes, rows: Sequence[Row]) -> None:
    for peer, colour in zip(
        dict.fromkeys(row["peer"] for row in rows), LINES[1:] * 2, strict=False
    ):
        mine = sorted(
            {
                (row["peak_bytes"] / _GIB, row["overhead_percent"])
                for row in rows
                if row["peer"] == peer
            }
        )

        axes.plot(
            [x for x, _ in mine],
            [y for _, y in mine],
            "D:",
            color=colour,
            markersize=4,
            linewidth=0.8,
            label=peer,
        )
