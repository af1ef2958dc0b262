"""Masks that are stored as numbers of one byte on a CPU, not as booleans.

On a CPU, Inductor's vectorized loops take longer to store a boolean than to draw a random number,
and longer to read one than to multiply by it. Numbers of one byte are fast. So a mask
that is too expensive to compute again, such as that of dropout, is stored as zeros and ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

aten = torch.ops.aten
_STORED, _IN_LOOP = "remat_stored_mask", "remat_in_loop_of_mask"  # in a node's `meta`


def store_masks_as_bytes(joint: fx.GraphModule) -> None:
    """Turns each mask that Inductor would store into a number of one byte; O(V + E).

    Its readers get the boolean back from it; they compute it in their own loops.
    """
    graph = joint.graph
    masks = list(filter(_is_stored, graph.nodes))
    for mask in masks:
        users = list(mask.users)
        number = _converted(mask, torch.float32)  # bool to int8 is not vectorized
        stored = _converted(number, torch.int8)
        read = _converted(stored, torch.float32)
        with graph.inserting_after(read):
            again = graph.call_function(aten.gt.Scalar, (read, 0))
        again.meta = {**mask.meta, "val": torch.empty_like(mask.meta["val"])}
        for user in users:
            user.replace_input_with(mask, again)

        mask.meta[_IN_LOOP] = number.meta[_IN_LOOP] = True
        stored.meta[_STORED] = True

    if masks:
        joint.recompile()


def is_stored_mask(node: fx.Node) -> bool:
    """Says whether a node is the number that a mask is stored as."""
    return _STORED in node.meta


def is_in_loop_of_mask(node: fx.Node) -> bool:
    """Says whether a node is computed only on the way to such a number, in the same loop."""
    return _IN_LOOP in node.meta


def _converted(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Adds a conversion right after a node."""
    with node.graph.inserting_after(node):
        converted = node.graph.call_function(_conversion(), (node, dtype))
    converted.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return converted


def _is_stored(node: fx.Node) -> bool:
    """Says whether a node is a mask that Inductor stores: several read it, and it is large to make.

    Inductor inlines a mask into its readers if what it is made from is not larger than itself.
    """
    mask = node.meta.get("val")
    return (
        isinstance(mask, torch.Tensor)
        and mask.dtype is torch.bool
        and mask.device.type == "cpu"
        and len(node.users) > 1
        and _is_elementwise(node)
        and all(map(_is_elementwise, node.users))
        and any(_is_larger(source.meta.get("val"), mask) for source in node.all_input_nodes)
    )


def _is_elementwise(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and (
        torch.Tag.pointwise in target.tags or target is _conversion()
    )


def _is_larger(source: Any, mask: torch.Tensor) -> bool:
    return isinstance(source, torch.Tensor) and source.nbytes > mask.nbytes


def _conversion() -> Any:
    return torch.ops.prims.convert_element_type.default
