"""Checkmate's figures 5 and 6 and its table 2 (Jain et al., 2020, arXiv:1910.02653).

    python -m experiments.checkmate_figures [--time-limit S] [--models NAME ...] [--redraw]

*Figure 5*: extra compute against memory of traced training steps, float32, roofline costs, at the
paper's batch sizes and resolutions: VGG16 (256 images of 224 x 224), MobileNet (512; V2 here, V1
there), U-Net (32 of 416 x 608). With V100 costs: every heuristic, the rounding and the MILP of the
paper, beside `auto` and its proved bound. With A100 and H100 costs: `auto` and its bound.

*Table 2*: cost over the best proved bound, geometric mean over the budgets that a strategy can
meet. The paper divides by the optimum of its MILP.

*Figure 6*: the largest batch in 16 GB and 80 GB whose cost is at most one forward pass above
keeping everything, by strategy. Sizes and costs are linear in the batch: graphs are traced at two
batch sizes and interpolated.

Causes of differences from the paper: costs are computed from the device's rates and not measured;
graphs have every operator of PyTorch's backward, not one node per layer; a budget bounds the whole
step, gradients and workspace included; each solve has 4 seconds (Gurobi had an hour).
`results/README.md` says by how much the results differ. LP rounding and the MILP are often stopped
early: a linear program of n² columns takes longer than the limit.

Writes `results/checkmate_figures.json`, `checkmate_figure5.png`, `checkmate_figure6.png` and prints
the tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import remat
from experiments.figures import (
    arguments,
    draw,
    fake_tensors,
    legend_below,
    read,
    table,
    titled,
    write,
)
from experiments.vision import PUBLISHED_BATCH, STEPS
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.look.plot_style import BLUE, GREEN, GREY, INK, LINES, ORANGE, RED, new_figure, quiet
from remat.solvers import make_solver
from remat.solvers.auto.frontier import frontier_solutions

DEVICES = ("V100", "A100", "H100")
HEURISTICS = ("chen-sqrt", "chen-greedy", "ap-sqrt", "ap-greedy", "linear-sqrt", "linear-greedy")
METHODS = (*HEURISTICS, "lp-rounding", "milp", "auto")
IN_FIGURE_6 = ("keep-all", *HEURISTICS, "auto")
NUM_BUDGETS = 7
MEMORIES = {"16 GB": 16 * 10**9, "80 GB": 80 * 10**9}
_LARGEST_BATCH = 8192
# Table 2 of the paper, without "Griewank" and the networks not run here; its MobileNet is V1.
PUBLISHED_RATIOS = {
    "MobileNetV2": {"ap-sqrt": 1.14, "ap-greedy": 1.07, "lp-rounding": 1.06},
    "VGG16": {"ap-sqrt": 1.28, "ap-greedy": 1.06, "lp-rounding": 1.01},
    "U-Net": {"ap-sqrt": 1.27, "ap-greedy": 1.23, "lp-rounding": 1.03},
}


def traced(name: str, batch: int, device: str) -> Graph:
    """Returns the training step of a network at a batch size; nothing is allocated."""
    with fake_tensors():
        model, kwargs = STEPS[name](batch)
    return remat.trace(model.train(), kwargs=kwargs, costs=f"roofline:{device}")


def keep_all_bytes(graph: Graph) -> int:
    """Returns the peak of keeping everything."""
    return simulate(graph, Schedule.keep_all(graph)).peak_bytes


def budgets_of(graph: Graph) -> list[int]:
    """Returns budgets from the least known to keeping everything."""
    least, most = remat.minimum(graph).peak_bytes, keep_all_bytes(graph)
    return [least + (most - least) * i // (NUM_BUDGETS - 1) for i in range(NUM_BUDGETS)]


def curves(graph: Graph, methods: Sequence[str], time_limit_s: float) -> dict[str, list[Solution]]:
    """Returns the solutions of each method for each budget."""
    budgets = budgets_of(graph)
    found: dict[str, list[Solution]] = {}

    for method in methods:
        solver = make_solver(method, time_limit_s=time_limit_s)
        if method == "auto":
            found[method] = frontier_solutions(graph, budgets, solver)
        else:
            found[method] = [solver.solve(graph, budget_bytes=budget) for budget in budgets]

        print(
            f"  {method}: "
            f"{[round(100 * s.overhead, 2) if s.is_solved else None for s in found[method]]} "
            "%",
            flush=True,
        )

    return found


def bounds_of(found: dict[str, list[Solution]]) -> list[float]:
    """Returns the best proved bound for each budget."""
    return [max(s.lower_bound_s for s in at) for at in zip(*found.values(), strict=True)]


def ratios(found: dict[str, list[Solution]]) -> dict[str, float | None]:
    """Returns each method's geometric mean of cost over the best bound, at budgets it meets."""
    bounds, result = bounds_of(found), {}
    for method, solutions in found.items():
        logs = [
            math.log(s.cost_s / bound)
            for s, bound in zip(solutions, bounds, strict=True)
            if s.is_solved
        ]
        result[method] = math.exp(math.fsum(logs) / len(logs)) if logs else None

    return result


