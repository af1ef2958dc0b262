"""The gradients that arrive for a captured step, some of which may be missing.

Autograd would put zeros in their place. In plain PyTorch a parameter's gradient stays None where it
would be computed from missing gradients alone, and optimizers skip that parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from remat.run.executor import BoxedFunction, compile_graph
from remat.run.pruned_backward import pruned
from remat.tracers.phases import is_backward_input


class Tangents:
    """The tangents of a joint graph, and which returned gradients depend on which of them."""

    def __init__(self, joint: fx.GraphModule, num_forward: int) -> None:
        self.joint, self.num_forward = joint, num_forward

    def backward(self, graph: fx.GraphModule) -> BoxedFunction:
        """Returns a backward that computes nothing from missing tangents, as plain PyTorch does.

        The tangents are the last of its arguments, None where they are missing. For each set of
        missing ones, the graph is compiled once, without what only they need.
        """
        compiled = {frozenset[int](): compile_graph(graph)}

        def run(args: list[Any]) -> Any:
            missing = self._missing(args)
            if missing not in compiled:
                places = slice(len(args) - self.num, len(args))
                compiled[missing] = compile_graph(pruned(graph, places, missing))
            return compiled[missing](args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def with_zeros(self, run: Callable[[list[Any]], Sequence[Any]]) -> BoxedFunction:
        """Returns a backward with zeros for missing tangents, as `torch.compile` runs it.

        Its gradients are None where they are computed from missing tangents alone.
        """

        def run_with_zeros(args: list[Any]) -> Any:
            missing = self._missing(args)
            for place in missing:
                like = self._nodes[place].meta["val"]
                args[len(args) - self.num + place] = torch.empty_strided(
                    like.shape, like.stride(), dtype=like.dtype, device=like.device
                ).zero_()
            gradients = run(args)
            if not missing:
                return gradients
            return [
                gradient if self._arrives(place, missing) else None
                for place, gradient in enumerate(gradients)
            ]

        run_with_zeros._boxed_call = True  # type: ignore[attr-defined]
        return run_with_zeros

    def _missing(self, args: Sequence[Any]) -> frozenset[int]:
        first = len(args) - self.num
        return frozenset(place for place in range(self.num) if args[first + place] is None)

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
