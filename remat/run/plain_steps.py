"""Runs a step as plain PyTorch if no plan can run its backward (`on_unsupported="plain"`).

A planned step runs its backward once, and what it saved is freed. Some backwards keep their graph,
are differentiated themselves, or are a second one; this is known only when they run, after the
forward. The forward that dynamo captured then runs again, with autograd, on the inputs of the
planned one. Inputs that it changes were copied before; random generators and autocast are restored.
From there on, everything is plain PyTorch.

An autograd node around the planned step decides between the two; a backward that the plan can run
gets its gradients unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from remat.core.errors import TraceError
from remat.run.plain_forward import PlainForward, Surroundings
from remat.torch_border.autograd import (
    compiled_node,
    gradient_node,
    is_batched,
    is_graph_kept,
    is_wanted,
    skip_without_gradients,
)
from remat.torch_border.kernels import FakeTensor

_LOG = logging.getLogger(__name__)
OnUnsupported = Literal["error", "plain"]


def check_on_unsupported(given: str) -> None:
    """Raises `ValueError` for an unknown value of the option `on_unsupported`."""
    if given not in get_args(OnUnsupported):
        raise ValueError(
            f'on_unsupported={given!r} is neither "error", which refuses a backward with '
            'retain_graph or create_graph, nor "plain", which runs that step as plain PyTorch'
        )


class PlainSteps:
    """Runs steps of a planned model as plain PyTorch where no plan can run them; warns once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._has_warned = False

    @classmethod
    def asked(cls, on_unsupported: str, name: str) -> PlainSteps | None:
        """Returns the plain steps of a model; None where the option makes them an error."""
        check_on_unsupported(on_unsupported)
        return cls(name) if on_unsupported == "plain" else None

    def warn(self, why: str) -> None:
        """Warns, the first time, that a step runs plain."""
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "a step of %s ran as plain PyTorch, with its forward run again: %s, which no plan "
                "can run; such a step is not held to the budget. Steps with one backward run "
                "planned as before. This warning is given once",
                self.name,
                why,
            )

    def around(self, forward: PlainForward, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `compiled`, the planned step, with a node around it that may run it plain."""

        def run(*args: Any) -> Any:
            is_run = not any(isinstance(arg, FakeTensor) for arg in args)
            if forward.refusal or not is_run or not torch.is_grad_enabled():
                return compiled(*args)

            given = _Given.of(forward, self, args)
            results = list(compiled(*args))
            given.watch(results)
            return tuple(results)

        return torch.compiler.disable(run, reason="it calls compiled code")  # type: ignore[no-any-return]


@dataclass
class _Given:
    """The inputs of one planned forward, kept as long as it may have to be run again.

    Attributes:
        forward: the forward.
        steps: the plain steps of its model.
        args: the inputs themselves.
        kept: aliases of the inputs, and copies of those that the forward changes.
        versions: versions of the aliases; None for tensors without a version.
        surroundings: what the forward depends on besides its inputs.
        places: indices of the results that are differentiated.
        inputs: indices of the inputs that need a gradient.
        spent: indices of results whose backward ran without keeping the graph.
        is_planned_spent: a backward ran without keeping the graph, so the plan's backward may no
            longer run.
    """

    forward: PlainForward
    steps: PlainSteps
    args: list[Any]
    kept: list[Any]
    versions: list[int | None]
    surroundings: Surroundings
    inputs: list[int]
    places: list[int] = field(default_factory=list)
    spent: set[int] = field(default_factory=set)
    is_planned_spent: bool = False

    @classmethod
    def of(cls, forward: PlainForward, steps: PlainSteps, args: Sequence[Any]) -> _Given:
        kept = forward.copies(args)
        return cls(
            forward,
            steps,
            list(args),
            kept,
            [_version(tensor) for tensor in kept],
            forward.surroundings(),
            [
                i
                for i, arg in enumerate(args)
                if isinstance(arg, torch.Tensor) and arg.requires_grad
            ],
        )

    def watch(self, results: list[Any]) -> None:
        """Puts the node that decides how a backward runs behind the planned step's results."""
        memory = {_memory(arg) for arg in self.args if isinstance(arg, torch.Tensor)}
        places = [
            place
            for place, result in enumerate(results)
            if isinstance(result, torch.Tensor)
            and result.requires_grad
            and _memory(result) not in memory  # a view of an input: not made by the plan
        ]

        watched = [results[place] for place in places]
        nodes = [compiled_node(result) for result in watched]
        if len({_memory(result) for result in watched}) < len(watched) or None in nodes:
            self.forward.refusal = "it returns several tensors that share memory"
            return

        for node in nodes:
            skip_without_gradients(node)
        self.places = places
        needed = [self.args[place] for place in self.inputs]
        made = _watched(self, len(watched), *watched, *needed)
        for place, result in zip(places, made, strict=True):
            results[place] = result

    def backward(self, tangents: Sequence[Any]) -> tuple[Any, ...]:
        """Returns gradients for the planned results, or, after a plain run, for the inputs."""
        none = [None] * len(self.inputs)
        arrived = {
            i for i, tangent in zip(self.places, tangents, strict=True) if tangent is not None
        }
        is_kept = is_graph_kept()
        if not arrived:
            return (*tangents, *none)

        if arrived & self.spent:
            raise TraceError(
                "a second backward runs through one result of a planned step, and the first did "
                "not keep the graph; pass retain_graph=True to the first, as in plain PyTorch, or "
                "add the losses up and call backward once"
            )

        are_batched = any(map(is_batched, tangents))
        if is_kept or torch.is_grad_enabled() or self.is_planned_spent or are_batched:
            gradients = [None] * len(tangents) + self._plain(tangents)
        else:
            gradients = [*tangents, *none]

        if not is_kept:
            self.is_planned_spent = True
            self.spent |= arrived
            if self.spent >= set(self.places):  # no further backward is possible
                self.args, self.kept = [], []
        return tuple(gradients)

    def _plain(self, tangents: Sequence[Any]) -> list[Any]:
        """Runs the forward again, and returns gradients of the inputs that need them."""
        creates_graph = torch.is_grad_enabled()
        pairs = zip(self.places, tangents, strict=True)
        arrived = [(place, tangent) for place, tangent in pairs if tangent is not None]
        self._check([place for place, _ in arrived], creates_graph=creates_graph)
        self.steps.warn(_why(tangents, creates_graph=creates_graph))
        self.forward.forget()

        wanted = [place for place in self.inputs if is_wanted(self.args[place])]
        operands = self._linked() if creates_graph else self._leaves()
        results = self.forward.run(operands, self.surroundings)
        found = torch.autograd.grad(
            [results[place] for place, _ in arrived],
            [operands[place] for place in wanted],
            [tangent for _, tangent in arrived],
            create_graph=creates_graph,
            allow_unused=True,
        )

        gradients = dict(zip(wanted, found, strict=True))
        return [gradients.get(place) for place in self.inputs]

    def _check(self, results: Sequence[int], *, creates_graph: bool) -> None:
        """Raises `TraceError` where the gradients would not be those of the step that ran."""
        if creates_graph and self.forward.has_custom_functions:
            raise TraceError(
                "create_graph=True does not work for a planned step with a custom "
                "torch.autograd.Function in it: torch.compile captures what the function saves "
                "without its gradients; use remat.unwrap(model) for this step"
            )

        for place in self.forward.dependences(results, len(self.kept)):
            kept, version = self.kept[place], self.versions[place]
            is_kept = version is None or self.forward.is_changed(place) or kept._version == version
            if not is_kept or (creates_graph and not self._is_itself(place)):
                raise TraceError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: an input or parameter of shape {tuple(kept.shape)} was "
                    "changed between the forward of a planned step and a backward that has to run "
                    "the forward again; change it after the last backward"
                )

    def _is_itself(self, place: int) -> bool:
        """False for an input that needed a gradient, and was frozen or got other memory since."""
        tensor = self.args[place]
        is_same = place not in self.inputs or tensor.data_ptr() == self.kept[place].data_ptr()
        return is_same and (place not in self.inputs or tensor.requires_grad)

    def _leaves(self) -> list[Any]:
        """Returns the inputs as leaves of a new graph, since autocast caches casts of leaves."""
        operands = [
            kept.clone() if self.forward.is_changed(place) else kept
            for place, kept in enumerate(self.kept)
        ]
        for place in self.inputs:
            operands[place] = operands[place].detach().requires_grad_()
        return operands

    def _linked(self) -> list[Any]:
        """Returns the inputs themselves, so that gradients of gradients reach what made them.

        Each is differentiated separately. An input that other inputs are made from, or that has
        hooks, is replaced by a view, so that its gradient is that of this operand alone.
        """
        operands = self._leaves()
        own = [self.args[place] for place in self.inputs]
        before = _nodes_before(own)
        for place, tensor in zip(self.inputs, own, strict=True):
            if not self._is_itself(place):
                continue  # the results don't depend on it, or `_check` raised

            is_alone = gradient_node(tensor) not in before and not tensor._backward_hooks
            is_alone &= not tensor.retains_grad or tensor.is_leaf
            operands[place] = tensor if is_alone else tensor.view_as(tensor)
        return operands


def _nodes_before(tensors: Sequence[torch.Tensor]) -> set[Any]:
    """Returns the autograd nodes before those that made the tensors."""
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    found: set[Any] = set()
    while nodes:
        earlier = {node for node, _ in nodes.pop().next_functions if node is not None} - found
        found |= earlier
        nodes += earlier
    return found


class _Watched(torch.autograd.Function):
    """Returns the planned results; its backward leads to the plan, or directly to the inputs."""

    @staticmethod
    def forward(ctx: Any, given: _Given, num_results: int, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.given = given
        return tuple(tensor.detach() for tensor in tensors[:num_results])

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        return (None, None, *ctx.given.backward(tangents))


_watched: Any = _Watched.apply


def _why(tangents: Sequence[Any], *, creates_graph: bool) -> str:
    if any(map(is_batched, tangents)):
        return "its backward was called for many gradients at once (is_grads_batched=True)"
    if creates_graph:
        return "its backward was called with create_graph=True"
    if is_graph_kept():
        return "its backward was called with retain_graph=True"
    return "it had a second backward"


def _version(tensor: Any) -> int | None:
    is_counted = isinstance(tensor, torch.Tensor) and not tensor.is_inference()
    return int(tensor._version) if is_counted else None


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