def at_batch(small: Graph, large: Graph, batches: tuple[int, int], batch: int) -> Graph:
    """Returns a graph whose sizes, workspaces and costs are interpolated between two traces."""
    share = (batch - batches[0]) / (batches[1] - batches[0])

    def between(one: float, other: float) -> float:
        return one + share * (other - one)

    pairs = zip(small.operators, large.operators, strict=True)
    operators = tuple(
        replace(
            a,
            cost_s=between(a.cost_s, b.cost_s),
            workspace_bytes=round(between(a.workspace_bytes, b.workspace_bytes)),
        )
        for a, b in pairs
    )
    values = tuple(
        replace(a, size_bytes=round(between(a.size_bytes, b.size_bytes)))
        for a, b in zip(small.values, large.values, strict=True)
    )

    return replace(small, operators=operators, values=values)


def largest_batch(
    pair: tuple[Graph, Graph],
    batches: tuple[int, int],
    method: str,
    memory: int,
    time_limit_s: float,
) -> int:
    """Returns the largest batch that fits with at most one extra forward pass of compute.

    It is found by bisection, to within 1 %.
    """
    solver = make_solver(method, time_limit_s=time_limit_s)

    def is_good(batch: int) -> bool:
        graph = at_batch(*pair, batches, batch)
        limit_s = graph.cost_s + sum(op.cost_s for op in graph.operators[: graph.num_forward])
        solution = solver.solve(graph, budget_bytes=memory)
        return solution.is_solved and solution.cost_s <= limit_s * (1 + 1e-9)

    low, high = 0, 1
    while high <= _LARGEST_BATCH and is_good(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 100):  # to within 1 %
        middle = (low + high) // 2
        low, high = (middle, high) if is_good(middle) else (low, middle)
    return low


