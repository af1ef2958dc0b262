"""Planned modules: what `checkpoint` and `wrap` put behind `module(...)`, and the `torch.compile` backend."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from . import torch_private
from .budget import Budget, describe_bytes, parse_budget
from .capture import GraphBreak, Piece, device_type, make_backend, needs_gradient
from .distributed import bucket_bytes, refuse_sharded, solve_once
from .errors import BudgetError, RematError, ScheduleError, TraceError
from .graph import Graph
from .piecewise import Piecewise, Step
from .schedule import Schedule, simulate
from .solution import Solution, Status
from .solvers import Solver, make_solver
from .tracers.costs import CostModel, resolve_costs


@dataclass(frozen=True)
class Options:
    """How a step is planned.

    Attributes:
        budget: bytes, or a text such as "8GiB" or "60%".
        reserve_bytes: held back from the budget for what the step can't see (optimizer state).
        solver: name of a solver, or a solver.
        costs: name of a cost model, or a cost model.
        time_limit_s: how long the solver may take.
        gap: the solver stops as soon as it proved this gap.
        executor: "eager" runs the rewritten step operator by operator.
        differentiate: "scalars" or "all", see `make_backend`.
    """

    budget: Budget
    reserve_bytes: int = 0
    solver: str | Solver = "auto"
    costs: str | CostModel = "profile"
    time_limit_s: float = 60.0
    gap: float = 0.005
    executor: str = "eager"
    differentiate: str = "scalars"

    def __post_init__(self) -> None:
        parse_budget(self.budget, keep_all_bytes=1 << 60)
        if self.reserve_bytes < 0:
            raise ValueError(f"reserve_bytes={self.reserve_bytes} is negative")
        if self.executor != "eager":
            raise ValueError(f'executor={self.executor!r} is not there; "eager" is')


def solve_graph(
    graph: Graph,
    budget: Budget,
    *,
    solver: str | Solver = "auto",
    time_limit_s: float = 60.0,
    gap: float = 0.005,
    reserve_bytes: int = 0,
    progress: Callable[[Any], None] | None = None,
) -> Solution:
    """Returns the solution for `graph`, or raises `BudgetError` where there is none."""
    if time_limit_s <= 0:
        raise ValueError(f"time_limit_s={time_limit_s} is not positive")
    keep_all = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    budget_bytes = parse_budget(budget, keep_all_bytes=keep_all) - reserve_bytes
    method = make_solver(solver, time_limit_s=time_limit_s, gap=gap, progress=progress) if isinstance(solver, str) else solver
    solution = method.solve(graph, budget_bytes=budget_bytes)
    if solution.is_solved:
        return solution
    raise _budget_error(graph, solution, reserve_bytes)


def _budget_error(graph: Graph, solution: Solution, reserve_bytes: int) -> BudgetError:
    is_proved = solution.status is Status.INFEASIBLE
    minimum_bytes = (solution.minimum_bytes or _minimum_bytes(graph)) + reserve_bytes
    budget_bytes = solution.budget_bytes + reserve_bytes
    what = "no schedule fits" if is_proved else f"{solution.solver} found no schedule that fits"
    reserved = f" (of which {describe_bytes(reserve_bytes)} are reserved)" if reserve_bytes else ""
    held = f"; parameters, buffers and inputs alone hold {describe_bytes(graph.resident_bytes)}" if graph.resident_bytes else ""
    return BudgetError(
        f"{what} in the budget {describe_bytes(budget_bytes)}{reserved}: the least known to do is {describe_bytes(minimum_bytes)}{held}. "
        "Raise the budget to at least that, or take a smaller batch.",
        budget_bytes=budget_bytes,
        minimum_bytes=minimum_bytes,
        is_proved=is_proved,
    )


def _minimum_bytes(graph: Graph) -> int:
    from .solvers.minimum import minimum

    return minimum(graph).peak_bytes


class Plans:
    """Plans by graph: the same step at another place, or compiled again, is not solved again."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._known: dict[tuple[Graph, int], Solution] = {}

    def __call__(self, step: Step, *, unplanned_bytes: int = 0) -> Solution:
        """Returns the solution for a captured step, the same on all ranks; `unplanned_bytes` are held back beside the reserve."""
        key = step.graph.fingerprint
        held_bytes = self.options.reserve_bytes + unplanned_bytes + bucket_bytes()
        found = next((s for (g, held), s in self._known.items() if held == held_bytes and g.fingerprint == key and g == step.graph), None)
        if found is None:
            found = self._known[step.graph, held_bytes] = self._solve(step.graph, held_bytes)
        return found

    def _solve(self, graph: Graph, held_bytes: int) -> Solution:
        options, keep_all = self.options, simulate(graph, Schedule.keep_all(graph)).peak_bytes
        budget_bytes = parse_budget(options.budget, keep_all_bytes=keep_all + bucket_bytes())

        def solve() -> Solution:
            return solve_graph(
                graph,
                budget_bytes,
                solver=options.solver,
                time_limit_s=options.time_limit_s,
                gap=options.gap,
                reserve_bytes=held_bytes,
            )

        asked = f"{budget_bytes} {held_bytes} {options.solver} {options.gap} {options.time_limit_s}"
        return solve_once(graph, asked, solve, time_limit_s=options.time_limit_s)


