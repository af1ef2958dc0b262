"""One piece of a step: the graph that dynamo captured, and its halves under each schedule.

If code outside of the piece changes a tensor after the piece read or made it, the piece has to copy
the tensor; otherwise recomputation would read the changed one. Copies are operators of the piece's
graph, so they are planned with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from remat.core.schedule import Schedule
from remat.pieces.joined_step import PieceStep, Place
from remat.run.capture import runs_once
from remat.run.executor import BoxedFunction, compile_graph
from remat.run.rewrite import SplitStep, split
from remat.run.tangents import Tangents, is_tangent
from remat.solvers.auto.minimum import minimum
from remat.torch_border.higher_order import is_token
from remat.torch_border.kernels import is_dense
from remat.torch_border.scalars import is_symbol
from remat.tracers.aot import read_joint
from remat.tracers.costs import CostModel
from remat.tracers.step_values import is_only_read_as_number
from remat.tracers.storages import tensors_of
from remat.tracers.traced_step import TracedStep

# ("input" or "result", index) of the tensors that a piece copies, as code outside changes them
Copied = frozenset[tuple[str, int]]


class Piece:
    """A graph that dynamo captured, and its forward and backward under each schedule.

    With `is_trace`, it runs on fake tensors.

    Attributes:
        copy_of: the function that copies a tensor in its graph.
    """

    copy_of: Callable[[torch.Tensor], torch.Tensor]

    def __init__(
        self,
        joint: fx.GraphModule,
        num_forward: int,
        static_inputs: Sequence[int],
        costs: CostModel,
        *,
        device_type: str,
        is_trace: bool,
    ) -> None:
        self.copy_of = copy_of
        self.joint, self.num_forward, self.static_inputs = joint, num_forward, tuple(static_inputs)
        self.costs, self.device_type, self.is_trace = costs, device_type, is_trace
        self.tangents = Tangents(joint, num_forward)
        self._steps: dict[Copied, TracedStep] = {}
        self._numbers: dict[tuple[Copied, Schedule], int] = {}
        self._halves: list[tuple[BoxedFunction, BoxedFunction]] = []
        self.first: tuple[Copied, Schedule] | None = None  # used until the piece is planned

    def step(self, copied: Copied) -> PieceStep:
        """Returns the piece as it is planned, with copies of some inputs and results."""
        return self.traced(copied)

    def traced(self, copied: Copied) -> TracedStep:
        """Returns the piece operator by operator, with copies of some inputs and results."""
        if copied not in self._steps:
            module = _with_copies(self.joint, self.num_forward, copied, self.copy_of)
            self._steps[copied] = read_joint(
                module, self.num_forward, self.costs, static_inputs=self.static_inputs
            )
        return self._steps[copied]

    def number(self, copied: Copied, schedule: Schedule) -> int:
        """Returns the number of the halves that run `schedule`, without changing random state."""
        if (copied, schedule) not in self._numbers:
            with torch.random.fork_rng(
                [torch.cuda.current_device()] if self.device_type == "cuda" else []
            ):
                forward, backward = self.compiled(copied, schedule)
            self._numbers[copied, schedule] = len(self._halves)
            self._halves.append((forward, runs_once(backward)))
        return self._numbers[copied, schedule]

    def compiled(self, copied: Copied, schedule: Schedule) -> tuple[BoxedFunction, BoxedFunction]:
        """Returns the forward and the backward that run `schedule`.

        The backward gets None in place of gradients that do not arrive.
        """
        halves = self.split(copied, schedule)
        return compile_graph(halves.forward), self.tangents.backward(halves.backward)

    def split(self, copied: Copied, schedule: Schedule) -> SplitStep:
        """Returns the graphs of both halves under `schedule`."""
        return split(self.traced(copied), schedule)

    def provisional(self, args: Sequence[Any]) -> int:
        """Returns the number of the halves to run until the piece is planned.

        They hold the least memory known, and copy all inputs and results; on fake tensors they keep
        everything, and copy nothing.
        """
        if self.first is None:
            copied = frozenset() if self.is_trace else self._all_copied(args)
            graph = self.step(copied).graph
            steps = (
                tuple(range(graph.num_operators))
                if self.is_trace
                else minimum(graph, time_limit_s=_PROVISIONAL_S).steps
            )
            self.first = (copied, Schedule.from_steps(graph, steps))
        return self.number(*self.first)

    def _all_copied(self, args: Sequence[Any]) -> Copied:
        """Returns all inputs and results that can be copied; parameters are not among them."""
        inputs = [
            node for node in self.joint.graph.find_nodes(op="placeholder") if not is_tangent(node)
        ]
        given = [
            ("input", i)
            for i, node in enumerate(inputs)
            if _is_copied(args[i]) and _is_dense(node) and not is_only_read_as_number(node)
        ]

        results: Any = self.joint.graph.output_node().args[0]
        made = [
            ("result", i)
            for i, node in enumerate(results[: self.num_forward])
            if _is_dense(node) and node.op == "call_function" and not is_token(node)
        ]
        return frozenset(given + made)

    def halves(self, number: int) -> tuple[BoxedFunction, BoxedFunction]:
        """Returns the forward and the backward with this number."""
        return self._halves[number]

    @cached_property
    def num_numbers(self) -> int:
        """How many Python numbers the forward saves; they come first in the backward's inputs."""
        inputs = self.joint.graph.find_nodes(op="placeholder")
        return sum(is_symbol(node.meta.get("val")) for node in inputs)


