"""The functions that a user calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from remat.core.budget import Budget, parse_budget
from remat.core.errors import ScheduleError, TraceError
from remat.core.graph import Graph
from remat.core.room import Room
from remat.core.schedule import keep_all_peak
from remat.core.solution import Solution
from remat.face.blocks import PlannedBlocks, remove_blocks
from remat.face.executors import install
from remat.face.planned_module import PlannedCall
from remat.face.step_function import PlannedFunction, StepFunction, as_step, planned_step
from remat.face.tracing import check_traced, trace_for, trace_kernels, trace_operators
from remat.face.tracing import trace_step as trace_step
from remat.look.report import Report
from remat.pieces.recording import JoinedPlan
from remat.plan.distributed import planned_part
from remat.plan.fixed_plan import FixedPlan
from remat.plan.planner import Options, Plans
from remat.plan.solving import solve_in
from remat.run.other_outputs import check_differentiate
from remat.run.plain_steps import OnUnsupported
from remat.solvers import Solver, make_solver
from remat.solvers.auto.frontier import frontier_solutions
from remat.torch_border.modules import get_call, set_call
from remat.tracers.costs import CostModel
from remat.tracers.devices import device as device_named

Model = TypeVar("Model", bound=Callable[..., Any])  # a module, or a step function


def checkpoint(
    model: Model,
    budget: Budget | None = None,
    *,
    blocks: Iterable[nn.Module] | None = None,
    reserve_bytes: int = 0,
    solver: str | Solver = "auto",
    costs: str | CostModel = "profile",
    time_limit_s: float = 60.0,
    gap: float = 0.005,
    executor: str = "eager",
    differentiate: str = "scalars",
    plan_cache: bool = True,
    is_accumulating: bool = False,
    on_unsupported: OnUnsupported = "error",
) -> Model:
    """Makes `model` train inside a memory budget, and returns it: the same object.

    Give a function if the loss is computed outside of the module, or if a step calls several
    modules, or one module several times:
    `step = checkpoint(lambda x, y: criterion(model(x), y), "8GiB")`. One plan covers everything
    that it calls. The function is not changed; a callable with its signature is returned.

    The step is captured, planned and rewritten at the first call with gradients enabled. Outputs,
    gradients, buffers and random numbers are those of the plain model. Under `torch.no_grad()` the
    plain module runs.

    Each new input shape is captured and planned once. If the schedule of another shape fits it, as
    for the last batch of an epoch, planning takes at most a tenth of `time_limit_s`. Sizes that
    `torch._dynamo.mark_dynamic(tensor, dim, max=...)` declares on the inputs of the first call are
    planned at their largest, and smaller ones use that schedule at once.

    Args:
        model: any module; its class, parameters and `state_dict` keys stay. Or a function, bound
            method or `functools.partial` that returns the loss: its modules are found in its
            closure, its bound object, its arguments, and by the names in its code.
        budget: bytes, or "8GiB", "7.5GB", "60%" (of the peak of keeping everything, at the largest
            shape so far, including the reserve and accumulated gradients). It bounds the peak of
            everything that the step holds: parameters, buffers, inputs, activations, gradients,
            workspace, and the reserve. None, on a GPU: what the GPU has when the first step is
            planned, minus a sixteenth of its memory (at least 512 MiB), which is kept free.
        blocks: submodules, such as `model.layers`. Only they are captured and planned, the code
            between them runs unchanged, and the budget covers the whole step. Use it for parameters
            sharded by FSDP2 (call this first, then `fully_shard` each block and the model), and for
            DDP, which then sends a block's gradients while the backward still runs.
        reserve_bytes: part of the budget kept free for what is not in the step, such as optimizer
            state. Gradients of earlier micro-steps are counted separately.
        solver: a name (`remat.SOLVER_NAMES`) or a solver.
        costs: "profile" times each distinct operator on this machine's device, once, and stores the
            times on disk; "roofline", "roofline:H100" and "flops" are computed; or a cost model.
        time_limit_s: time limit of planning.
        gap: planning stops once the cost is proved to be within this fraction of the optimum.
        executor: "eager" runs the rewritten step operator by operator, in exactly the planned
            memory. "inductor" compiles it to fused kernels as `torch.compile` does, which run in
            the plan's order. Their peak is known before the first step; if it is above the budget,
            the step is planned again with less. "auto" uses Inductor's kernels on a GPU, and for a
            module that was compiled before; elsewhere, or if the kernels can't run, "eager".
        differentiate: "scalars" plans for gradients of the scalar outputs (the loss), if there are
            any; "all" plans for gradients of every output.
        plan_cache: whether plans are written to the user's cache folder (`remat doctor` says
            where), and read from there.
        is_accumulating: whether gradients of earlier micro-steps are held in all but the first
            micro-step of each training step. If True, plans leave room for them from the first step
            on. If False, they are noticed in the second micro-step, and from then on percentages
            refer to a step that includes them.
        on_unsupported: what to do with a backward that no plan can run: one with `retain_graph` or
            `create_graph`, or a second one through another loss of the same step. "error" refuses
            it. "plain" runs the forward again and computes the backward as plain PyTorch does, with
            the same numbers and one warning; that step is not held to the budget, and the next step
            runs planned. Buffers that the step changes are copied; the budget counts the copies.

    Raises:
        ValueError, TypeError: a malformed budget or option, or no budget on a CPU, at once.
        BudgetError: at the first call, if the budget can't be met; the error names one that can.
        TraceError: at the first call, if the step can't be captured.
    """
    step = _step_of(model)
    options = Options(
        budget,
        reserve_bytes,
        solver,
        costs,
        time_limit_s,
        gap,
        executor,
        differentiate,
        plan_cache,
        is_accumulating,
        on_unsupported,
    )

    part, plans = planned_part(step), Plans(options)
    if blocks is not None:
        _refuse_blocks(step, on_unsupported)
        call: PlannedCall = PlannedBlocks(part, blocks, plans, costs)
    else:
        call = PlannedCall(
            part, plans, costs, differentiate=differentiate, on_unsupported=on_unsupported
        )
    install(part, call, is_inductor=call.is_inductor)
    return _what_runs(model, step)


def wrap(
    model: Model,
    solution: Solution,
    *,
    costs: str | CostModel = "roofline",
    differentiate: str = "scalars",
    on_unsupported: OnUnsupported = "error",
) -> Model:
    """Makes `model` run exactly the schedule of `solution`, and returns it: the same object.

    For a function, a callable with its signature is returned. With `on_unsupported="plain"`, the
    copies that it needs have to fit into the budget alongside the plan.

    Raises:
        ScheduleError: at once, if the solution has no schedule; at the first call, if it was made
            for another model, shape, precision or torch version, or is invalid.
        BudgetError: at the first call, if the schedule exceeds the solution's budget: peak and cost
            are computed again, whatever the solution says.
    """
    step = _step_of(model)
    check_differentiate(differentiate)
    if solution.schedule is None:
        raise ScheduleError(
            f"this solution has no schedule to run: its status is {solution.status}; solve for a "
            "larger budget, or with a longer time limit"
        )

    part, plan = planned_part(step), FixedPlan(solution)
    call = PlannedCall(
        part, plan, costs, differentiate=differentiate, on_unsupported=on_unsupported
    )
    install(part, call, is_inductor=call.is_inductor)
    return _what_runs(model, step)


def unwrap(model: Model) -> Model:
    """Undoes `checkpoint` or `wrap`, and returns the plain model or function: the same object."""
    step = planned_step(model)
    if step is not None:
        remove_blocks(step)
        set_call(planned_part(step), None)
    return cast(Model, model.__wrapped__) if isinstance(model, PlannedFunction) else model


def _step_of(model: Any) -> nn.Module:
    """Returns the module to plan; that of a planned function, as its calls left it."""
    step = planned_step(model)
    return as_step(model) if step is None else step


def _what_runs(model: Model, step: nn.Module) -> Model:
    """Returns what runs the step: the given module, or a callable in place of the function."""
    if isinstance(step, StepFunction) and not isinstance(model, PlannedFunction):
        return cast(Model, PlannedFunction(step))
    return model


def _refuse_blocks(step: nn.Module, on_unsupported: OnUnsupported) -> None:
    if on_unsupported == "plain":
        raise ValueError(
            'on_unsupported="plain" works for a step that is planned as one graph, and blocks= '
            "makes several; leave one of them out"
        )

    if isinstance(step, StepFunction):
        raise ValueError(
            "blocks= plans the blocks of one module, and a function was given; give the module "
            "that the blocks are in, or leave blocks= out to plan everything the function calls"
        )


def trace(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str = "",
    costs: str | CostModel = "roofline",
    autocast: torch.dtype | None = None,
    differentiate: str = "scalars",
    executor: str = "eager",
) -> Graph:
    """Returns the graph of one training step of `model(*args, **kwargs)`.

    Runs on fake copies of parameters, buffers and inputs: nothing is allocated, and the model is
    not changed. If `torch.compile` cuts the step into pieces, they are joined into one graph; the
    code between them, such as a `print`, then runs once, on fake tensors.

    Args:
        model: any module, or a step function.
        args: its inputs; real, meta or fake.
        kwargs: its keyword inputs.
        device: a name in the device table, such as "H100". The step is traced as that device would
            run it, as far as that can be known here, with sizes rounded as its allocator does. If
            empty, the device of the model.
        costs: see `checkpoint`; "roofline" is that of `device`.
        autocast: the dtype of `torch.autocast` on `device`; without `device`, an autocast around
            the call applies.
        differentiate: see `checkpoint`.
        executor: "eager" for the operators, "inductor" for the kernels that `checkpoint` plans with
            that executor. Their peak is close to the compiled code's, which is known only after
            compiling. `device` must then be one of this machine.

    Raises:
        ValueError: an unknown device or executor, `autocast` without a device, or costs measured on
            this machine for another device.
        TraceError: the step can't be captured, has nothing to differentiate, or needs data between
            two pieces.
    """
    check_traced(executor)
    if autocast is not None and not device:
        raise ValueError(
            "autocast= is the dtype of autocast on device=, and no device was given; put "
            "torch.autocast around the call, or name a device"
        )

    target = device_named(device) if device else None
    if executor == "inductor":
        return trace_kernels(
            target, model, args, kwargs, costs=costs, autocast=autocast, differentiate=differentiate
        )

    if target:
        return trace_for(
            target, model, args, kwargs, costs=costs, autocast=autocast, differentiate=differentiate
        )

    return trace_operators(model, args, kwargs, costs=costs, differentiate=differentiate)


def solve(
    graph: Graph,
    budget: Budget,
    *,
    solver: str | Solver = "auto",
    time_limit_s: float = 60.0,
    gap: float = 0.005,
    reserve_bytes: int = 0,
    progress: Callable[[Any], None] | None = None,
) -> Solution:
    """Returns a schedule within the budget, its cost, and a proved lower bound.

    Args:
        graph: from `trace`, `Graph.load` or `Graph.from_arrays`.
        budget: bytes, "8GiB", or "60%" of the peak of keeping everything and the reserve.
        solver: a name (`remat.SOLVER_NAMES`) or a solver; "free-order" may also reorder first
            computations, and `wrap` does not run its schedules.
        time_limit_s: time limit; the solver stops earlier, once `gap` is proved.
        gap: the solver stops once the cost is proved to be within this fraction of the optimum.
        reserve_bytes: part of the budget that the schedule may not use.
        progress: called from time to time with elapsed seconds, best cost and bound, and the
            techniques that found and proved them.

    Raises:
        BudgetError: no schedule was found that fits; `minimum_bytes` is a budget that can be met.
        ValueError, TypeError: a malformed budget, an unknown solver.
    """
    keep_all = keep_all_peak(graph) + reserve_bytes
    budget_bytes = parse_budget(budget, keep_all_bytes=keep_all)
    room = Room(budget, budget_bytes, keep_all, reserve_bytes=reserve_bytes)
    return solve_in(
        room, graph, solver=solver, time_limit_s=time_limit_s, gap=gap, progress=progress
    )


def frontier(
    graph: Graph,
    budgets: Sequence[Budget] | int = 12,
    *,
    solver: str | Solver = "auto",
    time_limit_s: float = 6.0,
) -> list[Solution]:
    """Returns the memory/compute trade-off: one solution per budget.

    Costs and bounds are monotone in the budget.

    Args:
        graph: from `trace`, `Graph.load` or `Graph.from_arrays`.
        budgets: a list of budgets; or their number, spread from the smallest budget found to the
            peak of keeping everything.
        solver: a name (`remat.SOLVER_NAMES`) or a solver.
        time_limit_s: time limit of one solve; `auto` shares results between budgets, so 20 budgets
            take at most four and a half time limits.
    """
    method = make_solver(solver, time_limit_s=time_limit_s) if isinstance(solver, str) else solver
    if isinstance(budgets, int):
        return frontier_solutions(graph, budgets, method)
    keep_all = keep_all_peak(graph)
    return frontier_solutions(
        graph, [parse_budget(budget, keep_all_bytes=keep_all) for budget in budgets], method
    )


def report(model: Callable[..., Any]) -> Report:
    """Returns the report of a planned model or function after its first step.

    Print it, or read its fields.

    Raises:
        TraceError: the model was not planned, or has not run a step yet.
    """
    step = planned_step(model)
    call = None if step is None else get_call(planned_part(step))
    name = getattr(model, "__qualname__", type(model).__name__)
    if not isinstance(call, PlannedCall):
        raise TraceError(
            f"{name} has no plan; call remat.checkpoint(model, budget=...) first, and for a "
            "function, pass the callable that it returned"
        )

    if call.piecewise is not None and call.piecewise.plan is not None:
        return _report_in_pieces(call, tuple(call.piecewise.breaks), call.piecewise.plan)

    if not call.pieces:
        raise TraceError(
            f"{name} has not run yet; its plan is made at the first call with gradients enabled"
        )

    last = call.pieces[-1]
    return Report(
        call.outside.with_loss(last.graph),
        last.solution,
        last.meter.peak_bytes,
        call.captured_s,
        room=call.plan.room_of(last.solution),
        cuda_peaks=last.meter.cuda_peaks,
        outside_bytes=call.outside.held_bytes,
        whole_peak_bytes=last.meter.whole.peak_bytes if last.meter.whole else None,
        kernels_peak_bytes=last.kernels_peak_bytes,
        executor=call.executor.text(),
    )


def _report_in_pieces(call: PlannedCall, breaks: tuple[str, ...], plan: JoinedPlan) -> Report:
    return Report(
        plan.step.graph,
        plan.solution,
        plan.meter.peak_bytes,
        call.captured_s,
        breaks,
        len(plan.step.runs),
        plan.unplanned_bytes,
        call.plan.room_of(plan.solution),
        plan.meter.cuda_peaks,
        kernels_peak_bytes=plan.kernels_peak_bytes,
        executor=call.executor.text(),
    )
