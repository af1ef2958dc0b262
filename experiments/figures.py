"""Code that the figures' scripts share: models on fake tensors, result files, pictures."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments.command_line import parser_of
from experiments.environment import environment
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.look.plot import save
from remat.solvers import make_solver

RESULTS = Path(__file__).parent / "results"
_BEGAN = time.perf_counter()


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser that describes a script and knows `--redraw`.

    With `--redraw`, the script draws the picture again from the existing results.
    """
    parser = parser_of(doc)
    parser.add_argument(
        "--redraw", action="store_true", help="draw results/NAME.json again and compute nothing"
    )
    return parser


@contextmanager
def fake_tensors(dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Models built inside take no memory and have `dtype` by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_default_dtype(before)


def leanest(method: str, graph: Graph, *, time_limit_s: float = 10.0) -> Solution:
    """Returns a heuristic's schedule for the smallest budget that it meets."""
    most, solver = (
        simulate(graph, Schedule.keep_all(graph)).peak_bytes,
        make_solver(method, time_limit_s=time_limit_s),
    )

    low, high = graph.resident_bytes, most
    best = solver.solve(graph, budget_bytes=high)

    while best.is_solved and high - low > most // 200:
        middle = (low + min(high, best.peak_bytes)) // 2
        answer = solver.solve(graph, budget_bytes=middle)
        low, high, best = (
            (low, middle, answer)
            if answer.is_solved
            else (middle, min(high, best.peak_bytes), best)
        )

    return best


def write(name: str, record: Mapping[str, Any], *, seed: int | None = None) -> None:
    """Writes `results/NAME.json`.

    The file has the environment, how long the script has taken so far, and the record.
    """
    RESULTS.mkdir(exist_ok=True)
    content = {"environment": environment(seed=seed), "run": _run(), **record}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def _run() -> dict[str, float]:
    """Returns wall seconds since this module was imported, and CPU seconds of the process.

    The CPU seconds include those of finished child processes.
    """
    user, system, their_user, their_system, _ = os.times()
    return {
        "wall_s": round(time.perf_counter() - _BEGAN, 1),
        "cpu_s": round(user + system + their_user + their_system, 1),
    }


def read(name: str) -> dict[str, Any]:
    """Returns what `write` wrote."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def draw(name: str, figure: Figure) -> None:
    """Writes `results/NAME.png`, and prints how long the script has taken so far."""
    save(figure, RESULTS / f"{name}.png")
    print(f"results/{name}.png after {_run()['wall_s']:.0f} s")


def titled(axes: Axes, text: str) -> None:
    """Writes a title above one of several axes."""
    axes.set_title(text, fontsize=10.5, loc="left")


_PLACES = (  # places of a label: points right of its mark, points above it, and alignment
    (7, 4, "left"), (-7, 4, "right"), (8, -3, "left"), (-8, -3, "right"), (6, -12, "left"),
    (-6, -12, "right"), (0, 8, "center"),
    (0, -15, "center"), (20, -3, "left"), (-20, -3, "right"), (22, -16, "left"),
    (-22, -16, "right"),
)  # fmt: skip
# labels stay readable where lines cross them
_ON_WHITE = [withStroke(linewidth=2.5, foreground="white")]


def label_marks(axes: Axes, marks: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes a label beside each mark (x, y, text, colour), where it covers least.

    It avoids other labels, marks and lines. The limits of the axes must be final.
    """
    canvas: Any = FigureCanvasAgg(axes.get_figure(root=True))
    canvas.draw()  # positions are known after this

    points = axes.transData.transform([(x, y) for x, y, _, _ in marks])
    lines = [
        _along(axes.transData.transform(line.get_xydata()))
        for line in axes.lines
        if line.get_linestyle() == "-"
    ]
    taken: list[Bbox] = []

    def written(
        x: float, y: float, text: str, colour: str, place: tuple[int, int, str]
    ) -> Annotation:
        return axes.annotate(
            text,
            (x, y),
            xytext=place[:2],
            textcoords="offset points",
            ha=place[2],
            path_effects=_ON_WHITE,
            fontsize=7.5,
            color=colour,
        )

    for mark in marks:
        boxes = []
        for place in _PLACES:
            note = written(*mark, place)
            boxes.append(note.get_window_extent(canvas.get_renderer()))
            note.remove()

        covered = [
            sum(box.overlaps(other) for other in taken)
            + sum(box.contains(*point) for point in points)
            + sum(0.1 * bool(box.count_contains(line)) for line in lines)
            for box in boxes
        ]

        best = covered.index(min(covered))
        written(*mark, _PLACES[best])
        taken.append(boxes[best])


def _along(corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns points a few pixels apart on a polyline."""
    at = np.linspace(0, len(corners) - 1, 60 * len(corners))
    return np.column_stack(
        [np.interp(at, np.arange(len(corners)), corners[:, axis]) for axis in (0, 1)]
    )


def legend_below(figure: Figure, axes: Axes | Sequence[Axes], *, columns: int = 3) -> None:
    """Adds one legend for all axes below the picture, each label once."""
    found: dict[str, Any] = {}
    for one in [axes] if isinstance(axes, Axes) else axes:
        found |= dict(zip(*reversed(one.get_legend_handles_labels()), strict=True))

    figure.legend(
        list(found.values()),
        list(found),
        loc="outside lower left",
        ncols=columns,
        fontsize=9,
        frameon=False,
    )


def table(rows: Sequence[Sequence[str]], headings: Sequence[str]) -> str:
    """Returns a Markdown table; the first column is text, the others numbers."""
    lines = ["| " + " | ".join(headings) + " |", "| --- |" + " ---: |" * (len(headings) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
