"""A captured training step: its `Graph`, and the `torch.fx` nodes of its operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from remat.core.graph import Graph

from .recomputable import InPlaceForm

# torch.get_rng_state().nbytes; on CUDA the state is a CPU tensor and takes none of the device's
# memory
CPU_GENERATOR_BYTES = 5056


@dataclass(frozen=True)
class TracedStep:
    """A training step as a `Graph`, with the `torch.fx` nodes of its operators.

    Attributes:
        graph: the operators and storages.
        module: the cleaned joint graph.
        num_forward_outputs: how many of the joint graph's results belong to the forward.
        nodes: the node of each operator; for a snapshot the node of the input that it copies, or of
            the random operator whose generator state it takes.
        value_of: tensor node -> the value of its storage.
        snapshots: node of an input that the step changes -> the value of its snapshot.
        generator_states: random operator -> the value of its generator state.
        in_place: (operator, value) -> the call that writes its result into the value's memory.
    """

    graph: Graph
    module: fx.GraphModule
    num_forward_outputs: int
    nodes: tuple[fx.Node, ...]
    value_of: dict[fx.Node, int]
    snapshots: dict[fx.Node, int] = field(default_factory=dict)
    generator_states: dict[int, int] = field(default_factory=dict)
    in_place: dict[tuple[int, int], InPlaceForm] = field(default_factory=dict)

    @cached_property
    def operator_of(self) -> dict[fx.Node, int]:
        """Node -> its operator, without snapshots and tangents, which compute nothing."""
        virtual = ("tangent", "snapshot", "generator_state")
        return {
            node: i
            for i, node in enumerate(self.nodes)
            if self.graph.operators[i].target not in virtual
        }
