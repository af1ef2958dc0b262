"""The MILP against brute force, and what its parts promise.

Bounds, orders inside stages, limits, backends.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.solvers.checkmate import stage_search
from remat.solvers.checkmate.checkmate_model import CheckmateModel, add_moment, stage_model
from remat.solvers.checkmate.lp_rounding import LPRounding, lp_bound
from remat.solvers.checkmate.milp import MILP
from remat.solvers.checkmate.milp_pulp import PuLPMILP, is_feasible
from remat.solvers.checkmate.ordered_stage import add_ordered_stage
from remat.solvers.checkmate.stage_form import stage_form
from remat.solvers.checkmate.stage_plan import plans_of_point, point_of_steps
from remat.solvers.core.progress import Progress
from remat.solvers.lp.backend import Highs
from remat.solvers.lp.linear import Program
from remat.tracers.synthetic import chain, chain_with_skips, random_layered, random_step, unet
from tests.support.oracles import brute_force, minimum_bytes

# operator 1 is computed twice before operator 5: its value makes room for 3, and 5 reads both
TWICE_IN_A_STAGE = Graph.from_arrays(
    [1] * 6, [1, 2, 2, 1, 4, 1], [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (3, 5)]
)
# before operator 6, operator 1 has to be recomputed ahead of operator 0
OUT_OF_ORDER = Graph.from_arrays([1] * 4, [10, 10, 1, 20], [(1, 2)])


@st.composite
def small_dags(draw: st.DrawFn) -> tuple[Graph, int]:
    """Up to 7 nodes, and a budget from the largest working set less 1 to the keep-all peak."""
    count = draw(st.integers(1, 7))
    pairs = [(u, v) for v in range(count) for u in range(v)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    cost = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    size = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    graph = Graph.from_arrays(cost, size, edges)
    return graph, draw(_budgets(graph))


@st.composite
def small_steps(draw: st.DrawFn) -> tuple[Graph, int]:
    """Graphs with everything that a graph can have.

    Several outputs, in-place operators, snapshots, workspaces, pins, results.
    """
    graph = random_step(draw(st.integers(1, 7)), seed=draw(st.integers(0, 2**20)))
    return graph, draw(_budgets(graph))


def _budgets(graph: Graph) -> st.SearchStrategy[int]:
    form = stage_form(graph, 0)
    least = graph.resident_bytes + max(
        map(form.working_bytes, range(form.num_operators)), default=0
    )
    peak = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    return st.integers(max(least - 1, 0), max(peak, least))


def _assert_exact(graph: Graph, budget_bytes: int, solution: Solution) -> None:
    best = brute_force(graph, budget_bytes)
    assert solution.status is (Status.INFEASIBLE if best is None else Status.OPTIMAL)
    if best is not None:
        assert solution.cost_s == pytest.approx(best, abs=1e-9)
        assert solution.lower_bound_s == pytest.approx(best, abs=1e-6)


@given(small_dags())
@settings(max_examples=200, deadline=None)
def test_milp_equals_brute_force_on_plain_graphs(case: tuple[Graph, int]) -> None:
    graph, budget_bytes = case
    _assert_exact(graph, budget_bytes, MILP().solve(graph, budget_bytes=budget_bytes))


@given(small_steps())
@settings(max_examples=300, deadline=None)
def test_milp_equals_brute_force_on_graphs_with_everything(case: tuple[Graph, int]) -> None:
    graph, budget_bytes = case
    _assert_exact(graph, budget_bytes, MILP().solve(graph, budget_bytes=budget_bytes))


@pytest.mark.parametrize("seed", range(12))
def test_milp_equals_brute_force_at_and_below_the_minimum(seed: int) -> None:
    graph = random_layered(7, seed=seed, width=2, is_training=False)
    least = minimum_bytes(graph)
    _assert_exact(graph, least, MILP().solve(graph, budget_bytes=least))
    assert MILP().solve(graph, budget_bytes=least - 1).status is Status.INFEASIBLE


@given(small_dags())
@settings(max_examples=60, deadline=None)
def test_more_budget_never_costs_more(case: tuple[Graph, int]) -> None:
    graph, budget_bytes = case
    costs = [
        s.cost_s
        for b in range(budget_bytes, budget_bytes + 3)
        if (s := MILP().solve(graph, budget_bytes=b)).is_solved
    ]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(
    ("graph", "budget_bytes", "num_steps"), [(TWICE_IN_A_STAGE, 5, 10), (OUT_OF_ORDER, 20, 4)]
)
def test_the_optimum_outside_of_checkmates_class_is_found(
    graph: Graph, budget_bytes: int, num_steps: int
) -> None:
    """In Checkmate's stages, an operator is computed once and in order.

    Other schedules can be better.
    """
    solution = MILP().solve(graph, budget_bytes=budget_bytes)
    _assert_exact(graph, budget_bytes, solution)
    assert solution.schedule is not None
    assert len(solution.schedule.steps) == num_steps


def _ordered_optimum(graph: Graph, budget_bytes: int) -> float:
    model = stage_model(stage_form(graph, budget_bytes))
    for stage in range(graph.num_operators):
        add_ordered_stage(model, stage)
    return Highs().minimise(model.arrays(), gap=0.0, time_limit_s=10.0).bound * model.unit_s


def test_checkmates_own_accounting_is_a_restriction() -> None:
    assert _ordered_optimum(TWICE_IN_A_STAGE, 5) == math.inf
    assert brute_force(TWICE_IN_A_STAGE, 5) == 10


@given(small_dags())
@settings(max_examples=60, deadline=None)
def test_checkmates_own_accounting_is_never_below_the_optimum(case: tuple[Graph, int]) -> None:
    graph, budget_bytes = case
    best = brute_force(graph, budget_bytes)
    if stage_form(graph, budget_bytes).fits_every_operator:
        # 1e-3 for tolerances of the bound
        assert _ordered_optimum(graph, budget_bytes) >= (math.inf if best is None else best) - 1e-3


@st.composite
def wild_schedules(draw: st.DrawFn) -> tuple[Graph, list[int]]:
    """A graph and a valid but useless schedule.

    Anything recomputable may be computed again at any time.
    """
    graph = random_step(draw(st.integers(1, 7)), seed=draw(st.integers(0, 2**20)))
    steps: list[int] = []
    for index in range(graph.num_operators):
        again = [i for i in range(index) if graph.operators[i].is_recomputable]
        steps += draw(st.lists(st.sampled_from(again), max_size=3)) if again else []
        steps.append(index)
    return graph, steps


@given(wild_schedules())
@settings(max_examples=150, deadline=None)
def test_the_relaxation_has_a_point_for_every_schedule(case: tuple[Graph, list[int]]) -> None:
    """So its optimum is a bound.

    Within the schedule's own peak, the model with every moment row admits it.
    """
    graph, steps = case
    simulation = simulate(graph, Schedule.from_steps(graph, steps))
    model = stage_model(stage_form(graph, simulation.peak_bytes))
    for stage, operator in np.argwhere(model.form.may_recompute).tolist():
        add_moment(model, stage, operator)
    assert _least_completion(model, steps) <= simulation.cost_s + 1e-6


def _least_completion(model: CheckmateModel, steps: list[int]) -> float:
    """Returns the model's least cost where R, S and Z are those of `steps`.

    Infinite where they break a row.
    """
    arrays, point = model.arrays(), point_of_steps(model, steps)
    known = ~np.isnan(point)
    rows = np.repeat(np.arange(len(arrays.row_upper)), np.diff(arrays.row_start))
    fixed = np.bincount(
        rows, arrays.value * np.where(known, point, 0.0)[arrays.index], len(arrays.row_upper)
    )

    for row in range(len(arrays.row_upper)):
        # H - ... rows only bound H from below, D from above
        for entry in range(arrays.row_start[row], arrays.row_start[row + 1]):
            if not known[arrays.index[entry]] and arrays.value[entry] < 0:
                fixed[row] = -math.inf

    if (fixed > arrays.row_upper + 1e-9).any():
        return math.inf
    return float(arrays.cost[known] @ point[known] + arrays.offset) * model.unit_s


@given(small_steps())
@settings(max_examples=60, deadline=None)
def test_without_the_exact_search_answers_stay_valid(case: tuple[Graph, int]) -> None:
    """The exact search is left out, as for a graph that is too large for it.

    The paper's accounting finds the schedule, and the relaxation gives the bound.
    """
    graph, budget_bytes = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_search, "_MAX_STATES", 0)
        solution = MILP(time_limit_s=2.0).solve(graph, budget_bytes=budget_bytes)

    best = brute_force(graph, budget_bytes)
    if best is None:
        assert solution.status in (Status.INFEASIBLE, Status.NO_SOLUTION)
        return
    assert solution.status is not Status.INFEASIBLE
    assert solution.lower_bound_s <= best + 1e-6
    assert not solution.is_solved or solution.cost_s >= best - 1e-9


@given(small_steps())
@settings(max_examples=60, deadline=None)
def test_lp_bound_and_rounding_enclose_the_optimum(case: tuple[Graph, int]) -> None:
    graph, budget_bytes = case
    best = brute_force(graph, budget_bytes)
    assert lp_bound(graph, budget_bytes) <= (math.inf if best is None else best + 1e-6)
    for seed in (None, 0):
        solution = LPRounding(seed=seed).solve(graph, budget_bytes=budget_bytes)
        assert (solution.status is not Status.INFEASIBLE) or best is None
        assert not solution.is_solved or (best is not None and solution.cost_s >= best - 1e-9)


def test_rounding_with_a_seed_is_reproducible() -> None:
    graph = random_layered(12, seed=4)
    budget_bytes = int(0.8 * simulate(graph, Schedule.keep_all(graph)).peak_bytes)
    first, second = (LPRounding(seed=7).solve(graph, budget_bytes=budget_bytes) for _ in range(2))
    assert first.is_solved
    assert first.schedule == second.schedule


@pytest.mark.parametrize(
    "graph",
    [chain(6), chain_with_skips(5), unet(1), TWICE_IN_A_STAGE],
    ids=["chain", "skips", "unet", "twice"],
)
def test_pulp_agrees_with_highs(graph: Graph) -> None:
    keep_all = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    for budget_bytes in (keep_all - 1, (2 * keep_all) // 3):
        ours = MILP().solve(graph, budget_bytes=budget_bytes)
        theirs = PuLPMILP().solve(graph, budget_bytes=budget_bytes)
        assert (theirs.status, theirs.cost_s) == (ours.status, ours.cost_s)


def test_pulp_names_what_is_missing() -> None:
    graph = chain(3)
    with pytest.raises(SolverError, match="PuLP knows no solver called 'SIMPLEX_BY_HAND'"):
        PuLPMILP(backend="SIMPLEX_BY_HAND").solve(graph, budget_bytes=4)
    with pytest.raises(SolverError, match="'CHOCO_CMD' is not installed"):
        PuLPMILP(backend="CHOCO_CMD").solve(graph, budget_bytes=4)


def test_a_time_limit_leaves_a_valid_bound() -> None:
    graph = random_layered(40, seed=3)
    budget_bytes = int(0.7 * simulate(graph, Schedule.keep_all(graph)).peak_bytes)

    began = time.monotonic()
    solution = MILP(time_limit_s=0.3).solve(graph, budget_bytes=budget_bytes)
    assert time.monotonic() - began < 10
    assert solution.status in (Status.FEASIBLE, Status.NO_SOLUTION)
    assert solution.lower_bound_s >= graph.cost_s
    assert not solution.is_solved or solution.lower_bound_s <= solution.cost_s


def test_a_gap_ends_the_solve_early() -> None:
    graph = random_layered(16, seed=5)
    budget_bytes = int(0.8 * simulate(graph, Schedule.keep_all(graph)).peak_bytes)
    solution = MILP(gap=0.5).solve(graph, budget_bytes=budget_bytes)
    assert solution.status is Status.OPTIMAL
    assert 0 < solution.gap <= 0.5


def test_progress_tells_bounds_that_only_rise_and_costs_that_only_fall() -> None:
    seen: list[Progress] = []
    graph = unet(2)
    budget_bytes = int(0.75 * simulate(graph, Schedule.keep_all(graph)).peak_bytes)
    solution = MILP(progress=seen.append).solve(graph, budget_bytes=budget_bytes)

    costs = [p.cost_s for p in seen if p.cost_s is not None]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == solution.cost_s
    bounds = [p.bound_s for p in seen]
    assert all(later >= earlier - 1e-6 * graph.cost_s for earlier, later in pairwise(bounds))
    assert graph.cost_s < bounds[-1] <= solution.cost_s + 1e-9


def test_the_number_of_threads_may_change_in_one_process() -> None:
    """HiGHS refuses a second number of threads without saying so.

    It once returned without solving.
    """
    graph = unet(2)
    budget_bytes = int(0.75 * simulate(graph, Schedule.keep_all(graph)).peak_bytes)
    for threads in (1, 2, 1):
        assert (
            MILP(threads=threads).solve(graph, budget_bytes=budget_bytes).status is Status.OPTIMAL
        )


def test_other_programs_run_after_another_number_of_threads() -> None:
    """Without a word, HiGHS would leave each of them unsolved: no point, and no bound."""
    graph = unet(2)
    budget_bytes = int(0.75 * simulate(graph, Schedule.keep_all(graph)).peak_bytes)
    program = Program()
    program.add_columns(np.ones(2), is_integer=True)
    program.add_row(np.arange(2), -np.ones(2), upper=-1.0)

    for is_relaxed in (False, True):
        MILP(threads=2).solve(graph, budget_bytes=budget_bytes)
        outcome = program.minimise(is_relaxed=is_relaxed, time_limit_s=5.0)
        assert outcome.is_finished and outcome.bound == pytest.approx(1.0, abs=1e-3)


def test_an_incumbent_is_never_made_worse() -> None:
    graph = random_layered(40, seed=3)
    budget_bytes = int(0.85 * simulate(graph, Schedule.keep_all(graph)).peak_bytes)
    known = MILP(time_limit_s=5.0).solve(graph, budget_bytes=budget_bytes)
    assert known.schedule is not None

    again = MILP(time_limit_s=0.05, incumbent=known.schedule.steps).solve(
        graph, budget_bytes=budget_bytes
    )
    assert again.cost_s <= known.cost_s


def test_an_absurdly_big_model_is_refused_with_its_size() -> None:
    with pytest.raises(SolverError, match=r"has about [\d,]+ nonzeros.*use solver='auto'"):
        MILP().solve(chain(500), budget_bytes=200)
    with pytest.raises(SolverError, match=r"4,001 operators .*use solver='auto'"):
        MILP().solve(chain(2000), budget_bytes=200)
    # keeping everything needs no model
    assert MILP().solve(chain(2000), budget_bytes=10_000).status is Status.OPTIMAL


def test_a_point_decodes_to_its_recomputations() -> None:
    """The decoded stages recompute what the schedule does."""
    graph, steps = chain(4), [0, 1, 2, 3, 4, 5, 6, 0, 1, 7, 8]
    model = stage_model(stage_form(graph, 100))
    point = np.nan_to_num(point_of_steps(model, steps))
    assert is_feasible(model.arrays(), point)
    again = {(p.task.stage, i) for p in plans_of_point(model, point) for i in p.task.candidates}
    assert again == {(7, 0), (7, 1)}
