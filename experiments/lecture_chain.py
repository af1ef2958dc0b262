"""The ten-layer chain of lecture notes: matrix products against memory, counted exactly.

    python -m experiments.lecture_chain [--redraw]

A linear network of ten layers, x[i] = x[i-1] W[i]. A layer is one product in the forward and two in
the backward (the gradients of its input and of its weight): 30 in all if everything is kept. Memory
counts matrices of one layer's size: activations and their gradients. Weights, their gradients and
the input x[0] are held anyway and not counted. The picture shows the proved least number of
products for each size of memory, beside schedules made by hand:

- *everything kept*: 30.
- *one checkpoint at layer 5, one layer at a time*: x[5] alone is kept, and each activation is
  computed from the nearest of x[0] and x[5] whenever the backward needs it: 50.
- *one checkpoint at layer 5, one segment at a time* (Chen et al., 2016): each half is computed
  again once and kept: 38.
- *nothing kept*: each activation is computed from x[0]: 75. Lecture notes that say 75 "with one
  checkpoint at layer 5" count 0 + 1 + ... + 9 = 45 extra products, which is this case; with the
  checkpoint there are 2 (0 + 1 + 2 + 3 + 4) = 20.

The least schedules are then run: a network of ten linear layers is trained with `remat.wrap` at a
few of the budgets, and the matrix products that PyTorch executes are counted. Writes
`results/lecture_chain.json` and `.png`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import remat
from experiments.figures import arguments, draw, legend_below, read, write
from remat.core.graph import Graph
from remat.core.operators import Operator, Phase, Value, ValueKind
from remat.core.schedule import Schedule, simulate
from remat.look.plot_style import BLUE, GREEN, GREY, ORANGE, RED, new_figure, quiet

LAYERS, MIDDLE = 10, 5
SEED = 0
TIME_LIMIT_S = 20.0


def chain(num_layers: int = LAYERS) -> Graph:
    """Returns the chain; each value is one matrix, each operator one product.

    The forward's operators are 0 .. n - 1. The backward of layer i, from the last to the first, is
    the gradient of its weight, then that of its input. The gradient at the end comes from outside.
    """
    values = [
        Value("x0", 0, ValueKind.INPUT),
        *(Value(f"x{i}", 1) for i in range(1, num_layers + 1)),
    ]
    operators = [
        Operator(f"x{i} = x{i - 1} W{i}", 1.0, (i - 1,), (i,)) for i in range(1, num_layers + 1)
    ]

    values.append(Value(f"g{num_layers}", 1))
    operators.append(
        Operator(
            "loss", 0.0, (num_layers,), (num_layers + 1,), phase=Phase.BACKWARD, pinned="given"
        )
    )

    for i in range(num_layers, 0, -1):
        gradient = len(values) - 1 if i == num_layers else len(values) - 2
        values += [Value(f"g{i - 1}", 1 if i > 1 else 0), Value(f"dW{i}", 0)]

        weight = Operator(
            f"dW{i} = x{i - 1}' g{i}",
            1.0,
            (i - 1, gradient),
            (len(values) - 1,),
            phase=Phase.BACKWARD,
            pinned="a result",
        )

        inner = Operator(
            f"g{i - 1} = g{i} W{i}'",
            1.0,
            (gradient,),
            (len(values) - 2,),
            phase=Phase.BACKWARD,
            pinned="once is enough",
        )

        operators += [weight, inner]

    outputs = tuple(
        i for i, value in enumerate(values) if value.name.startswith("dW") or value.name == "g0"
    )
    return Graph(tuple(values), tuple(operators), outputs)


def from_checkpoints(kept: tuple[int, ...], *, is_segment: bool) -> list[int]:
    """Returns the steps of a schedule that keeps only x[0] and `kept` from the forward.

    Each activation is recomputed from the nearest of them: one at a time, or a whole segment when
    the backward enters it.
    """
    steps = list(range(LAYERS + 1))
    available = set(kept) | {0}

    for layer in range(LAYERS, 0, -1):
        if layer - 1 not in available:
            nearest = max(i for i in (0, *kept) if i < layer)
            again = list(range(nearest, layer - 1))
            steps += again
            if is_segment:
                available |= {i + 1 for i in again}

        first = LAYERS + 1 + 2 * (LAYERS - layer)
        steps += [first, first + 1]

    return steps


def by_hand(graph: Graph) -> Iterator[dict[str, Any]]:
    """Yields what each of the schedules written by hand costs."""
    schedules = {
        "everything kept": list(range(graph.num_operators)),
        "checkpoint at layer 5, by segment": from_checkpoints((MIDDLE,), is_segment=True),
        "checkpoint at layer 5, by layer": from_checkpoints((MIDDLE,), is_segment=False),
        "nothing kept": from_checkpoints((), is_segment=False),
    }

    for name, steps in schedules.items():
        schedule = Schedule.from_steps(graph, steps)
        assert not remat.validate(graph, schedule)
        simulation = simulate(graph, schedule)

        yield {
            "name": name,
            "matrices": simulation.peak_bytes,
            "products": round(simulation.cost_s),
        }


def least(graph: Graph) -> Iterator[dict[str, Any]]:
    """Yields the least number of products for each number of matrices in memory, and a bound."""
    most = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    for matrices in range(1, most + 1):
        try:
            solution = remat.solve(graph, matrices, time_limit_s=TIME_LIMIT_S, gap=0.0)
        except remat.BudgetError:
            continue

        answers = [solution]
        # search stops at its bound; the integer program goes on
        if solution.status is not remat.Status.OPTIMAL:
            answers.append(
                remat.solve(graph, matrices, solver="milp", time_limit_s=3 * TIME_LIMIT_S, gap=0.0)
            )

        products = min(round(answer.cost_s) for answer in answers)
        bound = max(math.ceil(answer.lower_bound_s - 1e-6) for answer in answers)
        yield {"matrices": matrices, "products": products, "proved_least": bound}


def products_of(step: Callable[[], Any]) -> int:
    """Runs a step and returns how many matrix products PyTorch executed."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    return sum(event.count for event in profiler.key_averages() if event.key == "aten::mm")


