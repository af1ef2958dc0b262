"""A captured forward that can be run again as plain PyTorch, with autograd.

Dynamo captures the calls of plain PyTorch, before AOTAutograd turns them into operators. To run
them again, everything has to be as in the first run: the inputs that it changed (they are copied
before it), the states of random generators, and autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from remat.core.operators import Phase
from remat.run.random_state import take_state
from remat.torch_border.autograd import descriptor_of
from remat.torch_border.higher_order import (
    higher_order_operators,
    is_checkpointed_region,
    is_custom_function,
    run_unpacked,
)
from remat.torch_border.sharded import is_sharded
from remat.tracers.phases import phase_of
from remat.tracers.recomputable import is_random
from remat.tracers.retarget import CUDA_GRANULARITY_BYTES
from remat.tracers.storages import tensors_of
from remat.tracers.traced_step import CPU_GENERATOR_BYTES, TracedStep


@dataclass(frozen=True)
class Surroundings:
    """What a forward depends on besides its inputs.

    Attributes:
        states: states of the generators that it draws from.
        autocast: arguments of `torch.autocast` that restore its state.
    """

    states: dict[torch.device, torch.Tensor]
    autocast: list[dict[str, Any]]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restores this state inside of a `with` block; the present state comes back after it."""
        gpus = [device for device in self.states if device.type == "cuda"]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(gpus, enabled=bool(self.states)))
            for options in self.autocast:
                stack.enter_context(torch.autocast(**options))
            for device, state in self.states.items():
                if device.type == "cuda":
                    torch.cuda.set_rng_state(state, device)
                else:
                    torch.set_rng_state(state)
            yield


class PlainForward:
    """A captured forward that can be run again as plain PyTorch.

    Attributes:
        refusal: why it can't be run again; empty where it can.
        forget: called when a step runs plain, to drop what was measured of it.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        for node in graph.nodes:
            node.meta = {}  # used only during the capture
        self.module = fx.GraphModule(module, graph)

        self._trained = frozenset(
            i for i, value in enumerate(inputs) if getattr(value, "requires_grad", False)
        )
        self.forget: Callable[[], None] = lambda: None
        operators = set(higher_order_operators(module))
        self.refusal = _refusal_of_inputs(inputs) or _refusal_of_operators(operators)
        self.has_custom_functions = any(map(is_custom_function, operators))

        self._changed: frozenset[int] = frozenset()
        self._devices: tuple[torch.device, ...] = ()  # of the generators that it draws from
        self._read_by: dict[int, frozenset[int]] = {}  # result -> the inputs that it depends on

    def room_beside(self, step: TracedStep) -> dict[str, int]:
        """Returns how much memory the copies for another run take, as an argument of the planner.

        It also finds which inputs the step changes, which generators it draws from, and which
        inputs its results depend on.
        """
        nodes = list(step.module.graph.nodes)
        places = {node: _place_of(node, "PlainAOTInput") for node in nodes}
        copied = [node for node in nodes if node.target is torch.ops.aten.copy_.default]
        changed = [places.get(node.args[0]) for node in copied]
        drawing = [n for n in nodes if is_random(n) and phase_of(n) is Phase.FORWARD]
        self._devices = tuple({t.device for node in drawing for t in tensors_of(node)})
        self._changed = frozenset(place for place in changed if place is not None)
        self._read_by = _dependences(step, places)

        self.refusal = self.refusal or _refusal_of_changes(step, changed, self._trained)
        if self.refusal:
            return {}  # nothing is copied

        kept_bytes = sum(_held_bytes(t, step) for n in copied for t in tensors_of(n))
        if step.graph.device == "cpu":
            kept_bytes += CPU_GENERATOR_BYTES * len(self._devices)
        return {"unplanned_bytes": kept_bytes} if kept_bytes else {}

    def dependences(self, results: Sequence[int], num_inputs: int) -> frozenset[int]:
        """Returns the inputs that some results depend on; all of them where that is unknown."""
        everything = frozenset(range(num_inputs))
        return frozenset().union(*(self._read_by.get(place, everything) for place in results))

    def copies(self, args: Sequence[Any]) -> list[Any]:
        """Returns a forward's inputs for another run: aliases, and copies of those it changes."""
        return [
            arg.detach().clone()
            if place in self._changed
            else arg.detach()
            if isinstance(arg, torch.Tensor)
            else arg
            for place, arg in enumerate(args)
        ]

    def surroundings(self) -> Surroundings:
        """Returns what a forward depends on besides its inputs, as it is now."""
        return Surroundings({device: take_state(device) for device in self._devices}, _autocast())

    def run(self, operands: Sequence[Any], surroundings: Surroundings) -> Any:
        """Runs the forward again, with autograd, as in these surroundings."""
        with surroundings.restored():
            return run_unpacked(self.module, operands)

    def is_changed(self, place: int) -> bool:
        """True for an input that the forward changes."""
        return place in self._changed


def _refusal_of_inputs(inputs: Sequence[Any]) -> str:
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    return "its parameters or inputs are sharded" if any(map(is_sharded, tensors)) else ""


def _refusal_of_operators(names: set[str]) -> str:
    others = [n for n in names if not (is_custom_function(n) or is_checkpointed_region(n))]
    return f"it calls {min(others)}, an operator with a graph inside" if others else ""


def _refusal_of_changes(
    step: TracedStep, changed: Sequence[int | None], trained: frozenset[int]
) -> str:
    results: Any = step.module.graph.output_node()
    described = results.meta.get("desc", ())[: step.num_forward_outputs]
    is_handed_over = any(type(each).__name__ == "InputMutationAOTOutput" for each in described)
    if is_handed_over or not trained.isdisjoint(changed):
        return "it changes an input that needs a gradient"

    inputs = step.module.graph.find_nodes(op="placeholder")
    is_based = any("SyntheticBase" in type(node.meta.get("desc")).__name__ for node in inputs)
    if None in changed or is_based:
        return "it changes an input that shares memory with another one"
    return ""


def _place_of(node: Any, kind: str) -> int | None:
    """Returns the index of a joint graph's input among the captured forward's inputs."""
    return descriptor_of(node.meta.get("desc"), kind)


def _dependences(step: TracedStep, places: dict[fx.Node, int | None]) -> dict[int, frozenset[int]]:
    read: dict[fx.Node, frozenset[int]] = {}
    for node, place in places.items():
        own = frozenset() if place is None else frozenset({place})
        read[node] = own.union(*(read[source] for source in node.all_input_nodes))

    output = step.module.graph.output_node()
    results: Any = output.args[0]
    described = output.meta.get("desc", ())
    found = {}
    for node, described_as in zip(results[: step.num_forward_outputs], described, strict=False):
        place = descriptor_of(described_as, "PlainAOTOutput")
        if place is not None and isinstance(node, fx.Node):
            found[place] = read[node]
    return found


def _held_bytes(tensor: torch.Tensor, step: TracedStep) -> int:
    if tensor.device.type != step.graph.device:
        return 0
    size_bytes = tensor.untyped_storage().nbytes()
    rounded_to = CUDA_GRANULARITY_BYTES if step.graph.device == "cuda" else 1
    return -(-size_bytes // rounded_to) * rounded_to


def _autocast() -> list[dict[str, Any]]:
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return [
        {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in kinds
    ]
