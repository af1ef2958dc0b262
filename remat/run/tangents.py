"""The gradients that arrive for a captured step, some of which may be missing.

Autograd would put zeros in their place. In plain PyTorch a parameter's gradient stays None where it
would be computed from missing gradients alone, and optimizers skip that parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from remat.tracers.phases import is_backward_input


class Tangents:
    """The tangents of a joint graph, and which returned gradients depend on which of them."""

    def __init__(self, joint: fx.GraphModule, num_forward: int) -> None:
        self.joint, self.num_forward = joint, num_forward

    def fill(self, args: list[Any]) -> frozenset[int]:
        """Puts zeros into `args` for missing tangents, and returns which ones were missing.

        The tangents are the last of `args`.
        """
        first = len(args) - self.num
        missing = frozenset(place for place in range(self.num) if args[first + place] is None)
        for place in missing:
            like = self._nodes[place].meta["val"]
            args[first + place] = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            ).zero_()
        return missing

    def arriving(self, gradients: Sequence[Any], missing: frozenset[int]) -> list[Any]:
        """Returns the gradients, with None for those computed from `missing` tangents alone.

        As in plain PyTorch: an optimizer would apply its weight decay to zeros.
        """
        return [
            gradient if self._arrives(place, missing) else None
            for place, gradient in enumerate(gradients)
        ]

    @property
    def num(self) -> int:
        """The number of tangents."""
        return len(self._nodes)

    @cached_property
    def _nodes(self) -> list[fx.Node]:
        return [node for node in self.joint.graph.find_nodes(op="placeholder") if is_tangent(node)]

    @cached_property
    def _leading_to(self) -> list[frozenset[int]]:
        """For each gradient that the backward returns, the tangents that it depends on."""
        leading: dict[fx.Node, frozenset[int]] = {
            node: frozenset({place}) for place, node in enumerate(self._nodes)
        }
        for node in self.joint.graph.nodes:
            leading.setdefault(
                node, frozenset().union(*(leading[source] for source in node.all_input_nodes))
            )

        results: Any = self.joint.graph.output_node().args[0]
        return [
            leading.get(node, frozenset()) if isinstance(node, fx.Node) else frozenset()
            for node in results[self.num_forward :]
        ]

    def _arrives(self, place: int, missing: frozenset[int]) -> bool:
        return not self._leading_to[place] or not self._leading_to[place] <= missing


def is_tangent(node: fx.Node) -> bool:
    """True for a gradient that arrives from outside, whether or not phases are marked yet."""
    return (
        "tangents" in node.name if "partitioner_tag" not in node.meta else is_backward_input(node)
    )
