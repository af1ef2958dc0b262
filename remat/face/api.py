"""The functions a user calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from remat.core.budget import Budget, parse_budget
from remat.core.errors import ScheduleError, TraceError
from remat.core.graph import Graph
from remat.core.room import Room
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.face.blocks import PlannedBlocks, remove_blocks
from remat.face.planned_module import (
    PlannedCall,
    captured_step,
    check_module,
    compile_call,
    install,
    nothing_to_differentiate,
    run_compiled,
    tensors_in,
)
from remat.face.step_function import PlannedFunction, StepFunction, as_step, planned_step
from remat.look.report import Report
from remat.pieces.joined_step import JoinedStep
from remat.pieces.runner import Piecewise
from remat.plan.distributed import planned_part
from remat.plan.fixed_plan import FixedPlan
from remat.plan.planner import Options, Plans
from remat.plan.solving import solve_in
from remat.run.capture import GraphBreak, device_type
from remat.run.plain_steps import OnUnsupported
from remat.solvers import Solver, make_solver
from remat.solvers.auto.frontier import frontier_solutions
from remat.torch_border.fakes import on_fakes
from remat.torch_border.modules import get_call, set_call
from remat.torch_border.sharded import called_directly, ddps_in
from remat.tracers.aot import TracedStep
from remat.tracers.cost_models import resolve_costs, roofline
from remat.tracers.costs import CostModel
from remat.tracers.devices import Device
from remat.tracers.devices import device as device_named
from remat.tracers.retarget import as_on, retarget, traced_on

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

    A function is given where the loss is computed outside of the module, or a step calls several
    modules, or one several times: `step = checkpoint(lambda x, y: criterion(model(x), y), "8GiB")`.
    All that it calls is one plan. It stays as it is, and a callable with its signature is returned.

    The step is captured, planned and rewritten at the first call with gradients enabled. Outputs,
    gradients, buffers and the random stream stay those of the plain model. Under `torch.no_grad()`
    the plain module runs.

    A new input shape is captured and planned in turn; where the schedule of another shape fits, as
    for the last batch of an epoch, it is improved for a tenth of `time_limit_s` at most. Sizes that
    `torch._dynamo.mark_dynamic(tensor, dim, max=...)` declares on the inputs of the first call are
    planned for at their largest, and smaller ones take over that schedule at once.

    Args:
        model: any module; its class, parameters and `state_dict` keys stay. Or a function, bound
            method or `functools.partial` that returns the loss: its modules are found from what it
            closes over, is bound to, is given and names.
        budget: bytes, or "8GiB", "7.5GB", "60%" (of what the step needs where everything is kept,
            at the largest shape so far, with the reserve and with gradients that accumulate). It
            bounds the peak of everything the step holds: parameters, buffers, inputs, activations,
            gradients, workspace, and the reserve. None, on a GPU: what it has when the first step
            is planned, less a sixteenth of its memory (512 MiB at least) that is kept free.
        plan_cache: plans are kept in the user's cache folder (`remat doctor` says where) and found
            there again.
        blocks: submodules, such as `model.layers`: only they are captured and planned, what lies
            between them runs as it is, and the budget is over all. For parameters sharded by FSDP2
            (call this first, then `fully_shard` each block and the model), and for DDP, which then
            sends a block's gradients while the backward goes on.
        reserve_bytes: kept free for what the step can't see, such as optimizer state. Gradients of
            earlier micro-steps are counted by themselves.
        is_accumulating: gradients of earlier micro-steps are held in all but the first of each
            training step. Without it they are found in the second one, and what a percentage is of
            grows by them; with it the budget is known, and proved to hold, before the first step.
        solver: a name (`remat.SOLVER_NAMES`) or a solver.
        costs: "profile" times each distinct operator on this machine's device, once, and remembers
            it on disk; "roofline", "roofline:H100" and "flops" compute; or a cost model.
        time_limit_s: how long planning may take.
        gap: planning stops once the cost is proved to be within this fraction of the least.
        executor: "eager" runs the rewritten step operator by operator, in exactly the planned
            memory. "inductor" compiles it to fused kernels as `torch.compile` does; their memory is
            measured at the first step, and a step above its budget is planned again with less.
        differentiate: "scalars" plans for gradients of scalar outputs where there are any (the
            loss); "all" for every output.
        on_unsupported: what becomes of a backward that no plan can run: with `retain_graph` or
            `create_graph`, or a second one through another loss of the same step. "error" refuses
            it. "plain" computes it as plain PyTorch, with the forward run again, the same numbers
            and a warning, once; the memory of that step is not the plan's, and the next step runs
            planned. Buffers that the step changes are copied, which the budget counts.

    Raises:
        ValueError, TypeError: a malformed budget or option, at once; no budget on a CPU.
        BudgetError: at the first call, where the budget can't be met; it says what can.
        TraceError: at the first call, where the step can't be captured.
    """
    step = as_step(model)
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
    part = planned_part(step)
    if blocks is None:
        call = PlannedCall(
            part,
            Plans(options),
            costs,
            differentiate=differentiate,
            on_unsupported=on_unsupported,
        )
        install(part, call)
    else:
        _refuse_blocks(step, on_unsupported)
        install(part, PlannedBlocks(part, blocks, Plans(options), costs))
    return _runs(model, step)


