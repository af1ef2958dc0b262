"""Running a step in pieces: recorded once, planned as one, each run with its own halves.

The first step finds the pieces. Until they are known each runs with the least memory it can do
with, and copies what it hands over, since what follows may change it. With the forward over, all
runs are joined to one graph (`joined_step`), planned under one budget, and from the next step on
each runs its part of the plan. A step that takes another path runs the rest of it with the least
memory, and is planned for the next time.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx, nn

from remat.core.budget import describe_bytes
from remat.core.errors import BudgetError, TraceError
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.pieces.break_messages import NOT_COMPILED, naming_breaks, nothing_compiled
from remat.pieces.captured_piece import Copied, Piece, signature
from remat.pieces.frames import OwnFrames
from remat.pieces.joined_step import JoinedStep, Place, Run, composed, join
from remat.pieces.step_meter import StepMeter
from remat.pieces.unplanned_memory import gradient_bytes, kept_by_eager, resident_values, tensors_of
from remat.plan.distributed import Agreement
from remat.plan.planner import Plans
from remat.run.autocast_cache import autocast_cache
from remat.run.capture import Step, cut_at_sizes, device_type
from remat.run.executor import BoxedFunction, compile_graph
from remat.run.plain_kernels import plain_kernels
from remat.run.refusals import refuse_nested, refuse_scans, refuse_what_has_no_size
from remat.run.rewrite import split
from remat.run.whole_step import note_planned
from remat.torch_border.autograd import aot_autograd, backward_without_autocast, is_compiled_node
from remat.torch_border.dynamo import compile_reason, without_leaf_warnings
from remat.torch_border.kernels import StorageWeakRef
from remat.torch_border.scalars import python_numbers, refuse_changing_sizes
from remat.torch_border.sharded import is_sharded
from remat.tracers.costs import CostModel
from remat.tracers.recomputable import mark_inference_inputs

_LOG = logging.getLogger(__name__)
Path = tuple[Piece, ...]  # the pieces that a forward ran, in order


class StepPlanner(Protocol):
    """Step -> solution.

    `gradient_bytes` are held back for gradients of earlier steps, `gap_bytes` for what runs between
    pieces.
    """

    def __call__(self, step: Step, *, gradient_bytes: int = 0, gap_bytes: int = 0) -> Solution:
        """Returns the solution for a step."""


@dataclass
class JoinedPlan:
    """The plan of one path.

    Attributes:
        step: the joined step.
        solution: its solution.
        numbers: which halves each run takes.
        copies: what each run copies, since something outside changes it.
        gradient_bytes: held back for the gradients of earlier steps.
        unplanned_bytes: held back for what runs between the pieces.
        meter: measures the first step that runs the plan.
        excess: what that step held beyond its budget, agreed on by all ranks.
    """

    step: JoinedStep
    solution: Solution
    numbers: tuple[int, ...]
    copies: tuple[Copied, ...]
    gradient_bytes: int
    unplanned_bytes: int
    meter: StepMeter
    excess: Agreement


class Session:
    """One forward: which pieces ran, what they were given, and what they returned."""

    def __init__(self, runner: Piecewise, plan: JoinedPlan | None, path: Path) -> None:
        self.runner, self.plan, self.path = runner, plan, path
        # it went another way than the plan's, after a piece that ran as planned
        self.has_turned = False
        self.expects_pieces = True  # false until something compiled is called
        self.pieces: list[Piece] = []
        self.numbers: list[int] = []
        self.places: list[tuple[tuple[Place | None, ...], tuple[Place | None, ...]]] = []
        # run, kind, place, tensor, its version
        self.versions: list[tuple[int, str, int, Callable[[], torch.Tensor | None], int]] = []
        self._given: list[tuple[str, int, Callable[[], torch.Tensor | None]]] = []
        # weak: an address tells storages apart as long as somebody refers to it
        self.storages: list[Any] = []
        self._inputs: tuple[Place | None, ...] = ()

    def begin(self, piece: Piece, args: Sequence[Any]) -> int:
        """Returns the number of the halves to run."""
        turn = len(self.pieces)
        if self.plan is not None and (turn >= len(self.path) or self.path[turn] is not piece):
            self.has_turned |= turn > 0  # other shapes are other pieces from the first one on
            self.plan = None  # another path than the last time: the rest runs with the least memory
        number = piece.provisional(args) if self.plan is None else self.plan.numbers[turn]
        self.pieces.append(piece)
        self.numbers.append(number)
        self._given = [
            ("input", place, self._reference(tensor))
            for place, tensor in enumerate(args)
            if _is_watched(tensor)
        ]
        self._inputs = self._places(args)
        return number

    def end(self, results: Sequence[Any]) -> None:
        """Notes what the run returned, and the versions of all that it was given and returned, with
        its own changes done.
        """
        turn = len(self.pieces) - 1
        made = [
            ("result", place, self._reference(tensor))
            for place, tensor in enumerate(results)
            if _is_watched(tensor)
        ]
        for kind, place, reference in (*self._given, *made):
            tensor = reference()
            if tensor is not None:
                self.versions.append((turn, kind, place, reference, tensor._version))
        self.places.append((self._inputs, self._places(results)))

    def _reference(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
        return weakref.ref(tensor) if self.plan else lambda: tensor

    def _places(self, tensors: Sequence[Any]) -> tuple[Place | None, ...]:
        found = [
            tensor if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided else None
            for tensor in tensors
        ]
        self.storages += [
            StorageWeakRef(tensor.untyped_storage()) for tensor in found if tensor is not None
        ]
        return tuple(None if tensor is None else Place.of(tensor) for tensor in found)

    def changed(self) -> list[Copied]:
        """For each run, what was changed after it."""
        found: list[set[tuple[str, int]]] = [set() for _ in self.pieces]
        for turn, kind, place, reference, version in self.versions:
            tensor = reference()
            first = self.pieces[turn].first
            if (
                tensor is not None
                and tensor._version != version
                and first
                and (kind, place) in first[0]
            ):
                found[turn].add((kind, place))
        return list(map(frozenset, found))


def _is_watched(tensor: Any) -> bool:
    """True for what something outside may change between runs; parameters change between steps."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and not isinstance(tensor, nn.Parameter)
    )


