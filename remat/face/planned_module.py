"""Planned modules: what `checkpoint` and `wrap` put behind `module(...)`."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from remat.core.budget import describe_bytes
from remat.core.errors import BudgetError, RematError, TraceError
from remat.core.solution import Solution
from remat.face.capturing import (
    captured_at_largest,
    check_module,
    compile_call,
    model_bytes,
    new_frame,
    nothing_to_differentiate,
    run_compiled,
    tensors_in,
)
from remat.face.executors import Before, chosen_executor
from remat.face.outside_room import OutsideRoom
from remat.face.recaptures import Recaptures, room_for
from remat.pieces.break_messages import NOT_COMPILED
from remat.pieces.compiled_piece import released
from remat.pieces.runner import Piecewise
from remat.pieces.unplanned_memory import gradient_bytes, tensors_of, there_bytes
from remat.plan.distributed import bucket_bytes, refuse_sharded
from remat.plan.fixed_plan import FixedPlan
from remat.plan.planner import Plans
from remat.run.capture import GraphBreak, PlannedStep, Step, make_backend
from remat.run.cuda_graphs import refuse_new_step
from remat.run.module_device import device_type, own_tensors, refuse_other_gpu
from remat.run.plain_steps import OnUnsupported, PlainSteps
from remat.run.refusals import refuse_modes
from remat.torch_border.dynamic_marks import without_dynamic_marks
from remat.torch_border.modes import active_modes
from remat.torch_border.modules import OwnCall, call_plain
from remat.torch_border.other_compiles import is_met_by_another_compile, uncompiled
from remat.torch_border.unguarded import unguarded
from remat.tracers.cost_models import resolve_costs
from remat.tracers.costs import CostModel

_LOG = logging.getLogger(__name__)


class PlannedCall(OwnCall):
    """What `module(...)` runs after `checkpoint` or `wrap`.

    Without gradients, the plain module runs. With gradients, its planned step runs, which is
    captured at the first call and for every new shape. If the parameters already have gradients,
    which accumulate, the step has another plan that leaves room for them. A module that can't be
    captured whole runs in pieces.
    """

    _in_pieces: Callable[..., Any]  # the compiled module, once it runs in pieces
    _settings: Hashable = None  # what dynamo does not guard, at the last call
    unplanned_bytes = 0  # what Inductor's kernels held above the budget

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
        self.outside = OutsideRoom(module, is_fixed=isinstance(plan, FixedPlan))

        # bytes of gradients left by earlier steps, of DDP's buckets; what is unguarded -> the step
        self._whole: dict[tuple[int, int, Hashable], Callable[..., Any]] = {}
        self._num_runs = 0  # of compiled graphs, in calls that ran as one graph
        self._frame = new_frame()
        self._recaptures = Recaptures(type(module).__name__)

        self.executor = chosen_executor(self._parts, plan, self.device_type)
        # a fixed plan was made for a graph in which every number is a constant
        self._numbers_are_inputs = isinstance(plan, Plans)

    @property
    def is_inductor(self) -> bool:
        """True if Inductor runs the plan."""
        return self.executor.name == "inductor"

    def _keep_within_budget(self) -> None:
        """Plans again if Inductor's kernels held more than the budget.

        That happens only if their memory could not be predicted.
        """
        excess = max((step.excess_bytes for step in self.pieces), default=0) - self.unplanned_bytes
        if excess > 0:
            _LOG.warning(
                "Inductor's kernels held %s more than the budget; "
                "planning again with a smaller budget",
                describe_bytes(excess),
            )
            self.unplanned_bytes += excess
            self._forget_plans()

    def _begin_anew(self) -> None:
        """Makes the next call plan like the first one."""
        self._forget_plans()
        self.piecewise = None

    def _forget_plans(self) -> None:
        self.pieces.clear()
        self._whole.clear()
        self.outside.forget()

    def _leave_room_outside(self) -> None:
        """Plans again if the whole step held more than the budget."""
        try:
            is_too_little = self.outside.is_too_little(self.unplanned_bytes)
        except BudgetError:
            self._forget_plans()  # smaller batches may fit
            raise
        if is_too_little:
            self._forget_plans()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the planned step, or the plain module under `no_grad`.

        Inside of another `torch.compile` it is a graph break, and runs as planned.
        """
        if is_met_by_another_compile():
            return uncompiled(self, args, kwargs)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return call_plain(self.module, *args, **kwargs)

        refuse_modes(active_modes())
        try:
            return self._planned(args, kwargs)
        except RematError as error:
            self.outside.forget_refused()
            # the frames in between don't help the user
            raise error.with_traceback(None) from error.__cause__

    @property
    def _is_begun(self) -> bool:
        """True once a step was planned, or runs in pieces."""
        return bool(self.pieces) or self.piecewise is not None

    def _planned(self, args: Any, kwargs: Any) -> Any:
        settings = unguarded(self.module)
        if self.piecewise is not None and settings != self._settings:
            self._begin_anew()
        self._settings = settings
        if self._is_begun:
            self._notice_move()
        if not self._is_begun:
            return self._first_call(args, kwargs)
        if self.is_inductor:
            self._keep_within_budget()
        if self.outside.is_open:
            self._leave_room_outside()
        return self._run(args, kwargs)

    def anew(self) -> PlannedCall:
        """Returns a new call for the same module, after its parts or their devices changed."""
        return PlannedCall(
            self.module,
            self.plan,
            self._costs_asked,
            differentiate=self.differentiate,
            on_unsupported=self.on_unsupported,
        )

    def _notice_move(self) -> None:
        """Forgets the plans if the module moved to another type of device since the last call."""
        if device_type(self.module) != self.device_type:
            self._begin_anew()
        elif self.device_type == "cuda":
            refuse_other_gpu(own_tensors(self.module), type(self.module).__name__)

    def _follow_device(self) -> None:
        """Takes device, costs and executor anew if the module moved after it was planned."""
        kind = device_type(self.module)
        refuse_other_gpu(own_tensors(self.module), type(self.module).__name__)
        if kind != self.device_type:
            self.device_type, self.costs = kind, resolve_costs(self._costs_asked, kind)
            self.executor = chosen_executor(self._parts, self.plan, kind)

    @property
    def _parts(self) -> Sequence[nn.Module]:
        """The modules whose calls are replaced."""
        return (self.module,)

    def _first_call(self, args: Any, kwargs: Any) -> Any:
        refuse_new_step()
        check_module(self.module, args, kwargs)
        self._follow_device()
        if self.piecewise is None:
            refuse_sharded(self.module)

        if isinstance(self.plan, Plans):
            inputs = tensors_in(args, kwargs)
            self.plan.look_at_card(
                self.device_type, lambda: there_bytes(self.module, inputs, self.device_type)
            )

        start = time.perf_counter()
        self._plan_largest(args, kwargs)
        # the first pieces of a step may have run when Inductor fails
        before = Before.of(self.module, self.device_type) if self.executor.may_give_up else None
        try:
            result = self._run(args, kwargs)
        except (BudgetError, TraceError) as failure:
            if before is None:
                raise
            self.executor.gives_up_kernels(failure)
            before.restore()
            self._forget_plans()
            result = self._run(args, kwargs)
        self.captured_s = time.perf_counter() - start
        self._check_planned(result)
        return result

    def _check_planned(self, result: Any) -> None:
        """Raises `TraceError` if the first call left nothing planned."""
        if not self.pieces and not (self.piecewise and self.piecewise.plans):
            is_left_plain = any(tensor.requires_grad for tensor in tensors_of(result))
            raise TraceError(
                NOT_COMPILED if is_left_plain else nothing_to_differentiate(self.module)
            )

    def _plan_largest(self, args: Any, kwargs: Any) -> None:
        """Plans for the largest sizes that the inputs declare, if they declare any.

        All smaller shapes use that schedule.
        """
        if isinstance(self.plan, FixedPlan):
            return

        options = {"differentiate": self.differentiate, "on_device_type": self.device_type}
        step = captured_at_largest(self.module, args, kwargs, costs=self.costs, **options)
        if step is not None:
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
            piecewise = self.executor.piecewise(self.module, self.plan, self.costs)
            piecewise.breaks[found.place] = None

        in_pieces = compile_call(
            self.module,
            released(piecewise.backend),
            is_whole=False,
            frame=self._frame,
            on_recapture=self._recaptures.note,
        )

        result = self._run_pieces(piecewise, in_pieces, args, kwargs)
        # set only after a success: a call that fails, say for a wrong shape, decides nothing
        self.piecewise, self._in_pieces = piecewise, in_pieces
        return result

    def _run_pieces(
        self, piecewise: Piecewise, in_pieces: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        call = partial(run_compiled, in_pieces, args, kwargs, is_whole=False)
        return piecewise.run(call, tensors_in(args, kwargs))

    def _run_whole(self, args: Any, kwargs: Any) -> Any:
        """Runs the step as one graph.

        If an earlier capture succeeded, and this one fails with numbers as inputs, each value of a
        number is captured separately from now on.
        """

        def run(*, numbers_are_inputs: bool) -> Any:
            step, num_runs = self._whole_step(tensors_in(args, kwargs)), self._num_runs
            result = run_compiled(step, args, kwargs, numbers_are_inputs=numbers_are_inputs)
            if self._num_runs == num_runs and self.pieces:
                given = set(map(id, tensors_in(args, kwargs)))
                made = (tensor for tensor in tensors_of(result) if id(tensor) not in given)
                if any(tensor.grad_fn is not None for tensor in made):
                    raise TraceError(NOT_COMPILED)
            return result

        try:
            return run(numbers_are_inputs=self._numbers_are_inputs)
        except TraceError as failure:
            if not (self._numbers_are_inputs and self.pieces):
                raise
            _LOG.info("the step can't be captured with numbers as inputs: %s", failure)

        result = run(numbers_are_inputs=False)
        self._numbers_are_inputs = False
        return result

    def _whole_step(self, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Returns the step as one graph, planned with room for the gradients that exist now."""
        held_bytes, others = 0, (bucket_bytes(), self._settings)
        if isinstance(self.plan, Plans):
            rooms = [room for room, *more in self._whole if tuple(more) == others]
            held_bytes = room_for(gradient_bytes(self.module, self.device_type, inputs), rooms)
        key = held_bytes, *others
        if key not in self._whole:
            self._whole[key] = compile_call(
                self.module,
                self._backend(held_bytes),
                frame=self._frame,
                on_recapture=self._recaptures.note,
            )
        return self._whole[key]

    def _backend(self, held_bytes: int) -> Any:
        call = weakref.ref(self)  # dynamo never releases a backend

        def planned() -> PlannedCall:
            found = call()
            assert found is not None, "a step is captured during a call"
            return found

        make: Callable[..., Any] = make_backend
        if self.is_inductor:
            # Inductor takes seconds to import
            from remat.inductor.backend import make_inductor_backend

            make = partial(
                make_inductor_backend,
                room_of=lambda solution: planned().plan.room_of(solution),
            )

        backend = make(
            lambda step, **beside: planned()._plan(step, held_bytes, **beside),
            self.costs,
            lambda step: planned()._note(step),
            differentiate=self.differentiate,
            model_bytes=lambda: model_bytes(planned().module),
            plain_steps=self._plain_steps,
        )

        def counted(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            compiled: Callable[..., Any] = backend(module, example_inputs)

            def run(*args: Any) -> Any:
                planned()._num_runs += 1
                return compiled(*args)

            return run

        return counted

    def _plan(
        self,
        step: Step,
        held_bytes: int,
        *,
        unplanned_bytes: int = 0,
        known: Solution | None = None,
    ) -> Solution:
        """Returns the plan of a step, with room for gradients and for unplanned memory."""

        def plan(step: Step, room_bytes: int) -> Solution:
            return self.plan(
                step,
                gradient_bytes=held_bytes,
                unplanned_bytes=self.unplanned_bytes + unplanned_bytes,
                gap_bytes=room_bytes,
                known=known,
            )

        return self.outside.plan(step, plan)

    def _note(self, step: PlannedStep) -> None:
        self.pieces.append(step)
        self.outside.note(step)