def wrap(
    model: Model,
    solution: Solution,
    *,
    costs: str | CostModel = "roofline",
    differentiate: str = "scalars",
    on_unsupported: OnUnsupported = "error",
) -> Model:
    """Makes `model` run exactly the schedule of `solution`, and returns it: the same object.

    Of a function, a callable with its signature is returned. What `on_unsupported="plain"` keeps
    beside the plan has to fit into what that leaves of its budget.

    Raises:
        ScheduleError: the solution has no schedule, at once; or it was made for another model,
            shape, precision or torch version, or is broken, at the first call.
        BudgetError: the schedule holds more than the solution's own budget, at the first call;
            nothing of a file is believed.
    """
    step = as_step(model)
    if solution.schedule is None:
        raise ScheduleError(
            f"this solution has no schedule to run: its status is {solution.status}"
        )
    part = planned_part(step)
    call = PlannedCall(
        part,
        FixedPlan(solution),
        costs,
        differentiate=differentiate,
        on_unsupported=on_unsupported,
    )
    install(part, call)
    return _runs(model, step)


def unwrap(model: Model) -> Model:
    """Undoes `checkpoint` or `wrap`, and returns the plain model or function: the same object."""
    step = planned_step(model)
    if step is not None:
        remove_blocks(step)
        set_call(planned_part(step), None)
    return cast(Model, model.__wrapped__) if isinstance(model, PlannedFunction) else model


def _runs(model: Model, step: nn.Module) -> Model:
    """What runs the step: the module that was given, or a callable for the function."""
    if isinstance(step, StepFunction) and not isinstance(model, PlannedFunction):
        return cast(Model, PlannedFunction(step))
    return model


def _refuse_blocks(step: nn.Module, on_unsupported: OnUnsupported) -> None:
    if on_unsupported == "plain":
        raise ValueError(
            'on_unsupported="plain" is for a step that is planned as one graph, and blocks= plans '
            "several; leave one of them out"
        )
    if isinstance(step, StepFunction):
        raise ValueError(
            "blocks= plans the blocks of one module, and a function was given; give the module "
            "that the blocks are in, or leave blocks= out to plan all that the function calls"
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
) -> Graph:
    """Returns the graph of one training step of `model(*args, **kwargs)`, a module or a function.

    Runs on fake copies of parameters, buffers and inputs: nothing is allocated, nothing of the
    model changes. Where `torch.compile` cuts the step into pieces, they are joined to one graph;
    what lies between them, such as a `print`, then runs once, on fake tensors.

    Args:
        model: any module, or a step function.
        args: its inputs; real, meta or fake.
        kwargs: its keyword inputs.
        device: a name of the device table, "H100": the step as that would run it, as far as this
            machine can know, with sizes as its allocator rounds them. Where the model is if empty.
        costs: as of `checkpoint`; "roofline" is that of `device`.
        autocast: the type of `torch.autocast` that the step runs under on `device`; without a
            device it is what is set around the call.
        differentiate: as of `checkpoint`.

    Raises:
        ValueError: an unknown device; `autocast` without one; costs measured here for one.
        TraceError: the step can't be captured, has nothing to differentiate, or does between two
            pieces what needs data.
    """
    if device:
        return trace_for(
            device_named(device),
            model,
            args,
            kwargs,
            costs=costs,
            autocast=autocast,
            differentiate=differentiate,
        )
    if autocast is not None:
        raise ValueError(
            "autocast= says what the step runs under on device=, and none is given; put "
            "torch.autocast around the call, or name a device"
        )
    try:
        return trace_step(model, args, kwargs, costs=costs, differentiate=differentiate).graph
    except GraphBreak as found:
        return trace_pieces(model, args, kwargs, costs=costs, found=found).graph


def trace_for(
    device: Device,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    costs: str | CostModel,
    autocast: torch.dtype | None = None,
    differentiate: str = "scalars",
) -> Graph:
    """Returns the graph of a step as `device` would run it, there or not; see `trace`."""
    if costs == "profile":
        raise ValueError(
            f'costs="profile" times operators on this machine, and device={device.name!r} names '
            'one that may be another; take costs="roofline", or leave device= out'
        )
    with as_on(device.type, autocast=autocast):
        step = trace_step(
            model,
            args,
            kwargs,
            costs=roofline(device) if costs == "roofline" else costs,
            differentiate=differentiate,
            on_device_type=traced_on(device.type),
        )
    return retarget(step.graph, device.type)


