"""Pads each operand of matrix products once; Inductor would pad it for each product.

A product whose sizes are not multiples of 8 is slow on a GPU. So Inductor pads its operands in the
joint graph, separately for each product. Two products of a language model's head read the gradient
of the logits, which is therefore padded twice, once transposed: two copies of the largest tensor of
the step. Here a tensor is padded before it is transposed, and only once if two products read it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_PAD, _PERMUTE = aten.constant_pad_nd.default, aten.permute.default
_PRODUCTS = frozenset([aten.mm.default, aten.addmm.default, aten.bmm.default])


def share_paddings(joint: fx.GraphModule) -> None:
    """Pads each tensor once, before it is transposed; O(V)."""
    graph = joint.graph
    known: dict[Any, fx.Node] = {}
    for node in filter(_is_operand, graph.find_nodes(op="call_function", target=_PAD)):
        padded = _padded_first(node)
        source, sizes, value = _arguments(padded)
        while sizes[-2:] == [0, 0]:
            sizes = sizes[:-2]

        first = known.setdefault((source, tuple(sizes), value), padded)
        if first is not padded:
            padded.replace_all_uses_with(first)
            graph.erase_node(padded)

    if known:
        _find_strides(graph)
        joint.recompile()


def _is_operand(padding: fx.Node) -> bool:
    """True where only products read a padding, or its transpose; others may be the user's own."""
    return all(
        user.target in _PRODUCTS
        or (user.target is _PERMUTE and all(each.target in _PRODUCTS for each in user.users))
        for user in padding.users
    )


def pads_products(graph: fx.Graph) -> bool:
    """Says whether a product reads a padded operand."""
    return any(
        user.target in _PRODUCTS
        for node in graph.find_nodes(op="call_function", target=_PAD)
        for user in _readers(node)
    )


def _arguments(padding: fx.Node) -> tuple[fx.Node, list[int], float]:
    """Returns the padded tensor, the padding at both ends (last dimension first), its value."""
    source: Any = padding.args[0]
    sizes: Any = padding.args[1]
    value: Any = padding.args[2] if len(padding.args) > 2 else 0
    return source, list(sizes), value


def _readers(node: fx.Node) -> list[fx.Node]:
    """Returns what reads a value or its transpose."""
    transposed = [user for user in node.users if user.target is _PERMUTE]
    return [*node.users, *(reader for user in transposed for reader in user.users)]


def _padded_first(node: fx.Node) -> fx.Node:
    """Moves a padding before the permutation that it reads; returns the padding."""
    permuted, sizes, value = _arguments(node)
    if permuted.target is not _PERMUTE:
        return node

    source: Any = permuted.args[0]
    dims: Any = permuted.args[1]
    order = [dim % len(dims) for dim in dims]
    ends = dict(zip(reversed(order), zip(sizes[::2], sizes[1::2], strict=True), strict=False))
    moved = [size for d in reversed(range(len(order))) for size in ends.get(d, (0, 0))]
    graph = node.graph

    with graph.inserting_before(node):
        padded = graph.call_function(_PAD, (source, moved, value))
        again = graph.call_function(_PERMUTE, (padded, order))
    for made in (padded, again):
        made.meta = dict(node.meta)
        made.meta["val"] = _computed(made)

    node.replace_all_uses_with(again)
    graph.erase_node(node)
    if not permuted.users:
        graph.erase_node(permuted)
    return padded


def _find_strides(graph: fx.Graph) -> None:
    """Sets the strides of views: those of a product's result date from before the padding."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        is_view = bool(schema and schema.returns and schema.returns[0].alias_info)
        if not is_view or isinstance(node.meta.get("val"), list | tuple):
            continue

        try:
            found = _computed(node)
        except (RuntimeError, ValueError):
            continue  # a view that has become a copy
        if isinstance(found, torch.Tensor):
            node.meta["val"] = found


def _computed(node: fx.Node) -> Any:
    """Returns the result of an operator on fake tensors."""
    target: Any = node.target
    args = fx.map_arg(node.args, lambda each: each.meta["val"])
    kwargs = fx.map_arg(node.kwargs, lambda each: each.meta["val"])
    return target(*args, **kwargs)