def figure_6(name: str, time_limit_s: float) -> Iterator[dict[str, Any]]:
    """Yields the largest batch by strategy and memory."""
    batches = (PUBLISHED_BATCH[name] // 2, PUBLISHED_BATCH[name])
    pair = (traced(name, batches[0], "V100"), traced(name, batches[1], "V100"))
    assert pair[0].num_operators == pair[1].num_operators
    for label, memory in MEMORIES.items():
        for method in IN_FIGURE_6:
            batch = largest_batch(pair, batches, method, memory, time_limit_s)
            print(f"  {name}, {label}, {method}: {batch}", flush=True)
            yield {"model": name, "memory": label, "method": method, "batch": batch}


_NAME = {"auto": "remat (auto)"}
_COLOURS = dict(zip(METHODS, (INK, *LINES[1:], "#b0519d", RED, BLUE), strict=True))
_MARKERS = dict(zip(METHODS, "o^sDvP*X.", strict=True))
_TOP = 45.0  # percent; a schedule with more extra compute is of no practical use


def draw_figure_5(panels: list[dict[str, Any]]) -> None:
    """Draws extra compute against memory, one column per network.

    Above, every strategy with V100 costs; below, our solver on three devices.
    """
    names = list(dict.fromkeys(panel["model"] for panel in panels))
    figure = new_figure(
        "Extra compute against memory (Checkmate, figure 5), roofline costs", width=14, height=9.6
    )
    grid = figure.subplots(2, len(names), squeeze=False)

    for column, name in enumerate(names):
        mine = [panel for panel in panels if panel["model"] == name]
        for axes in grid[:, column]:
            quiet(
                axes,
                x_label="memory of the whole step (GB)",
                y_label="extra compute over keeping everything (%)",
                grid="both",
            )

        _draw_strategies(grid[0, column], mine[0])
        _draw_devices(grid[1, column], mine)

    legend_below(figure, list(grid.flat), columns=5)
    draw("checkmate_figure5", figure)


def _draw_strategies(axes: Any, panel: dict[str, Any]) -> None:
    titled(axes, f"{panel['model']}, batch {panel['batch']}: every strategy, {panel['device']}")
    x = [budget / 1e9 for budget in panel["budgets"]]

    axes.plot(
        x,
        panel["bound_percent"],
        color=GREEN,
        linewidth=2,
        linestyle=(0, (4, 2)),
        label="proved: less is impossible",
    )

    for method, points in panel["overhead_percent"].items():
        y = [np.nan if point is None else point for point in points]
        style = _MARKERS[method] + ("-" if method == "auto" else "")
        axes.plot(
            x,
            y,
            style,
            color=_COLOURS[method],
            markersize=7 if method in ("auto", "milp") else 5,
            label=_NAME.get(method, method),
        )

    axes.axvline(
        panel["keep_all_bytes"] / 1e9,
        color=GREY,
        linestyle=":",
        linewidth=1.2,
        label="keeping everything",
    )

    axes.set_ylim(-1, min(_TOP, axes.get_ylim()[1]))
    _note_what_is_above(axes, x, panel["overhead_percent"]["auto"])


def _note_what_is_above(axes: Any, x: list[float], heights: list[float | None]) -> None:
    for at, height in zip(x, heights, strict=True):
        if height is not None and height > _TOP:
            note = f"{height:.0f} % at\n{at:.1f} GB"
            axes.annotate(
                note,
                (at, _TOP),
                xytext=(-6, -22),
                textcoords="offset points",
                fontsize=7.5,
                color=BLUE,
            )


def _draw_devices(axes: Any, panels: list[dict[str, Any]]) -> None:
    titled(axes, f"{panels[0]['model']}: remat and its bound, by device")
    for panel, colour in zip(panels, (BLUE, ORANGE, LINES[3]), strict=True):
        x = [budget / 1e9 for budget in panel["budgets"]]
        y = [np.nan if point is None else point for point in panel["overhead_percent"]["auto"]]
        axes.plot(x, y, "o-", color=colour, markersize=4, label=f"remat, {panel['device']} costs")
        axes.plot(x, panel["bound_percent"], color=colour, linestyle=(0, (4, 2)), linewidth=1.2)
    axes.plot([], [], color=INK, linestyle=(0, (4, 2)), linewidth=1.2, label="its proved bound")
    axes.set_ylim(-1, min(_TOP, axes.get_ylim()[1]))


def draw_figure_6(rows: list[dict[str, Any]]) -> None:
    """Draws the largest batches as bars."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    figure = new_figure(
        "Largest batch with at most one more forward pass of compute (Checkmate, figure 6)",
        width=14,
        height=5.6,
    )

    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, names, strict=True):
        quiet(axes, x_label="images per step", grid="x")
        titled(axes, name)

        for place, (memory, colour) in enumerate(zip(MEMORIES, (BLUE, ORANGE), strict=True)):
            widths = [
                row["batch"] for row in rows if row["model"] == name and row["memory"] == memory
            ]
            bars = axes.barh(
                np.arange(len(widths)) + 0.4 * place,
                widths,
                0.38,
                color=colour,
                label=f"{memory} of memory",
            )
            axes.bar_label(bars, fmt="{:,.0f}", fontsize=8, padding=2)

        axes.set_xlim(right=1.13 * axes.get_xlim()[1])

    panels[0].set_yticks(
        np.arange(len(IN_FIGURE_6)) + 0.2, [_NAME.get(method, method) for method in IN_FIGURE_6]
    )
    panels[0].invert_yaxis()

    legend_below(figure, list(panels))
    draw("checkmate_figure6", figure)


def figure_5(
    name: str, device: str, time_limit_s: float
) -> tuple[dict[str, Any], dict[str, float | None]]:
    """Returns a panel's points and its row of table 2.

    The paper's device has all methods, the others only `auto`.
    """
    graph = traced(name, PUBLISHED_BATCH[name], device)
    print(f"{name} on {device}: {graph.num_operators} operators", flush=True)
    found = curves(graph, METHODS if device == "V100" else ("auto",), time_limit_s)

    record = {
        "model": name,
        "device": device,
        "batch": PUBLISHED_BATCH[name],
        "operators": graph.num_operators,
        "step_s": graph.cost_s,
        "keep_all_bytes": keep_all_bytes(graph),
        "budgets": [s.budget_bytes for s in found["auto"]],
        "bound_percent": [100 * (bound / graph.cost_s - 1) for bound in bounds_of(found)],
        "overhead_percent": {
            m: [100 * s.overhead if s.is_solved else None for s in f] for m, f in found.items()
        },
        "seconds": {m: [round(s.wall_s, 2) for s in f] for m, f in found.items()},
    }

    return record, ratios(found)


def run(models: Sequence[str], time_limit_s: float) -> None:
    """Solves and writes."""
    panels, table_2 = [], {}
    for name in models:
        for device in DEVICES:
            record, row = figure_5(name, device, time_limit_s)
            panels.append(record)
            if device == "V100":
                table_2[name] = row

    batches = [row for name in models for row in figure_6(name, min(4.0, time_limit_s))]
    content = {
        "figure_5": panels,
        "table_2": table_2,
        "table_2_published": PUBLISHED_RATIOS,
        "figure_6": batches,
    }

    write("checkmate_figures", {"time_limit_s": time_limit_s, **content})


def cells_of_table_2(record: Mapping[str, Any]) -> list[list[str]]:
    """Returns one row per strategy.

    For each network its ratio, how many budgets it met, and the paper's ratio if there is one.
    """
    met = {
        panel["model"]: panel["overhead_percent"]
        for panel in record["figure_5"]
        if panel["device"] == "V100"
    }

    def cell(name: str, method: str) -> str:
        ratio, published = (
            record["table_2"][name][method],
            record["table_2_published"][name].get(method),
        )
        count = sum(point is not None for point in met[name][method])
        return (f"{ratio:.3f} ({count})" if ratio else "none") + (
            f"; {published:.2f}" if published else ""
        )

    return [[method, *(cell(name, method) for name in record["table_2"])] for method in METHODS]


def main() -> None:
    """Runs, draws and prints."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--time-limit", type=float, default=4.0, help="seconds for each solve (default: 4)"
    )
    parser.add_argument("--models", nargs="+", choices=list(STEPS), default=list(STEPS))
    options = parser.parse_args()

    if not options.redraw:
        run(options.models, options.time_limit)

    record = read("checkmate_figures")
    draw_figure_5(record["figure_5"])
    draw_figure_6(record["figure_6"])

    print(
        table(
            cells_of_table_2(record),
            [
                f"cost over the best bound (budgets met, of {NUM_BUDGETS}); published",
                *record["table_2"],
            ],
        )
    )


if __name__ == "__main__":
    main()