def trace_step(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    costs: str | CostModel = "roofline",
    differentiate: str = "scalars",
    on_device_type: str = "",
) -> TracedStep:
    """Returns the graph together with the `torch.fx` graph it was read from; see `trace`.

    `on_device_type` moves the fake copies to `cpu` or `cuda`, wherever the model is.
    """
    if not isinstance(args, list | tuple):
        raise TypeError(
            f"args must be a tuple of the model's arguments, and a {type(args).__name__} was "
            "given; write args=(batch,)"
        )
    step = as_step(model, args, kwargs)
    check_module(step, args, kwargs or {})
    with called_directly(ddps_in(step)):
        return captured_step(
            step,
            args,
            kwargs or {},
            costs=costs,
            differentiate=differentiate,
            on_device_type=on_device_type,
        )


def trace_pieces(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    costs: str | CostModel,
    found: GraphBreak,
) -> JoinedStep:
    """Returns the pieces of a step that can't be captured whole, joined.

    `found` says why it can't.
    """
    step = as_step(model, args, kwargs)
    runner = Piecewise(step, None, resolve_costs(costs, device_type(step)))
    with (
        called_directly(ddps_in(step)),
        on_fakes(step, args, kwargs or {}) as (fake_args, fake_kwargs),
    ):
        compiled = compile_call(step, runner.backend, is_whole=False)
        try:
            runner.run(
                lambda: run_compiled(compiled, fake_args, fake_kwargs, numbers_are_inputs=False),
                tensors_in(fake_args, fake_kwargs),
            )
        except RuntimeError as error:
            raise GraphBreak(
                f"{found}\nIts pieces can't be traced without data either "
                f"({type(error).__name__}: {error}). "
                "remat.checkpoint finds them in the first real step.",
                found.place,
            ) from error
    if runner.joined is None:
        raise TraceError(nothing_to_differentiate(step))
    return runner.joined


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
    """Returns a schedule within the budget, its cost, and a proven lower bound.

    Args:
        graph: from `trace`, `Graph.load` or `Graph.from_arrays`.
        budget: bytes, "8GiB", or "60%" of the peak of keeping everything.
        solver: a name (`remat.SOLVER_NAMES`) or a solver; "free-order" lets first computations
            leave the graph's order too, which `wrap` does not run.
        time_limit_s: how long it may take; it stops earlier, once `gap` is proved.
        gap: a cost proved within this fraction of the least is good enough.
        reserve_bytes: held back from the budget.
        progress: called now and then with elapsed seconds, best cost and bound.

    Raises:
        BudgetError: no schedule is known that fits; `minimum_bytes` says what would.
        ValueError, TypeError: a malformed budget, an unknown solver.
    """
    keep_all = simulate(graph, Schedule.keep_all(graph)).peak_bytes + reserve_bytes
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
    """Returns the memory/compute trade-off.

    A solution a budget, costs and bounds monotone in the budget.

    Args:
        graph: from `trace`, `Graph.load` or `Graph.from_arrays`.
        budgets: budgets, or how many to take between the least known to be met and keeping
            everything.
        solver: a name (`remat.SOLVER_NAMES`) or a solver.
        time_limit_s: of one solve; `auto` shares what it finds, so that 20 budgets take at most
            some five of them.
    """
    method = make_solver(solver, time_limit_s=time_limit_s) if isinstance(solver, str) else solver
    if isinstance(budgets, int):
        return frontier_solutions(graph, budgets, method)
    keep_all = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    return frontier_solutions(
        graph, [parse_budget(budget, keep_all_bytes=keep_all) for budget in budgets], method
    )


def report(model: Callable[..., Any]) -> Report:
    """Returns the report of a model, or of what `checkpoint` made of a function, after its first
    step: print it, or read its fields.

    Raises:
        TraceError: the model was not planned, or has not run a step yet.
    """
    step = planned_step(model)
    call = None if step is None else get_call(planned_part(step))
    name = getattr(model, "__qualname__", type(model).__name__)
    if not isinstance(call, PlannedCall):
        raise TraceError(
            f"{name} has no plan; call remat.checkpoint(model, budget=...) first, and of a "
            "function give what it returns"
        )
    if call.piecewise is not None and call.piecewise.plan is not None:
        plan = call.piecewise.plan
        breaks = tuple(call.piecewise.breaks)
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
        )
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
    )
