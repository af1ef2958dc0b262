"""Runs a step in pieces: records it once, plans it as one graph, runs each piece by that plan.

The first step finds the pieces. In it, each piece runs with the least memory known, and copies its
inputs and results, since eager code may change them later. At the end of the forward, all runs are
joined into one graph (`joiner`), which is planned under one budget. From the next step on, each
piece runs its part of the plan. If a forward leaves the path of the last one, its remaining pieces
run with the least memory, and its new path is planned for later steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from remat.core.errors import BudgetError, TraceError
from remat.core.schedule import Schedule
from remat.core.solution import Solution
from remat.pieces.break_messages import (
    NOT_COMPILED,
    break_text,
    is_by_data,
    naming_breaks,
    nothing_compiled,
)
from remat.pieces.captured_piece import Copied, Piece, signature
from remat.pieces.compiled_piece import as_part_of, boxed, released
from remat.pieces.eager_backward import eager_backward
from remat.pieces.frames import OwnFrames
from remat.pieces.joined_step import JoinedStep, Run, warn_of_first_step
from remat.pieces.joiner import join
from remat.pieces.over_budget import keep_within_budget
from remat.pieces.recording import JoinedPlan, Path, Session
from remat.pieces.step_meter import StepMeter
from remat.pieces.step_planner import StepPlanner
from remat.pieces.unplanned_memory import gradient_bytes, resident_values, tensors_of
from remat.plan.distributed import Agreement, bucket_bytes
from remat.plan.planner import Plans
from remat.run.capture import check_joint, compiled_by_aot, refuse_uncapturable
from remat.run.changed_results import SharedResults
from remat.run.cuda_graphs import refuse_new_step
from remat.run.executor import compile_graph
from remat.run.hooked_results import results_read_by_others
from remat.run.module_device import device_type
from remat.torch_border.autograd import SavedTensors
from remat.torch_border.cuda_allocator import turn_of
from remat.torch_border.dynamo import compile_reason
from remat.tracers.costs import CostModel
from remat.tracers.recomputable import are_inference

Compile = Callable[..., Callable[..., Any]]


class Piecewise:
    """Records the pieces that `torch.compile` cuts a module into, plans them together, runs them.

    Attributes:
        module: the module.
        plan_of: returns the solution for a joined step; None where a step is only traced.
        costs: the cost model of the graphs.
        breaks: why the step is cut, and where.
        follows_data: two steps of the same shapes may take different paths.
        plans: the plan for each path and each size of gradients that earlier steps left.
        last: the path of the last forward with inputs of these shapes.
        plan: the plan of that path.
        joined: the step that was joined last.
        shared: the results of pieces whose memory the pieces save for their backward.
        make_piece: the class of its pieces.
        compile: compiles a dynamo graph, given its inputs, compilers of the halves, a partitioner.
        adjust: adds the memory of parameters that are gathered and freed, given a joined step and
            its number of resident values.
    """

    make_piece: type[Piece] = Piece
    compile: Compile = staticmethod(compiled_by_aot)

    def __init__(self, module: nn.Module, plan: StepPlanner | None, costs: CostModel) -> None:
        self.module, self.plan_of, self.costs = module, plan, costs
        self.device_type = device_type(module)
        self.is_trace = plan is None

        self.breaks: dict[str, None] = {}
        self.follows_data = False
        self.plans: dict[tuple[Path, int], JoinedPlan] = {}
        self.last: Path = ()
        self._last_of: dict[tuple[Any, ...], Path] = {}  # by the shapes of the inputs
        self._bucket_bytes = 0  # of DDP, when the plans were made
        self.plan: JoinedPlan | None = None
        self.joined: JoinedStep | None = None
        self.adjust: Callable[[JoinedStep, int], JoinedStep] = lambda joined, num_resident: joined

        self._pieces: dict[str, Piece] = {}
        self.shared = SharedResults()
        self._owner = object()  # of the meters of all its plans
        self._frames = OwnFrames(module)
        self._local = threading.local()

    @property
    def is_running(self) -> bool:
        """True while this thread runs a forward of the module."""
        return getattr(self._local, "session", None) is not None

    @property
    def session(self) -> Session:
        """The forward that this thread runs."""
        session: Session | None = getattr(self._local, "session", None)
        if session is None:
            raise TraceError(
                "a piece of a planned step was called outside of its module's forward; call the "
                "module itself"
            )
        return session

    @property
    def meter(self) -> StepMeter:
        """The meter of the last step's plan."""
        return self.plan.meter if self.plan else _NO_METER

    def backend(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The `torch.compile` backend: makes a piece from each graph."""
        refuse_uncapturable(module)
        self._note_break(compile_reason(module))
        read = results_read_by_others(module)
        pieces: list[Piece] = []
        # AOTAutograd keeps the functions below
        forward, backward = released(self.run_forward), released(self.run_backward)
        make_piece = released(self._piece)
        # not the inputs themselves: the compiled piece would keep them alive
        inference = are_inference(example_inputs)

        def partition(
            joint: fx.GraphModule,
            joint_inputs: Any,
            *,
            num_fwd_outputs: int,
            static_lifetime_input_indices: Any = None,
            **_: Any,
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            check_joint(joint, inference)
            pieces.append(make_piece(joint, num_fwd_outputs, static_lifetime_input_indices or ()))

            step = pieces[-1].step(frozenset())
            halves = pieces[-1].split(frozenset(), Schedule.keep_all(step.graph))
            return halves.forward, halves.backward

        def compile_forward(graph: fx.GraphModule, _: Any) -> Any:
            if not pieces:
                return compile_graph(graph)
            return boxed(partial(forward, pieces[-1], SavedTensors()))

        def compile_backward(graph: fx.GraphModule, _: Any) -> Any:
            return boxed(partial(backward, pieces[-1]))

        compiled = self.compile(
            module, example_inputs, compile_forward, compile_backward, partition
        )
        return as_part_of(self, compiled, read) if pieces else compiled

    def _piece(
        self, joint: fx.GraphModule, num_forward: int, static_inputs: Sequence[int]
    ) -> Piece:
        """Returns the piece for a joint graph: a known piece, if that computes the same.

        Dynamo compiles a piece again for another Python value, even if the graph stays the same.
        """
        piece = self.make_piece(
            joint,
            num_forward,
            static_inputs,
            self.costs,
            device_type=self.device_type,
            is_trace=self.is_trace,
        )

        text = signature(piece)
        return self._pieces.setdefault(text, piece) if text else piece

    def _note_break(self, reason: Any) -> None:
        if reason is not None and reason.graph_break:
            self.breaks[break_text(reason)] = None
            self.follows_data |= is_by_data(reason)

    def run_forward(self, piece: Piece, saved: SavedTensors, args: list[Any]) -> Any:
        """Runs the planned forward half.

        The first tensor that it saves has no elements; its shape stores which halves run.
        """
        session = self.session
        number = session.begin(piece, args)
        results = piece.halves(number)[0](args)
        session.end(results[: piece.num_forward])
        self.shared.note((piece, number), results, piece.num_forward)

        token = torch.empty((0, number, 0))
        if session.plan:
            session.plan.meter.saved(token, results[piece.num_forward :])
        saved.expect(len(results) - piece.num_forward + 1)
        return (*results[: piece.num_forward], token, *results[piece.num_forward :])

    def returned(self, results: Sequence[Any]) -> None:
        """Notes what the caller of a piece got, so that changes of it are noticed."""
        if not self.is_trace:
            self.session.returned(results)
            self.shared.watch(results)

    def run_backward(self, piece: Piece, args: list[Any]) -> Any:
        """Runs the backward half of the forward that saved `args`."""
        token = args.pop(piece.num_numbers)
        _, number, _ = token.shape
        self._note_turn()
        return self.meter.backward(piece.halves(number)[1], args, piece.tangents.num, token)

    def run(self, call: Callable[[], Any], inputs: Sequence[Any]) -> Any:
        """Runs one forward with `call`, and plans its path if that is new.

        Args:
            call: runs the compiled module.
            inputs: the tensors among the module's arguments.
        """
        self._note_turn()
        keep_within_budget(self.plans, self.install)
        if bucket_bytes() != self._bucket_bytes:  # DDP wraps the module since the last step
            self.plans.clear()
            self._bucket_bytes = bucket_bytes()
        for known in self.plans.values():
            known.meter.forget()

        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        self.last = self._last_of.get(shapes, self.last)
        is_planned, kind = isinstance(self.plan_of, Plans), self.device_type
        held_bytes = gradient_bytes(self.module, kind, inputs) if is_planned else 0
        plan = self._plan_beside(held_bytes)
        session = Session(plan, self.last)
        with self._open(session), self._frames.installed():
            result = plan.meter.forward(call, inputs) if plan else call()

        path = tuple(session.pieces)
        if not path and session.expects_pieces and _needs_gradient(result):
            raise TraceError(
                NOT_COMPILED if self.plans else nothing_compiled(self.module, self.breaks)
            )

        if plan and path != self.last:
            plan.meter.forget()
        if path and (path, held_bytes) not in self.plans:
            self._plan(session, result, inputs, held_bytes)
        self.last, self.plan = path, self.plans.get((path, held_bytes))
        self._last_of[shapes] = path
        return result

    def _note_turn(self) -> None:
        if self.device_type == "cuda":
            turn_of(self._owner)

    def _plan_beside(self, held_bytes: int) -> JoinedPlan | None:
        """Returns the plan of the last path for `held_bytes` of gradients.

        A path that only has a plan for another size of gradients is planned again.
        """
        other = next((plan for (path, _), plan in self.plans.items() if path == self.last), None)
        if other is not None and (self.last, held_bytes) not in self.plans:
            self.install(self.last, other.copies, other.step, held_bytes, other.unplanned_bytes)
        return self.plans.get((self.last, held_bytes))

    @contextmanager
    def _open(self, session: Session) -> Any:
        before = getattr(self._local, "session", None)
        self._local.session = session
        try:
            yield
        finally:
            self._local.session = before

    def _plan(self, session: Session, result: Any, inputs: Sequence[Any], held_bytes: int) -> None:
        results = [tensor for tensor in tensors_of(result) if tensor.layout == torch.strided]
        storages = frozenset(t.untyped_storage()._cdata for t in results)
        resident = resident_values(self.module, inputs, self.device_type)
        eager = eager_backward(results, inputs, self.device_type)

        def joined_with(copies: Sequence[Copied]) -> JoinedStep:
            runs = [
                Run(piece.step(copied), *places)
                for piece, copied, places in zip(
                    session.pieces, copies, session.places, strict=True
                )
            ]
            return self.adjust(join(runs, storages, resident, eager), len(resident))

        copies = self._copies(session)
        self.joined = joined_with(copies)
        if self.plan_of is None:
            return

        firsts = [piece.first for piece in session.pieces if piece.first is not None]
        planned = self.install(tuple(session.pieces), copies, self.joined, held_bytes)
        if len(firsts) == len(session.pieces):
            warn_of_first_step(
                planned.solution,
                joined_with([copied for copied, _ in firsts]),
                [schedule for _, schedule in firsts],
            )

    def _copies(self, session: Session) -> list[Copied]:
        """Returns what each run copies: tensors changed after it in the recorded forward.

        If data decides the path, each run copies everything that could be changed. Without that,
        another path may change a tensor that an earlier piece saved without a copy, for example if
        an expert adds to the result of the experts before it; autograd then refuses the backward.
        """
        if session.has_turned and not self.follows_data:
            self.follows_data = True
            self.plans.clear()
        if not self.follows_data or self.is_trace:
            return session.changed()
        return [piece.first[0] if piece.first else frozenset() for piece in session.pieces]

    def install(
        self,
        path: Path,
        copies: Sequence[Copied],
        joined: JoinedStep,
        held_bytes: int,
        unplanned_bytes: int = 0,
        kernels_room_bytes: int = 0,
        known: Solution | None = None,
    ) -> JoinedPlan:
        """Plans a path, whose runs make `copies`, with room for `held_bytes` of gradients.

        `known` is its plan, if that fits.
        """
        refuse_new_step()
        solution = self._solution(joined, held_bytes, unplanned_bytes, kernels_room_bytes, known)
        assert solution.schedule is not None, "planners answer with a schedule or raise"
        schedules = joined.schedules(solution.schedule)
        numbers = tuple(
            piece.number(copied, own)
            for piece, copied, own in zip(path, copies, schedules, strict=True)
        )
        meter = StepMeter(joined.graph.device, joined.graph.resident_bytes, owner=self._owner)
        excess = Agreement(f"{joined.graph.fingerprint}/{solution.budget_bytes}/{unplanned_bytes}")

        planned = JoinedPlan(
            joined,
            solution,
            numbers,
            tuple(copies),
            held_bytes,
            unplanned_bytes,
            meter,
            excess,
            self.kernels_peak_bytes(path, numbers, joined, solution.schedule),
            kernels_room_bytes,
        )

        self.plans[path, held_bytes] = planned
        return planned

    def _solution(
        self,
        joined: JoinedStep,
        held_bytes: int,
        gap_bytes: int,
        kernels_room_bytes: int,
        known: Solution | None,
    ) -> Solution:
        assert self.plan_of is not None
        try:
            return self.plan_of(
                joined,
                gradient_bytes=held_bytes,
                gap_bytes=gap_bytes,
                unplanned_bytes=kernels_room_bytes,
                known=known,
            )
        except BudgetError as error:
            raise naming_breaks(error, self.breaks) from None

    def kernels_peak_bytes(
        self, path: Path, numbers: Sequence[int], joined: JoinedStep, schedule: Schedule
    ) -> int | None:
        """Returns the peak of the fused kernels that run a plan; None where there are none."""
        del path, numbers, joined, schedule
        return None


_NO_METER = StepMeter("cpu", 0)


def _needs_gradient(result: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_of(result))
