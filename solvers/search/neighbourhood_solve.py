"""Solves a part of a schedule exactly, as a MILP: some pairs (operator, stage) are free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers.core.accounting import Ints
from remat.solvers.lp.backend import Highs
from remat.solvers.search.neighbourhood_model import SlotModel
from remat.solvers.search.slots import slots_around, stages_of

_MAX_POINTS = 3  # points checked by the simulator
_GAP = 1e-7  # relative; practically solved to the end; not tuned
# factors on the width of what is free, after a part that was solved to the end, and after one that
# a limit stopped (published graphs)
GROW, SHRINK = 1.15, 0.75


@dataclass(frozen=True)
class Part:
    """The result of solving a part.

    Attributes:
        steps: the cheapest that the simulator confirms; the given ones where none is as cheap.
        cost_s: cost of the steps.
        is_finished: False where a limit stopped the solver.
    """

    steps: Ints
    cost_s: float
    is_finished: bool


def solve_part(
    graph: Graph, steps: Ints, free: Ints, *, budget_bytes: int, max_nodes: int, time_limit_s: float
) -> Part:
    """Returns the best schedule that differs from `steps` only in the pairs `free`.

    Args:
        graph: any graph.
        steps: a valid sequence within the budget.
        free: pairs (operator, stage), shape (pairs, 2), whose recomputation is optional.
        budget_bytes: resident bytes included.
        max_nodes: of branch and bound.
        time_limit_s: a cap.
    """
    cost_s = simulate(graph, Schedule.from_steps(graph, steps.tolist())).cost_s
    model = SlotModel(
        graph, slots_around(steps, graph.num_operators, free), budget_bytes=budget_bytes
    )
    answer = Highs(max_nodes=max_nodes).minimise(
        model.arrays, gap=_GAP, time_limit_s=time_limit_s, start=model.start()
    )

    for point in answer.points[:_MAX_POINTS]:
        found = np.array(model.steps(point), np.int64)
        simulation = simulate(graph, Schedule.from_steps(graph, found.tolist()))
        if simulation.peak_bytes <= budget_bytes and simulation.cost_s <= cost_s:
            return Part(found, simulation.cost_s, answer.is_finished)
    return Part(steps, cost_s, answer.is_finished)


def recomputations(steps: Ints) -> Ints:
    """Returns the recomputations of `steps`: sorted pairs (operator, stage), shape (pairs, 2)."""
    is_again = np.ones(len(steps), np.bool_)
    is_again[np.unique(steps, return_index=True)[1]] = False
    pairs = np.stack([steps[is_again], stages_of(steps)[is_again]], axis=1)
    return np.unique(pairs, axis=0)
