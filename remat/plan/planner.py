"""Finds a captured step's plan: in memory, on disk, from another shape, or by a solver."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from remat.core.budget import (
    Budget,
    check_budget,
    describe_bytes,
    format_bytes,
    is_percentage,
    parse_budget,
)
from remat.core.errors import BudgetError
from remat.core.graph import Graph
from remat.core.operators import ValueKind
from remat.core.room import Room
from remat.core.schedule import keep_all_peak
from remat.core.solution import Solution
from remat.plan.card import budget_of_card, check_has_card, library_bytes
from remat.plan.digests import computation_of
from remat.plan.disk_cache import PlanCache, plans_path
from remat.plan.distributed import (
    are_gradients_in_buckets,
    bucket_bytes,
    is_distributed,
    solve_once,
)
from remat.plan.earlier import Earlier, cheapest_fitting
from remat.plan.solving import new_solver, solve_in
from remat.run.capture import Step
from remat.run.other_outputs import check_differentiate
from remat.run.plain_steps import OnUnsupported, check_on_unsupported
from remat.solvers import Solver
from remat.solvers.core.compiled import IS_COMPILED
from remat.tracers.costs import CostModel

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How a step is planned.

    Attributes:
        budget: bytes, or a text such as "8GiB" or "60%"; None for what the GPU has.
        reserve_bytes: part of the budget reserved for what is not in the step (optimizer state).
        solver: name of a solver, or a solver.
        costs: name of a cost model, or a cost model.
        time_limit_s: time limit of the solver.
        gap: the solver stops as soon as it has proved this gap.
        executor: "eager" runs the rewritten step operator by operator, "inductor" compiles it to
            fused kernels, "auto" chooses one of them.
        differentiate: "scalars" or "all", see `make_backend`.
        plan_cache: whether plans are read from and written to the user's cache folder.
        is_accumulating: whether gradients of earlier micro-steps are held while a step runs, in all
            but the first micro-step of each training step.
        on_unsupported: "error" or "plain", for steps whose backward no plan can run.
    """

    budget: Budget | None
    reserve_bytes: int = 0
    solver: str | Solver = "auto"
    costs: str | CostModel = "profile"
    time_limit_s: float = 60.0
    gap: float = 0.005
    executor: str = "eager"
    differentiate: str = "scalars"
    plan_cache: bool = True
    is_accumulating: bool = False
    on_unsupported: OnUnsupported = "error"

    def __post_init__(self) -> None:
        if self.budget is None:
            check_has_card()
        else:
            check_budget(self.budget)

        if self.reserve_bytes < 0:
            raise ValueError(f"reserve_bytes={self.reserve_bytes} is negative")
        if self.executor not in ("eager", "inductor", "auto"):
            raise ValueError(f'executor={self.executor!r} is not "eager", "inductor" or "auto"')
        check_on_unsupported(self.on_unsupported)
        check_differentiate(self.differentiate)
        new_solver(self.solver, time_limit_s=self.time_limit_s, gap=self.gap)


