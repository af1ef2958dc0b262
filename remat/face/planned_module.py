"""Planned modules.

What `checkpoint` and `wrap` put behind `module(...)`, and the `torch.compile` backend.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from remat.core.budget import describe_bytes
from remat.core.errors import BudgetError, RematError, TraceError
from remat.core.solution import Solution
from remat.face.outside_room import OutsideRoom
from remat.face.recaptures import Recaptures
from remat.pieces.break_messages import NOT_COMPILED
from remat.pieces.runner import Piecewise
from remat.pieces.unplanned_memory import gradient_bytes, tensors_of, there_bytes
from remat.plan.distributed import bucket_bytes, refuse_sharded
from remat.plan.fixed_plan import FixedPlan
from remat.plan.planner import Options, Plans
from remat.run.capture import (
    GraphBreak,
    PlannedStep,
    Step,
    device_type,
    make_backend,
    needs_gradient,
)
from remat.run.idle_hooks import IdleHooks
from remat.run.plain_steps import OnUnsupported, PlainSteps
from remat.run.refusals import nested_is_refused, refuse_modes
from remat.run.transformers_paths import install_capturing_hooks, plain_paths
from remat.torch_border.dynamo import (
    capture_settings,
    compile_frame,
    compile_reason,
    failure_text,
    is_ddp_optimizer_on,
    is_graph_break,
    largest_shape,
    unwrap_failure,
    without_dynamic_marks,
)
from remat.torch_border.fakes import on_fakes
from remat.torch_border.layouts import dense_parts
from remat.torch_border.modes import active_modes
from remat.torch_border.modules import OwnCall, call_plain, get_call, set_call
from remat.torch_border.other_compiles import (
    is_met_by_another_compile,
    keep_plans,
    own_capture,
    uncompiled,
)
from remat.torch_border.sharded import held_bytes, local_part
from remat.tracers.aot import TracedStep
from remat.tracers.cost_models import resolve_costs
from remat.tracers.costs import CostModel

_LOG = logging.getLogger(__name__)


def install(module: nn.Module, call: OwnCall) -> None:
    """Makes `module(...)` run `call`, whatever compiles the module from now on."""
    keep_plans()
    if get_call(module) is not None and not isinstance(get_call(module), OwnCall):
        _LOG.warning(
            "%s was compiled by model.compile(), which its plan replaces; for compiled kernels "
            'within the plan write executor="inductor"',
            type(module).__name__,
        )
    set_call(module, call)


class PlannedCall(OwnCall):
    """What `module(...)` runs after `checkpoint` or `wrap`.

    Without gradients the plain module runs; with them its planned step, captured at the first call
    and again for every new shape. A step that finds gradients at the parameters, which accumulate,
    has a plan of its own that leaves room for them. A module that can't be captured whole runs
    piece by piece.
    """

    _in_pieces: Callable[..., Any]  # the compiled module, once it runs in pieces

    def __init__(
        self,
        module: nn.Module,
        plan: Plans | FixedPlan,
        costs: str | CostModel,
        *,
        differentiate: str,
        on_unsupported: OnUnsupported = "error",
    ) -> None:
        self.module, self.plan = module, plan
        self.on_unsupported: OnUnsupported = on_unsupported
        self._plain_steps = PlainSteps.asked(on_unsupported, type(module).__name__)
        self.device_type, self.differentiate = device_type(module), differentiate
        self._costs_asked, self.costs = costs, resolve_costs(costs, self.device_type)
        self.pieces: list[PlannedStep] = []
        self.piecewise: Piecewise | None = None
        self.captured_s = 0.0
        self.unplanned_bytes = 0  # what Inductor's kernels hold and no plan knows
        self.outside = OutsideRoom(module, is_fixed=isinstance(plan, FixedPlan))
        # bytes of gradients that earlier steps left -> the step
        self._whole: dict[int, Callable[..., Any]] = {}
        self._frame = new_frame()
        self._recaptures = Recaptures(type(module).__name__)
        # a fixed plan is for the graph in which every number is a constant
        self._numbers_are_inputs = isinstance(plan, Plans) and not self.is_inductor

    @property
    def is_inductor(self) -> bool:
        """True where Inductor runs the plan."""
        return isinstance(self.plan, Plans) and self.plan.options.executor == "inductor"

    def _keep_within_budget(self) -> None:
        """Plans again where Inductor's kernels held more than the budget.

        It frees memory in an order of its own.
        """
        peaks = [
            (step.meter.peak_bytes or 0, step.solution.budget_bytes + self.unplanned_bytes)
            for step in self.pieces
        ]
        excess = max((peak - allowed for peak, allowed in peaks), default=0)
        if excess > 0:
            _LOG.warning(
                "Inductor's kernels held %s more than the budget; planning again with less",
                describe_bytes(excess),
            )
            self.unplanned_bytes += excess
            self._forget_plans()

    def _forget_plans(self) -> None:
        self.pieces.clear()
        self._whole.clear()
        self.outside.forget()

    def _leave_room_outside(self) -> None:
        """Plans again where the step that the module is part of held more than the budget."""
        try:
            is_too_little = self.outside.is_too_little(self.unplanned_bytes)
        except BudgetError:
            self._forget_plans()  # smaller batches may do
            raise
        if is_too_little:
            self._forget_plans()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the planned step, or the plain module under `no_grad`.

        Where another `torch.compile` meets it, it is a graph break there, and runs as planned.
        """
        if is_met_by_another_compile():
            return uncompiled(self, args, kwargs)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return call_plain(self.module, *args, **kwargs)

        refuse_modes(active_modes())
        try:
            return self._planned(args, kwargs)
        except RematError as error:
            # the frames in between say nothing
            raise error.with_traceback(None) from error.__cause__

    def _planned(self, args: Any, kwargs: Any) -> Any:
        if not self.pieces and self.piecewise is None:
            return self._first_call(args, kwargs)
        if self.is_inductor:
            self._keep_within_budget()
        if self.outside.is_open:
            self._leave_room_outside()
        return self._run(args, kwargs)

    def anew(self) -> PlannedCall:
        """Returns one for the same module, whose parts or their devices changed."""
        return PlannedCall(
            self.module,
            self.plan,
            self._costs_asked,
            differentiate=self.differentiate,
            on_unsupported=self.on_unsupported,
        )

    def _first_call(self, args: Any, kwargs: Any) -> Any:
        check_module(self.module, args, kwargs)
        if self.piecewise is None:
            refuse_sharded(self.module)
        if isinstance(self.plan, Plans):
            inputs = tensors_in(args, kwargs)
            self.plan.look_at_card(
                self.device_type, lambda: there_bytes(self.module, inputs, self.device_type)
            )
        start = time.perf_counter()
        self._plan_largest(args, kwargs)
        result = self._run(args, kwargs)
        self.captured_s = time.perf_counter() - start
        if not self.pieces and not (self.piecewise and self.piecewise.plans):
            is_left_plain = any(tensor.requires_grad for tensor in tensors_of(result))
            raise TraceError(
                NOT_COMPILED if is_left_plain else nothing_to_differentiate(self.module)
            )
        return result

    def _plan_largest(self, args: Any, kwargs: Any) -> None:
        """Plans for the largest sizes that the inputs declare, whose schedule then is that of every
        smaller one.
        """
        tensors = tensors_in(args, kwargs)
        if isinstance(self.plan, FixedPlan) or not any(largest_shape(tensor) for tensor in tensors):
            return
        largest = pytree.tree_map_only(torch.Tensor, _at_its_largest, (args, kwargs))
        try:
            step = captured_step(
                self.module,
                *largest,
                costs=self.costs,
                differentiate=self.differentiate,
                on_device_type=self.device_type,
            )
        except GraphBreak:  # pieces are found in a real step only
            return
        self.plan(step, is_largest=True)

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self.outside.is_open:
            self.outside.forward_begins()
        with without_dynamic_marks(tensors_in(args, kwargs)):
            result = self._run_static(args, kwargs)
        if self.outside.is_open:
            self.outside.await_backward(tensors_of(result), tensors_in(args, kwargs))
        self._recaptures.settle()
        return result

    def _run_static(self, args: Any, kwargs: Any) -> Any:
        if self.piecewise is not None:
            return self._run_pieces(self.piecewise, self._in_pieces, args, kwargs)
        try:
            return self._run_whole(args, kwargs)
        except GraphBreak as found:
            if self.is_inductor:
                raise
            piecewise = Piecewise(self.module, self.plan, self.costs)
            piecewise.breaks[found.place] = None
        in_pieces = compile_call(
            self.module,
            piecewise.backend,
            is_whole=False,
            frame=self._frame,
            on_recapture=self._recaptures.note,
        )
        result = self._run_pieces(piecewise, in_pieces, args, kwargs)
        # not where that fails as well: a wrong shape says nothing of the next step
        self.piecewise, self._in_pieces = piecewise, in_pieces
        return result

    @staticmethod
    def _run_pieces(
        piecewise: Piecewise, in_pieces: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        return piecewise.run(
            lambda: run_compiled(in_pieces, args, kwargs, is_whole=False), tensors_in(args, kwargs)
        )

    def _run_whole(self, args: Any, kwargs: Any) -> Any:
        """Runs the step as one graph.

        Where one capture succeeded and the next one does not, with numbers as inputs, each of their
        values is captured by itself from now on.
        """

        def run(*, numbers_are_inputs: bool) -> Any:
            step = self._whole_step()
            return run_compiled(step, args, kwargs, numbers_are_inputs=numbers_are_inputs)

        try:
            return run(numbers_are_inputs=self._numbers_are_inputs)
        except TraceError as failure:
            if not (self._numbers_are_inputs and self.pieces):
                raise
            _LOG.info("a number can't become an input of the step: %s", failure)
        result = run(numbers_are_inputs=False)
        self._numbers_are_inputs = False
        return result

    def _whole_step(self) -> Callable[..., Any]:
        """The step as one graph, planned beside the gradients that there are."""
        held_bytes = gradient_bytes(self.module) if isinstance(self.plan, Plans) else 0
        if held_bytes not in self._whole:
            self._whole[held_bytes] = compile_call(
                self.module,
                self._backend(held_bytes),
                frame=self._frame,
                on_recapture=self._recaptures.note,
            )
        return self._whole[held_bytes]

    def _backend(self, held_bytes: int) -> Any:
        call = weakref.ref(self)  # dynamo keeps each backend for good

        def planned() -> PlannedCall:
            found = call()
            assert found is not None, "what is captured is called"
            return found

        make = make_backend
        if self.is_inductor:
            # Inductor takes seconds to import
            from remat.run.inductor import make_inductor_backend as make
        return make(
            lambda step, **beside: planned()._plan(step, held_bytes, **beside),
            self.costs,
            lambda step: planned()._note(step),
            differentiate=self.differentiate,
            model_bytes=lambda: model_bytes(planned().module),
            plain_steps=self._plain_steps,
        )

    def _plan(self, step: Step, held_bytes: int, *, unplanned_bytes: int = 0) -> Solution:
        """The plan beside gradients that are held, and what no plan knows."""

        def plan(step: Step, room_bytes: int) -> Solution:
            return self.plan(
                step,
                gradient_bytes=held_bytes,
                unplanned_bytes=self.unplanned_bytes + unplanned_bytes,
                gap_bytes=room_bytes,
            )

        return self.outside.plan(step, plan)

    def _note(self, step: PlannedStep) -> None:
        self.pieces.append(step)
        self.outside.note(step)


def _at_its_largest(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory, of the largest sizes that `tensor` declares.

    Itself where it declares none.
    """
    shape = largest_shape(tensor)
    if not shape:
        return tensor
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def captured_step(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    *,
    costs: str | CostModel,
    differentiate: str,
    on_device_type: str = "",
) -> TracedStep:
    """Captures one step on fake copies of parameters, buffers and inputs, and runs nothing."""
    captured: list[TracedStep] = []

    def plan(step: Step) -> Solution:
        assert isinstance(step, TracedStep), "what is captured on fakes is one graph"
        captured.append(step)
        raise _CapturedError

    model_costs = resolve_costs(costs, on_device_type or device_type(model))
    with on_fakes(model, args, kwargs, on_device_type) as (fake_args, fake_kwargs):
        backend = make_backend(
            plan,
            model_costs,
            lambda _: None,
            differentiate=differentiate,
            model_bytes=partial(model_bytes, model),
        )
        compiled = compile_call(model, backend)
        try:
            run_compiled(compiled, fake_args, fake_kwargs, numbers_are_inputs=False)
        except Exception as error:
            if not isinstance(unwrap_failure(error), _CapturedError):
                raise
    if not captured:
        raise TraceError(nothing_to_differentiate(model))
    return captured[0]


class _CapturedError(RematError):
    """Ends a trace once the graph is there: nothing has to run."""


def tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the tensors among a call's arguments."""
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def model_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers on the module's device, shared ones once, as the device's
    allocator rounds them.
    """
    kind, rounded_to = device_type(module), 512 if device_type(module) == "cuda" else 1
    held = (part for t in (*module.parameters(), *module.buffers()) for part in dense_parts(t))
    tensors = [tensor for tensor in held if tensor.device.type == kind]
    sizes = {local_part(t).untyped_storage()._cdata: held_bytes(t) for t in tensors}
    return sum(-(-size // rounded_to) * rounded_to for size in sizes.values())


def compile_call(
    module: nn.Module,
    backend: Any,
    *,
    is_whole: bool = True,
    frame: str = "",
    on_recapture: Callable[[str], None] = _LOG.debug,
) -> Callable[..., Any]:
    """Returns `module(...)` compiled, as one graph or in pieces, through a frame of its own.

    Dynamo leaves frames of torch's own modules alone, so `nn.Sequential` as a root would never be
    captured; and it keeps what it compiled by code object, which here belongs to this module only.
    The module is an argument: dynamo keeps a frame's globals for good (`CleanupManager`, torch
    2.13). `frame` names the frame's file: by it dynamo knows which numbers changed before, so that
    frames of one module share a name, and those of two don't.
    """
    install_capturing_hooks(module)
    namespace: dict[str, Any] = {"call_plain": call_plain}
    source = "def step(self, /, *args, **kwargs):\n    return call_plain(self, *args, **kwargs)"
    exec(compile(source, frame or new_frame(), "exec"), namespace)
    step = namespace["step"]
    compiled = compile_frame(step, backend, is_whole=is_whole, on_recapture=on_recapture)
    if not is_whole:  # eager parts may be checkpointed, which needs what hooks ask for
        return partial(compiled, module)

    hooks = IdleHooks(module)

    def run(*args: Any, **kwargs: Any) -> Any:
        with hooks.removed():
            return compiled(module, *args, **kwargs)

    return run


def new_frame() -> str:
    """Returns a file's name for the frames of one planned module."""
    return f"<remat frame {next(_FRAMES)}>"


_FRAMES = itertools.count()


def check_module(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raises `TraceError` where neither a parameter nor an input asks for a gradient, or a
    parameter has no shape yet.
    """
    if any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise TraceError(
            f"{type(module).__name__} has lazy modules whose parameters get their shapes from "
            "a first batch; "
            "run it once under torch.no_grad() before it is planned"
        )
    if any(tensor.is_nested for tensor in tensors_in(args, kwargs)):
        raise TraceError(nested_is_refused("an argument"))
    if not needs_gradient(module, tensors_in(args, kwargs)):
        raise TraceError(nothing_to_differentiate(module))


def nothing_to_differentiate(module: nn.Module) -> str:
    """The message for a step without a backward."""
    return (
        f"{type(module).__name__} has nothing to differentiate: no parameter or input that "
        "leads to its outputs has requires_grad=True, "
        "so there is no backward to save memory for; unfreeze a parameter, or call the module "
        "under torch.no_grad()"
    )


def run_compiled(
    compiled: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    is_whole: bool = True,
    numbers_are_inputs: bool = True,
) -> Any:
    """Calls a compiled function.

    What goes wrong in capturing or planning comes out as our own error. Numbers that change become
    inputs, see `capture_settings`.

    Raises:
        GraphBreak: it is no one graph.
        TraceError: it can't be compiled, nor in pieces where `is_whole` is false; or it can't be
            planned.
    """
    try:
        with (
            capture_settings(numbers_are_inputs=numbers_are_inputs),
            own_capture(),
            plain_paths(),
        ):
            return compiled(*args, **kwargs)
    except Exception as error:
        cause = unwrap_failure(error)
        if isinstance(cause, RematError):
            raise cause from None
        if is_graph_break(error):
            why, place = failure_text(error)
            if not is_whole:
                raise TraceError(
                    f"torch.compile fails on this step, whole and in pieces: {why}{place}"
                ) from None
            raise GraphBreak(
                f"torch.compile can't capture this step as one graph: {why}{place}\n"
                "Rewrite the line it names, or take it out of the forward (run with "
                "TORCH_LOGS=graph_breaks for the place).",
                why.split("\n")[0] + place,
            ) from None
        # a backend's failure: AOTAutograd could not trace the step, or we could not
        if cause is not error:
            raise TraceError(
                f"this step can't be traced and planned: {type(cause).__name__}: {cause}"
            ) from error
        raise


@dataclass
class BackendState:
    """What the `torch.compile` backend planned, for tests and reports."""

    pieces: list[PlannedStep] = field(default_factory=list)


BACKEND_STATE = BackendState()


def backend(
    module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Callable[..., Any]:
    """The `torch.compile` backend `remat`.

    `torch.compile(model, backend="remat", options={"budget": "8GiB"})`.

    Options are those of `remat.checkpoint`. The first one, `budget`, is needed on a CPU.
    """
    options = Options(**{"budget": None, **(kwargs.get("options") or {})})
    if bucket_bytes() and is_ddp_optimizer_on():
        raise TraceError(
            "inside of DistributedDataParallel torch.compile cuts the graph along its "
            "buckets, and one budget is for one graph; set "
            "torch._dynamo.config.optimize_ddp = False, or use remat.checkpoint"
        )
    reason = compile_reason(module)
    if reason is not None and reason.graph_break:
        raise TraceError(
            f"the step has a graph break ({reason.reason}), and this door plans one graph at "
            "a time; "
            "remat.checkpoint plans the pieces together"
        )
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    plans, kind = Plans(options), "cuda" if any(t.is_cuda for t in tensors) else "cpu"
    plans.look_at_card(kind, lambda: there_bytes(module, tensors, kind))
    costs = resolve_costs(options.costs, kind)
    make = make_backend
    if options.executor == "inductor":
        from remat.run.inductor import make_inductor_backend as make
    inner = make(
        plans,
        costs,
        BACKEND_STATE.pieces.append,
        differentiate=options.differentiate,
        plain_steps=PlainSteps.asked(options.on_unsupported, "the compiled model"),
    )
    return inner(module, example_inputs)  # type: ignore[no-any-return]
