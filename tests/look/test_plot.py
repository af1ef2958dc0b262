"""Pictures: they show what the numbers say, and can be written in every format."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.core.units import Units
from remat.look.plot import (
    PLOT_SUFFIXES,
    Timeline,
    draw,
    plot_memory,
    plot_schedule,
    plot_tradeoff,
    save,
)
from remat.solvers import make_solver
from remat.tracers.synthetic import FAMILIES, transformer


def texts(figure: Figure) -> str:
    return "\n".join(found.get_text() for found in figure.findobj(Text))


def timed_transformer() -> Graph:
    graph = transformer(3, width=2**20)
    return graph.with_costs([op.cost_s * 1e-4 for op in graph.operators], costs="roofline:H100")


def solutions_of(graph: Graph) -> list[Solution]:
    peak = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    solver = make_solver("pytorch-knapsack")
    return [
        solver.solve(graph, budget_bytes=peak * percent // 100) for percent in range(60, 105, 5)
    ]


def test_a_timeline_shows_the_simulation_over_its_cost() -> None:
    graph = FAMILIES["chain"]()
    timeline = Timeline.of_schedule("all", graph, Schedule.keep_all(graph))
    assert timeline.edges[-1] == graph.cost_s
    assert timeline.peak_bytes == simulate(graph, Schedule.keep_all(graph)).peak_bytes
    assert timeline.forward_end == sum(op.cost_s for op in graph.operators[: graph.num_forward])


def test_memory_shows_peaks_budget_and_units() -> None:
    graph = timed_transformer()
    timeline = Timeline.of_schedule("keep everything", graph, Schedule.keep_all(graph))
    measured = Timeline("measured", np.array([0.0, 0.01, 0.02]), np.array([2**20, 5 * 2**20]))

    shown = texts(
        plot_memory(
            [timeline, measured], budget_bytes=100 * 2**20, units=Units.of(graph), title="A step"
        )
    )

    for expected in (
        "A step",
        "memory (MiB)",
        "compute (ms)",
        "budget 100 MiB",
        "measured: peak 5 MiB",
        "forward ends",
        "parameters, buffers, inputs",
    ):
        assert expected in shown


def test_a_schedule_shows_every_computation_once() -> None:
    graph = timed_transformer()
    solution = solutions_of(graph)[-3]
    assert solution.schedule is not None
    figure = plot_schedule(graph, solution.schedule, budget_bytes=solution.budget_bytes)

    first, again = (np.asarray(points.get_offsets()) for points in figure.axes[1].collections[1:3])
    drawn = sorted([(float(x), float(y)) for x, y in np.concatenate([first, again])])
    assert drawn == [(step + 0.5, float(op)) for step, op in enumerate(solution.schedule.steps)]
    assert len(again) == solution.schedule.num_recomputations > 0

    shown = texts(figure)
    for expected in (
        "blocks.0",
        "blocks.2",
        f"computed again ({len(again)}: {100 * solution.overhead:.1f} % more compute)",
        "backward",
    ):
        assert expected in shown


def test_a_tradeoff_shows_what_was_found_and_what_was_proved() -> None:
    graph = timed_transformer()
    solutions = solutions_of(graph)
    lost = Solution.without_schedule(
        graph, solutions[0].budget_bytes // 2, Status.INFEASIBLE, solver="s", wall_s=0.0
    )
    peak = simulate(graph, Schedule.keep_all(graph)).peak_bytes

    figure = plot_tradeoff(
        [*solutions, lost],
        keep_all_bytes=peak,
        others={"chen-sqrt": solutions[-2:]},
        units=Units.of(graph),
    )

    shown = texts(figure)
    for expected in (
        "proved: less is impossible",
        "found",
        "chen-sqrt",
        "keep everything",
        "no schedule fits",
        "extra compute",
        "(MiB)",
    ):
        assert expected in shown


EXTREMES = ["empty", "single", "zero_cost", "half_zero_size", "random_step"]


@pytest.mark.parametrize(
    ("picture", "family"),
    [(picture, family) for picture in ("memory", "schedule", "tradeoff") for family in EXTREMES],
)
def test_extreme_graphs_can_be_drawn(family: str, picture: str, tmp_path: Path) -> None:
    graph = FAMILIES[family]()
    keep_all = make_solver("keep-all").solve(graph, budget_bytes=2**40)
    draw(graph, [("one", keep_all), ("two", keep_all)], picture, tmp_path / "picture.svg")
    assert not re.search(r"\bnan\b", (tmp_path / "picture.svg").read_text(), re.IGNORECASE)


def test_an_empty_picture_can_be_drawn() -> None:
    assert plot_memory([]).axes
    assert plot_tradeoff([]).axes


@pytest.mark.parametrize("suffix", PLOT_SUFFIXES)
def test_every_format_can_be_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"picture{suffix}"
    save(plot_memory([Timeline("x", np.array([0.0, 1.0]), np.array([3]))]), path)
    content = path.read_bytes()
    assert content.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix])
    if suffix == ".svg":
        ElementTree.fromstring(content)