_PROVISIONAL_S = 1.0  # time limit of the search for a schedule of low peak


def _is_copied(argument: Any) -> bool:
    """False for parameters, and for effect tokens, in whose place no tensor is passed."""
    return isinstance(argument, torch.Tensor) and not isinstance(argument, nn.Parameter)


def _is_dense(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and is_dense(value)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor that code outside of the piece changes.

    It is a function, not an ATen operator, so that cleaning the graph does not remove it.
    """
    return tensor.clone()


def _with_copies(
    joint: fx.GraphModule,
    num_forward: int,
    copied: Copied,
    copy_of: Callable[[torch.Tensor], torch.Tensor],
) -> fx.GraphModule:
    """Returns a copy of the joint graph in which the inputs and results in `copied` are copied."""
    graph = fx.Graph()
    copy: dict[fx.Node, fx.Node] = {}
    results: Any = graph.graph_copy(joint.graph, copy)
    results = list(results)
    inputs = [node for node in graph.find_nodes(op="placeholder") if not is_tangent(node)]
    last = graph.find_nodes(op="placeholder")[-1]

    for kind, place in sorted(copied):
        source = inputs[place] if kind == "input" else results[place]
        with graph.inserting_after(last if kind == "input" else source):
            made = graph.call_function(copy_of, (source,))

        if kind == "result":
            made.meta = {"val": source.meta["val"].clone(), "partitioner_tag": "is_forward"}
            results[place] = made
        else:
            source.replace_all_uses_with(
                made,
                delete_user_cb=lambda user, made=made, source=source: (
                    not _writes(user, made, source)
                ),
            )

            # Views of the input are now views of the copy: the copy gets the input's fake tensor,
            # and the input a new one.
            made.meta = {"val": source.meta["val"], "partitioner_tag": "is_forward"}
            for node in (source, *(user for user in source.users if user is not made)):
                node.meta["val"] = (
                    source.meta["val"].clone() if node is source else source.meta["val"]
                )

    graph.output(tuple(results))
    graph.output_node().meta = dict(joint.graph.output_node().meta)
    return fx.GraphModule(joint, graph)


def _writes(user: fx.Node, made: fx.Node, source: fx.Node) -> bool:
    """True for the copy itself, and for operators that write into the input."""
    return user is made or (user.target is torch.ops.aten.copy_.default and user.args[0] is source)


def signature(piece: Piece) -> str:
    """Returns a text that is the same for two pieces only if they compute the same.

    It is empty for a piece whose graph contains constants or higher-order operators.
    """
    lines = [f"{piece.num_forward} {piece.static_inputs}"]
    for node in piece.joint.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output") or isinstance(
            node.target, torch._ops.HigherOrderOperator
        ):
            return ""

        layouts = [Place.of(t).layout for t in tensors_of(node) if t.layout == torch.strided]
        lines.append(
            f"{node.name} {node.target} {node.args} {node.kwargs} {layouts} "
            f"{node.meta.get('desc')} {node.meta.get('partitioner_tag')}"
        )
    return "\n".join(lines)