class Plans:
    """Plans by graph.

    A step that is captured again is not solved again, in this process or, if plans are cached on
    disk, in another one. For a new shape of a step that has a plan, such as the last batch of an
    epoch, the solver gets a tenth of its time limit if that plan's schedule fits, and the cheaper
    of the two schedules is used. It also gets a tenth, and starts from the plan before, if a step
    is planned again because its kernels held more than planned.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        # digest of everything a plan depends on, bytes reserved for this step -> its plan
        self._known: dict[tuple[str, int], tuple[Graph, Solution, Room]] = {}
        self._has_largest = False
        self._card_bytes = 0  # what the GPU had for the first step, if no budget was given
        self._library_bytes = 0  # what cuBLAS holds on the GPU
        # what the largest step so far needs to keep everything: "60%" is a percentage of it
        self._keep_all_bytes = 0

        self._cache = (
            PlanCache(plans_path())
            if options.plan_cache and isinstance(options.solver, str)
            else None
        )

    def look_at_card(self, device_type: str, step_bytes: Callable[[], int]) -> None:
        """Measures what cuBLAS holds on the GPU and, without a budget, the GPU's memory.

        Call it before a step is captured, not during a capture.

        Args:
            device_type: where the step runs, `cpu` or `cuda`.
            step_bytes: returns the bytes of the step's tensors that exist already: parameters,
                buffers, inputs, gradients.

        Raises:
            ValueError: no budget was given, and the step runs on a CPU or nothing is left on the
                GPU.
        """
        self._library_bytes = library_bytes(device_type)
        is_known = self._card_bytes and device_type == "cuda"
        if self.options.budget is None and not is_known:
            self._card_bytes = budget_of_card(device_type, step_bytes() + self._library_bytes)

    def __call__(
        self,
        step: Step,
        *,
        gradient_bytes: int = 0,
        unplanned_bytes: int = 0,
        gap_bytes: int = 0,
        is_largest: bool = False,
        known: Solution | None = None,
    ) -> Solution:
        """Returns the solution for a captured step, the same on all ranks.

        With `is_accumulating`, the step is planned for all accumulated gradients first, so that a
        budget that is too small for later micro-steps is an error in the first one.

        Args:
            step: the captured step.
            gradient_bytes: size of the gradients that earlier micro-steps left.
            unplanned_bytes: reserved for memory that exists only because of the plan; percentages
                do not count it.
            gap_bytes: reserved for what code between pieces holds, whatever the plan; percentages
                count it.
            is_largest: whether all smaller shapes use its schedule, without being solved.
            known: a solution to use if it fits this step; ignored with several ranks, which all
                need the same solution.
        """
        graph, others = step.graph, (unplanned_bytes, gap_bytes)
        if known and not is_distributed():
            with suppress(BudgetError):  # more may be held now than when it was made
                return self._take(known, graph, gradient_bytes, *others)
        accumulated_bytes = self.accumulated_bytes(graph)
        if gradient_bytes < accumulated_bytes:
            self._plan(graph, accumulated_bytes, *others)
        found = self._plan(graph, gradient_bytes, *others)
        self._has_largest |= is_largest
        return found

    def room_of(self, solution: Solution) -> Room:
        """Returns the budget that one of these solutions was made for, with its reserved parts."""
        return next(room for _, known, room in self._known.values() if known is solution)

    def accumulated_bytes(self, graph: Graph) -> int:
        """Returns the size of the gradients from the second micro-step on.

        It is 0 where DDP keeps them in its buckets.
        """
        if not self.options.is_accumulating or are_gradients_in_buckets():
            return 0
        return sum(v.size_bytes for v in graph.values if v.kind is ValueKind.PARAMETER)

    def _plan(
        self, graph: Graph, gradient_bytes: int, unplanned_bytes: int, gap_bytes: int
    ) -> Solution:
        key = computation_of(graph), _reserved(gradient_bytes, unplanned_bytes, gap_bytes)
        if key not in self._known:
            room = self._room(graph, gradient_bytes, unplanned_bytes, gap_bytes)
            self._known[key] = (graph, *self._solve(graph, room, key[0]))
            _LOG.info("%s", _plan_text(graph, *self._known[key][1:]))
        return self._known[key][1]

    def _take(
        self,
        known: Solution,
        graph: Graph,
        gradient_bytes: int,
        unplanned_bytes: int,
        gap_bytes: int,
    ) -> Solution:
        key = computation_of(graph), _reserved(gradient_bytes, unplanned_bytes, gap_bytes)
        room = self._room(graph, gradient_bytes, unplanned_bytes, gap_bytes)
        solution = replace(known, budget_bytes=room.plan_bytes).on(graph)
        self._known[key] = (graph, solution, room)
        return solution

    def _room(
        self, graph: Graph, gradient_bytes: int, unplanned_bytes: int, gap_bytes: int
    ) -> Room:
        keep_all_bytes = (
            keep_all_peak(graph)
            + max(gradient_bytes, self.accumulated_bytes(graph))
            + gap_bytes
            + bucket_bytes()
            + self.options.reserve_bytes
            + self._library_bytes
        )
        self._keep_all_bytes = max(self._keep_all_bytes, keep_all_bytes)
        asked = self.options.budget
        assert asked is not None or self._card_bytes, "the GPU is looked at before a capture"

        budget_bytes = (
            self._card_bytes
            if asked is None
            else parse_budget(asked, keep_all_bytes=self._keep_all_bytes)
        )
        return Room(
            asked=asked,
            budget_bytes=budget_bytes,
            keep_all_bytes=self._keep_all_bytes,
            gradient_bytes=gradient_bytes,
            reserve_bytes=self.options.reserve_bytes,
            bucket_bytes=bucket_bytes(),
            gap_bytes=unplanned_bytes + gap_bytes,
            library_bytes=self._library_bytes,
        )

    def _solve(self, graph: Graph, room: Room, computation: str) -> tuple[Solution, Room]:
        """Returns the plan of the largest shape, if declared, or else the ranks' common plan.

        If there is neither, it returns the first micro-step's plan, if that may be used.

        The ranks, the disk and the solver are no list of sources to try in turn: each one gets the
        next as a function, calls it or not, and keeps its answer. The ranks first agree which of
        them looks (`solve_once`), and send its answer to the others; that rank reads the disk,
        and writes there what the solver finds (`PlanCache.get_or_solve`).
        """
        earlier = self._earlier(graph, room, computation)
        if earlier.fitting and self._has_largest:
            return earlier.fitting, room

        try:
            return self._of_all_ranks(graph, room, earlier), room
        except BudgetError:
            first = self._before_gradients(room, computation)
            if first is None:
                raise
            return first

    def _of_all_ranks(self, graph: Graph, room: Room, earlier: Earlier) -> Solution:
        """Returns the plan that one rank finds, in the cache or by a solver, for all of them."""
        options = self.options
        # without the share of time: ranks with and without earlier plans share an answer
        asked = (
            f"{room.budget_bytes} {room.held_bytes} {options.solver} {options.gap} "
            f"{options.time_limit_s}"
        )
        look = partial(self._of_the_cache, graph, room, earlier, asked)
        return solve_once(graph, asked, look, time_limit_s=options.time_limit_s)

    def _of_the_cache(self, graph: Graph, room: Room, earlier: Earlier, asked: str) -> Solution:
        time_limit_s = self.options.time_limit_s * earlier.share_of_time
        solve = partial(self._of_a_solver, graph, room, earlier, time_limit_s)
        if self._cache is None:
            return solve()
        # a plan depends on the time limit, and on whether the solver's loops are compiled
        how = f"{asked} {time_limit_s} {IS_COMPILED}"
        return self._cache.get_or_solve(graph, room.plan_bytes, how, solve)

    def _of_a_solver(
        self, graph: Graph, room: Room, earlier: Earlier, time_limit_s: float
    ) -> Solution:
        """Returns the solver's schedule, or the fitting one if that is cheaper or the only one."""
        try:
            solved = solve_in(
                room,
                graph,
                solver=self.options.solver,
                time_limit_s=time_limit_s,
                gap=self.options.gap,
                near=earlier.near,
            )
        except BudgetError:
            if earlier.fitting is None:
                raise
            return earlier.fitting
        return earlier.or_cheaper(solved)

    def _before_gradients(self, room: Room, computation: str) -> tuple[Solution, Room] | None:
        """Returns the first micro-step's plan, if gradients accumulate without `is_accumulating`.

        Only for a percentage: the gradients are added to its budget, with a warning.
        """
        if not (is_percentage(room.asked) and room.gradient_bytes) or self.options.is_accumulating:
            return None
        entry = self._known.get((computation, room.gap_bytes + room.bucket_bytes))
        if entry is None:
            return None

        _, solution, before = entry
        _LOG.warning(
            "the budget of %s leaves no room for a plan and %s of accumulated gradients: "
            "the first micro-step's plan stays in use, and the gradients come on top of its "
            "budget; give is_accumulating=True for one budget for all micro-steps",
            room.budget_text(),
            describe_bytes(room.gradient_bytes),
        )

        budget_bytes = before.budget_bytes + room.gradient_bytes
        return replace(solution), replace(
            before, budget_bytes=budget_bytes, gradient_bytes=room.gradient_bytes
        )

    def _earlier(self, graph: Graph, room: Room, computation: str) -> Earlier:
        near = (
            solution
            for (known, _), (_, solution, before) in self._known.items()
            if known == computation and before.gradient_bytes == room.gradient_bytes
        )
        plans = ((other, solution) for other, solution, _ in self._known.values())
        return Earlier(cheapest_fitting(plans, graph, room.plan_bytes), tuple(near))


def _reserved(*size_bytes: int) -> int:
    """Returns what is reserved for one step: these bytes, and DDP's buckets."""
    return sum(size_bytes) + bucket_bytes()


def _plan_text(graph: Graph, solution: Solution, room: Room) -> str:
    """Returns a plan in one line: its budget, its peak and its overhead."""
    keep_all_bytes = keep_all_peak(graph)
    asked = room.asked if isinstance(room.asked, str) else format_bytes(room.budget_bytes)
    return (
        f"planned for {asked}: the step holds {format_bytes(solution.peak_bytes)} of "
        f"{format_bytes(solution.budget_bytes)}; keeping everything takes "
        f"{format_bytes(keep_all_bytes)}; {solution.verdict}"
    )
