"""The gradients that arrive for a captured step, some of which may be missing.

Autograd would put zeros in their place, and what is computed from these alone is no gradient: plain
PyTorch leaves None there, and an optimizer leaves such a parameter as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from remat.tracers.phases import is_backward_input


class Tangents:
    """What a joint graph takes for its backward, and which gradients follow from which of it."""

    def __init__(self, joint: fx.GraphModule, num_forward: int) -> None:
        self.joint, self.num_forward = joint, num_forward

    def fill(self, args: list[Any]) -> frozenset[int]:
        """Puts zeros where no gradient arrived for a backward, which ends in its tangents.

        Returns which of these that were.
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
        """Returns the gradients, none for what is computed from nothing but `missing` ones.

        So it is in plain PyTorch: no zeros, to which an optimizer would apply its weight decay.
        """
        return [
            gradient if self._arrives(place, missing) else None
            for place, gradient in enumerate(gradients)
        ]

    @property
    def num(self) -> int:
        """How many gradients arrive."""
        return len(self._nodes)

    @cached_property
    def _nodes(self) -> list[fx.Node]:
        return [node for node in self.joint.graph.find_nodes(op="placeholder") if is_tangent(node)]

    @cached_property
    def _leading_to(self) -> list[frozenset[int]]:
        """For each gradient that the backward returns, the tangents that it is computed from."""
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
    """True for a gradient that arrives from outside, before phases are marked too."""
    return (
        "tangents" in node.name if "partitioner_tag" not in node.meta else is_backward_input(node)
    )