@dataclass(frozen=True)
class FixedPlan:
    """One solution for one graph; any other graph is refused."""

    solution: Solution

    def __call__(self, step: Step, *, unplanned_bytes: int = 0) -> Solution:
        """Returns the solution where it was made for this very step."""
        if unplanned_bytes:
            raise BudgetError(
                f"this plan predicts {describe_bytes(self.solution.peak_bytes)}, and between its compiled pieces the step holds "
                f"{describe_bytes(unplanned_bytes)} more than its budget; solve for a budget that is smaller by so much",
                budget_bytes=self.solution.budget_bytes,
                minimum_bytes=self.solution.budget_bytes + unplanned_bytes,
                is_proved=False,
            )
        if self.solution.schedule is None:
            raise ScheduleError(f"this solution has no schedule to run: its status is {self.solution.status}")
        if step.graph.fingerprint != self.solution.fingerprint:
            raise ScheduleError(
                f"this plan is for another step: it was made for graph {self.solution.fingerprint}, and this model with this input is "
                f"graph {step.graph.fingerprint} ({step.graph.num_operators} operators); trace and solve again with this model, "
                "these shapes, this precision and this torch version"
            )
        return self.solution


class PlannedCall:
    """What `module(...)` runs after `checkpoint` or `wrap`.

    Without gradients the plain module runs; with them its planned step, captured at the first call
    and again for every new shape. A module that can't be captured whole runs piece by piece.
    """

    def __init__(self, module: nn.Module, plan: Plans | FixedPlan, costs: str | CostModel, *, differentiate: str) -> None:
        self.module, self.plan = module, plan
        self.costs = resolve_costs(costs, device_type(module))
        self.pieces: list[Piece] = []
        self.piecewise: Piecewise | None = None
        self.captured_s = 0.0
        backend = make_backend(plan, self.costs, self.pieces.append, differentiate=differentiate, model_bytes=model_bytes(module))
        self._compiled = compile_call(module, backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the planned step, or the plain module under `no_grad`."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return torch_private.call_plain(self.module, *args, **kwargs)
        if not self.pieces and self.piecewise is None:
            return self._first_call(args, kwargs)
        return self._run(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module is a plain module: its plan stays with the original."""
        return

    def _first_call(self, args: Any, kwargs: Any) -> Any:
        check_gradient(self.module, args, kwargs)
        if self.piecewise is None:
            refuse_sharded(self.module)
        start = time.perf_counter()
        result = self._run(args, kwargs)
        self.captured_s = time.perf_counter() - start
        if not self.pieces and not (self.piecewise and self.piecewise.plans):
            raise TraceError(nothing_to_differentiate(self.module))
        return result

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self.piecewise is None:
            try:
                return run_compiled(self._compiled, args, kwargs)
            except GraphBreak as found:
                self.piecewise = Piecewise(self.module, self.plan, self.costs)
                self.piecewise.breaks[found.place] = None
                self._compiled = compile_call(self.module, self.piecewise.backend, is_whole=False)
        return self.piecewise.run(lambda: run_compiled(self._compiled, args, kwargs), tensors_in(args, kwargs))


def tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the tensors among a call's arguments."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def model_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers on the module's device, shared ones once, as the device's allocator rounds them."""
    kind, rounded_to = device_type(module), 512 if device_type(module) == "cuda" else 1
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.device.type == kind]
    sizes = {torch_private.local_part(t).untyped_storage()._cdata: torch_private.held_bytes(t) for t in tensors}
    return sum(-(-size // rounded_to) * rounded_to for size in sizes.values())


def compile_call(module: nn.Module, backend: Any, *, is_whole: bool = True) -> Callable[..., Any]:
    """Returns `module(...)` compiled, as one graph or in pieces, through a frame of its own.

    Dynamo leaves frames of torch's own modules alone, so `nn.Sequential` as a root would never be
    captured; and it keeps what it compiled by code object, which here belongs to this module only.
    The module is an argument: dynamo keeps a frame's globals for good (`CleanupManager`, torch 2.13).
    """
    _install_capturing_hooks(module)
    namespace: dict[str, Any] = {"call_plain": torch_private.call_plain}
    exec("def step(self, /, *args, **kwargs):\n    return call_plain(self, *args, **kwargs)", namespace)
    return partial(torch.compile(namespace["step"], backend=backend, fullgraph=is_whole, dynamic=False), module)


def _install_capturing_hooks(module: nn.Module) -> None:
    """Does what models of `transformers` 5 do in their first call, under a lock that dynamo can't enter; once a model."""
    library = sys.modules.get("transformers.utils.output_capturing")
    if library is None:
        return
    for part in module.modules():
        if isinstance(part, sys.modules["transformers.modeling_utils"].PreTrainedModel):
            library.maybe_install_capturing_hooks(part)


def check_gradient(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raises `TraceError` where neither a parameter nor an input asks for a gradient."""
    if not needs_gradient(module, tensors_in(args, kwargs)):
        raise TraceError(nothing_to_differentiate(module))


def nothing_to_differentiate(module: nn.Module) -> str:
    """The message for a step without a backward."""
    return (
        f"{type(module).__name__} has nothing to differentiate: no parameter or input that leads to its outputs has requires_grad=True, "
        "so there is no backward to save memory for; unfreeze a parameter, or call the module under torch.no_grad()"
    )


def run_compiled(compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a compiled function; what goes wrong in capturing or planning comes out as our own error."""
    try:
        with torch_private.capture_settings():
            return compiled(*args, **kwargs)
    except Exception as error:
        cause = torch_private.unwrap_failure(error)
        if isinstance(cause, RematError):
            raise cause from None
        if torch_private.is_graph_break(error):
            first = str(error).strip().split("\n\n")[0]
            raise GraphBreak(
                f"torch.compile can't capture this step as one graph: {first}\n"
                "Rewrite the line it names, or take it out of the forward (run with TORCH_LOGS=graph_breaks for the place).",
                first.split("\n")[0],
            ) from error
        if cause is not error:  # a backend's failure: AOTAutograd could not trace the step, or we could not
            raise TraceError(f"this step can't be traced and planned: {type(cause).__name__}: {cause}") from error
        raise


@dataclass
class BackendState:
    """What the `torch.compile` backend planned, for tests and reports."""

    pieces: list[Piece] = field(default_factory=list)


BACKEND_STATE = BackendState()


def backend(module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The `torch.compile` backend `remat`: `torch.compile(model, backend="remat", options={"budget": "8GiB"})`.

    Options are those of `remat.checkpoint`. The first one, `budget`, is needed.
    """
    given = dict(kwargs.get("options") or {})
    if "budget" not in given:
        raise ValueError('the backend "remat" needs a budget: torch.compile(model, backend="remat", options={"budget": "8GiB"})')
    options = Options(**given)
    if bucket_bytes() and torch_private.is_ddp_optimizer_on():
        raise TraceError(
            "inside of DistributedDataParallel torch.compile cuts the graph along its buckets, and one budget is for one graph; set "
            "torch._dynamo.config.optimize_ddp = False, or use remat.checkpoint"
        )
    reason = torch_private.compile_reason(module)
    if reason is not None and reason.graph_break:
        raise TraceError(
            f"the step has a graph break ({reason.reason}), and this door plans one graph at a time; remat.checkpoint plans the pieces together"
        )
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    costs = resolve_costs(options.costs, "cuda" if any(t.is_cuda for t in tensors) else "cpu")
    inner = make_backend(Plans(options), costs, BACKEND_STATE.pieces.append, differentiate=options.differentiate)
    return inner(module, example_inputs)  # type: ignore[no-any-return]