def run(width: int = 64) -> Iterator[dict[str, Any]]:
    """Yields planned and executed products of a real network at budgets down to the least.

    Each row also says whether the gradients equal plain PyTorch's.
    """
    for share in ("100%", "85%", "75%", "least"):
        torch.manual_seed(SEED)
        model = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        )

        batch = torch.randn(32 * width, width, requires_grad=True)
        model(batch).sum().backward()
        plain = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)

        graph = remat.trace(model, (batch,), costs="flops", differentiate="all")
        budget = remat.minimum(graph).peak_bytes if share == "least" else share
        solution = remat.solve(graph, budget, time_limit_s=TIME_LIMIT_S, gap=0.0)
        assert solution.schedule is not None

        planned = sum(
            graph.operators[i].target == "aten.mm.default" for i in solution.schedule.steps
        )

        remat.wrap(model, solution, costs="flops", differentiate="all")
        model(batch).sum().backward()
        model.zero_grad(set_to_none=True)
        executed = products_of(lambda model=model, batch=batch: model(batch).sum().backward())  # type: ignore[misc]

        pairs = zip(model.parameters(), plain, strict=True)
        is_equal = all(
            p.grad is not None and g is not None and torch.equal(p.grad, g) for p, g in pairs
        )

        yield {
            "budget": share,
            "peak_bytes": solution.peak_bytes,
            "planned": planned,
            "executed": executed,
            "is_equal": is_equal,
        }


def picture(record: Mapping[str, Any]) -> None:
    """Draws products against memory."""
    optimum, hand = record["least"], record["by_hand"]
    figure = new_figure("Ten matrix products in a chain: what memory costs")
    axes = figure.subplots()
    quiet(
        axes,
        x_label="memory (matrices: activations and their gradients)",
        y_label="matrix products, forward and backward",
    )

    _draw_least(axes, optimum)
    for row, colour, marker in zip(hand, (GREY, GREEN, ORANGE, "#7b4fa3"), "sD^v", strict=True):
        label = f"{row['name']}: {row['products']}"
        axes.plot(row["matrices"], row["products"], marker, color=colour, markersize=9, label=label)

    most = max(row["matrices"] for row in optimum)
    axes.set_ylim(25, 80)
    axes.set_xticks(range(1, most + 1))
    axes.set_xlim(2.5, most + 0.8)

    legend_below(figure, axes, columns=2)
    draw("lecture_chain", figure)


def _draw_least(axes: Any, rows: list[dict[str, Any]]) -> None:
    x, y = [row["matrices"] for row in rows], [row["products"] for row in rows]
    axes.step(x, y, where="post", color=BLUE, linewidth=1.8)
    axes.plot(
        x,
        y,
        "o",
        color=BLUE,
        markersize=6,
        label="remat's schedules, with their numbers of products",
    )

    axes.plot(
        x,
        [row["proved_least"] for row in rows],
        "_",
        color=RED,
        markersize=16,
        markeredgewidth=2,
        label="proved: no schedule has fewer",
    )

    for at, height in zip(x, y, strict=True):
        axes.annotate(
            str(height),
            (at, height),
            xytext=(5, 5),
            textcoords="offset points",
            fontsize=8.5,
            color=BLUE,
        )


def main() -> None:
    """Counts, runs, writes and draws."""
    if not arguments(__doc__).parse_args().redraw:
        graph = chain()
        write(
            "lecture_chain",
            {"by_hand": list(by_hand(graph)), "least": list(least(graph)), "executed": list(run())},
            seed=SEED,
        )

    record = read("lecture_chain")
    picture(record)
    for row in [*record["by_hand"], *record["least"], *record["executed"]]:
        print(row)


if __name__ == "__main__":
    main()
