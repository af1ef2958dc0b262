"""Which nodes of a joint graph run in the forward and the backward, and in which order."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from remat.core.errors import TraceError
from remat.core.operators import Phase

from .storages import Storages

_TAG = "partitioner_tag"  # AOTAutograd's (torch 2.13)
_COPY = torch.ops.aten.copy_.default


def mark_phases(graph: fx.Graph, num_forward_outputs: int) -> None:
    """Tags each node of a joint graph "is_forward" or "is_backward".

    AOTAutograd tags what the forward made, and has other tags for changes of inputs. A node without
    a tag belongs to the backward; the backward of a custom `autograd.Function` makes such nodes.
    There are two exceptions, which belong to the forward: nodes that the forward reads (the seeds
    that Inductor adds for random numbers), and results of the forward (such as a product with a
    Python number that changes from step to step).

    Raises:
        TraceError: the backward changes an input or a buffer.
    """
    results: Any = graph.output_node().args[0]
    returned = set(results[:num_forward_outputs])
    for node in reversed(graph.nodes):
        tag = node.meta.get(_TAG)
        is_change = node.target is _COPY
        if is_change and tag in ("is_backward", "must_be_in_backward"):
            raise TraceError(
                f"the backward of this step changes `{node.args[0]}`, an input or a buffer of the "
                "model (a custom autograd function that writes in its backward), and recomputation "
                "could then read the changed value; change it in the forward instead"
            )

        is_forward = (
            tag in ("is_forward", "must_be_in_forward")
            or is_change
            or (tag is None and (node.op != "call_function" or node in returned))
        )
        is_forward = is_forward or any(
            user.op != "output" and user.meta[_TAG] == "is_forward" for user in node.users
        )

        node.meta[_TAG] = "is_forward" if is_forward else "is_backward"


def phase_of(node: fx.Node) -> Phase:
    """Returns the phase in which a marked node runs."""
    return Phase.BACKWARD if node.meta[_TAG] == "is_backward" else Phase.FORWARD


def is_backward_input(node: fx.Node) -> bool:
    """True for a gradient that arrives from outside (a tangent)."""
    return node.op == "placeholder" and phase_of(node) is Phase.BACKWARD


def execution_order(graph: fx.Graph, storages: Storages) -> list[fx.Node]:
    """Returns the nodes in execution order: forward, its changes of inputs, backward.

    AOTAutograd puts the copies into changed inputs at the end of the joint graph. Here each comes
    after the last forward operator that reads the input, or after its source if that is later.
    """
    nodes = [node for node in graph.nodes if node.op != "output"]
    backward = [
        node for node in nodes if node.op == "call_function" and phase_of(node) is Phase.BACKWARD
    ]

    later = set(backward)
    forward = [node for node in nodes if node not in later]
    copies = [node for node in forward if node.target is _COPY]
    order = [node for node in forward if node not in set(copies)]

    for copy in copies:
        target = copy.args[0]
        assert isinstance(target, fx.Node)

        shared = {n for n in order if storages.of(n) == storages.of(target)}
        needed = (
            set(copy.all_input_nodes) | {user for node in shared for user in node.users} | shared
        )

        last = max(index for index, node in enumerate(order) if node in needed)
        order.insert(last + 1, copy)

    return order + backward