class Piecewise:
    """A module that `torch.compile` cuts into pieces.

    Records them, plans them together, and runs them.
    """

    def __init__(self, module: nn.Module, plan: StepPlanner | None, costs: CostModel) -> None:
        self.module, self.plan_of, self.costs = module, plan, costs
        self.device_type = device_type(module)
        self.is_trace = plan is None
        self.breaks: dict[str, None] = {}
        # a step may take another path than the last one of the same shapes
        self.follows_data = False
        # by path, and the bytes of gradients that earlier steps left
        self.plans: dict[tuple[Path, int], JoinedPlan] = {}
        self.last: Path = ()
        self.plan: JoinedPlan | None = None  # of the last step
        self.joined: JoinedStep | None = None
        # how parameters come and go
        self.adjust: Callable[[JoinedStep, int], JoinedStep] = lambda joined, num_resident: joined
        self._pieces: dict[str, Piece] = {}
        self._frames = OwnFrames(module)
        self._local = threading.local()

    @property
    def is_running(self) -> bool:
        """True inside of a forward of the module, in this thread."""
        return getattr(self._local, "session", None) is not None

    @property
    def session(self) -> Session:
        """The forward that runs in this thread."""
        session: Session | None = getattr(self._local, "session", None)
        if session is None:
            raise TraceError(
                "a piece of a planned step runs outside of its module's call; call the module "
                "itself"
            )
        return session

    @property
    def meter(self) -> StepMeter:
        """Measures the plan of the last step."""
        return self.plan.meter if self.plan else _NO_METER

    def backend(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The `torch.compile` backend: makes a piece of each graph."""
        refuse_scans(module)
        refuse_changing_sizes(module.graph)
        refuse_nested(module)
        cut_at_sizes(module)
        self._note_break(compile_reason(module))
        pieces: list[Piece] = []

        def partition(
            joint: fx.GraphModule,
            joint_inputs: Any,
            *,
            num_fwd_outputs: int,
            static_lifetime_input_indices: Any = None,
            **_: Any,
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            refuse_changing_sizes(joint.graph)
            refuse_what_has_no_size(joint)
            mark_inference_inputs(joint, example_inputs)
            static = static_lifetime_input_indices or ()
            piece = Piece(
                joint,
                num_fwd_outputs,
                static,
                self.costs,
                device_type=self.device_type,
                is_trace=self.is_trace,
            )
            piece = self._piece(piece)
            pieces.append(piece)
            step = piece.step(frozenset())
            halves = split(step, Schedule.keep_all(step.graph))
            return halves.forward, halves.backward

        def compile_forward(graph: fx.GraphModule, _: Any) -> Any:
            return _boxed(partial(self.run_forward, pieces[-1])) if pieces else compile_graph(graph)

        def compile_backward(graph: fx.GraphModule, _: Any) -> Any:
            return _boxed(partial(self.run_backward, pieces[-1]))

        with (
            backward_without_autocast(),
            python_numbers(),
            plain_kernels(),
            autocast_cache(module, example_inputs),
        ):
            compiled: Callable[..., Any] = aot_autograd(
                fw_compiler=compile_forward,
                bw_compiler=compile_backward,
                partition_fn=partition,
                keep_inference_input_mutations=True,
            )(module, example_inputs)
        return _without_zeros_for_no_gradient(compiled, self) if pieces else compiled

    def _piece(self, piece: Piece) -> Piece:
        """A piece that dynamo compiled before, and again since some Python value is another, is the
        same piece.
        """
        text = signature(piece)
        return self._pieces.setdefault(text, piece) if text else piece

    def _note_break(self, reason: Any) -> None:
        if reason is not None and reason.graph_break:
            place = reason.user_stack[-1] if reason.user_stack else None
            where = f" ({place.filename.rsplit('/', 1)[-1]}:{place.lineno})" if place else ""
            self.breaks[reason.reason.strip().split("\n")[0] + where] = None
            self.follows_data |= any(word in reason.reason.lower() for word in _DATA_WORDS)

    def run_forward(self, piece: Piece, args: list[Any]) -> Any:
        """Runs the forward half that is its turn.

        What is saved begins with a tensor of no elements that names the halves.
        """
        session = self.session
        number = session.begin(piece, args)
        results = piece.halves(number)[0](args)
        session.end(results[: piece.num_forward])
        token = torch.empty((0, number, 0))
        if session.plan:
            session.plan.meter.saved(token, results[piece.num_forward :])
        return (*results[: piece.num_forward], token, *results[piece.num_forward :])

    def run_backward(self, piece: Piece, args: list[Any]) -> Any:
        """Runs the backward half that belongs to the forward that saved `args`."""
        token = args.pop(piece.num_numbers)
        _, number, _ = token.shape

        def run(args: list[Any]) -> Any:
            missing = piece.tangents.fill(args)
            gradients = piece.halves(number)[1](args)
            return piece.tangents.arriving(gradients, missing) if missing else gradients

        return self.meter.backward(run, args, piece.tangents.num, token)

    def run(self, call: Callable[[], Any], inputs: Sequence[Any]) -> Any:
        """Runs one forward by `call`; plans it where its path is new.

        Args:
            call: runs the compiled module.
            inputs: the tensors among the module's arguments.
        """
        self._keep_within_budget()
        for known in self.plans.values():
            known.meter.forget()
        held_bytes = gradient_bytes(self.module) if isinstance(self.plan_of, Plans) else 0
        plan = self._plan_beside(held_bytes)
        session = Session(self, plan, self.last)
        with self._open(session), self._frames.installed(), without_leaf_warnings():
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
        return result

    def _plan_beside(self, held_bytes: int) -> JoinedPlan | None:
        """Returns the plan of the last path beside gradients that are there.

        That of others, planned again, where they are new.
        """
        of_others = next(
            (plan for (path, _), plan in self.plans.items() if path == self.last), None
        )
        if of_others is not None and (self.last, held_bytes) not in self.plans:
            self._install(
                self.last, of_others.copies, of_others.step, held_bytes, of_others.unplanned_bytes
            )
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
        kept = kept_by_eager(results, inputs)

        def joined_with(copies: Sequence[Copied]) -> JoinedStep:
            runs = [
                Run(piece.step(copied), *places)
                for piece, copied, places in zip(
                    session.pieces, copies, session.places, strict=True
                )
            ]
            return self.adjust(join(runs, storages, resident, kept), len(resident))

        copies = self._copies(session)
        self.joined = joined_with(copies)
        if self.plan_of is None:
            return
        firsts = [piece.first for piece in session.pieces if piece.first is not None]
        planned = self._install(tuple(session.pieces), copies, self.joined, held_bytes)
        if len(firsts) == len(session.pieces):
            _warn(
                planned.solution,
                joined_with([copied for copied, _ in firsts]),
                [schedule for _, schedule in firsts],
            )

    def _copies(self, session: Session) -> list[Copied]:
        """What each run copies.

        What was changed after it, or all that could be, where a step may go on another way.

        Once it does it is too late: what runs then may change what an earlier piece saved, as an
        expert does that adds to the result of those before, and autograd refuses the backward.
        """
        if session.has_turned and not self.follows_data:
            self.follows_data = True
            self.plans.clear()
        if not self.follows_data or self.is_trace:
            return session.changed()
        return [piece.first[0] if piece.first else frozenset() for piece in session.pieces]

    def _install(
        self,
        path: Path,
        copies: Sequence[Copied],
        joined: JoinedStep,
        held_bytes: int,
        unplanned_bytes: int = 0,
    ) -> JoinedPlan:
        assert self.plan_of is not None
        try:
            solution = self.plan_of(joined, gradient_bytes=held_bytes, gap_bytes=unplanned_bytes)
        except BudgetError as error:
            raise naming_breaks(error, self.breaks) from None
        assert solution.schedule is not None, "planners answer with a schedule or raise"
        schedules = joined.schedules(solution.schedule)
        numbers = tuple(
            piece.number(copied, own)
            for piece, copied, own in zip(path, copies, schedules, strict=True)
        )
        meter = StepMeter(joined.graph.device, joined.graph.resident_bytes)
        excess = Agreement(f"{joined.graph.fingerprint}/{solution.budget_bytes}/{unplanned_bytes}")
        planned = JoinedPlan(
            joined, solution, numbers, tuple(copies), held_bytes, unplanned_bytes, meter, excess
        )
        self.plans[path, held_bytes] = planned
        return planned

    def _keep_within_budget(self) -> None:
        """Plans again where the measured step held more than its budget.

        Gaps hold memory that no graph knows.
        """
        for (path, held_bytes), plan in list(self.plans.items()):
            measured = plan.meter.peak_bytes
            if measured is None or (path, held_bytes) not in self.plans:
                continue
            allowed = plan.solution.budget_bytes + plan.unplanned_bytes
            excess = plan.excess.of_all_ranks(max(0, measured - allowed))
            if excess == 0:
                continue
            _LOG.warning(
                "the step held %s, which is %s more than its budget: what runs between its "
                "pieces is not planned; planning again with less",
                describe_bytes(allowed + excess),
                describe_bytes(excess),
            )
            for key in [key for key in self.plans if key[0] == path]:
                # beside other gradients it holds as much, and is planned again when it is next run
                del self.plans[key]
            # to leave out what is not used changes nothing
            unused_bytes = max(0, plan.solution.budget_bytes - plan.solution.peak_bytes)
            self._install(
                path,
                plan.copies,
                plan.step,
                held_bytes,
                plan.unplanned_bytes + unused_bytes + excess,
            )


def _warn(planned: Solution, first: JoinedStep, schedules: Sequence[Schedule]) -> None:
    peak_bytes = simulate(first.graph, composed(first, schedules)).peak_bytes
    if peak_bytes > planned.budget_bytes:
        _LOG.warning(
            "the first step, which found the pieces, held about %s, above the budget of %s; "
            "the next ones run planned",
            describe_bytes(peak_bytes),
            describe_bytes(planned.budget_bytes),
        )


# of reasons of breaks where data leads on
_DATA_WORDS = ("data-dependent", "dynamic shape", "generic_jump", "item()")
_NO_METER = StepMeter("cpu", 0)


def _needs_gradient(result: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_of(result))


def _boxed(call: BoxedFunction) -> BoxedFunction:
    def run(args: list[Any]) -> Any:
        return call(args)

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd hands its inputs over in a list
    return run


def _without_zeros_for_no_gradient(
    compiled: Callable[..., Any], owner: Piecewise
) -> Callable[..., Any]:
    """Returns a compiled piece whose backward is told which of its results got no gradient.

    Autograd would say zeros. Its nodes are known as those of `owner`'s plan.
    """
    planned = weakref.ref(owner)

    def run(*args: Any) -> Any:
        results = compiled(*args)
        # AOTAutograd wraps the gradients of sharded ones, all of them
        if not any(is_sharded(arg) for arg in args):
            nodes: set[Any] = {
                result.grad_fn for result in results if isinstance(result, torch.Tensor)
            }
            for node in nodes:
                if node is not None and is_compiled_node(node):
                    node.set_materialize_grads(False)
                    note_planned(node, planned)
        return results

    return torch._dynamo.disable(run, reason="runs what is compiled already")  # type: ignore[no-any-return]
