"""The backward of a step of which only some gradients arrive.

Plain PyTorch does not run operators that only lead to results which no loss uses. A joint graph
does, with zeros as their gradients. That takes time, and where the derivative is infinite or NaN,
zero times it is NaN, which would be added to the gradients of shared parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from remat.run.random_state import replay
from remat.tracers.recomputable import is_random

aten = torch.ops.aten
_SUMS = frozenset({aten.add.Tensor, aten.add_.Tensor})


def pruned(backward: fx.GraphModule, tangents: slice, missing: Collection[int]) -> fx.GraphModule:
    """Returns a backward without the operators that are computed from missing gradients alone.

    A sum with one of their results is its other term. Other operators get zeros, as in plain
    PyTorch, where one of several results of an operator has no gradient. O(V + E).

    Args:
        backward: the backward under a schedule.
        tangents: the places of the arriving gradients among its inputs.
        missing: numbers of the gradients that do not arrive, counted from the first tangent.
    """
    graph = fx.Graph()
    results: Any = graph.graph_copy(backward.graph, {})
    output = graph.output(results)
    absent = _computed_from_missing(graph, tangents, missing)

    for node in list(graph.nodes):
        if node.op == "call_function" and node not in absent:
            _without_terms(node, absent)
    output.args = (tuple(None if result in absent else result for result in output.args[0]),)

    for node in reversed(list(graph.nodes)):
        is_idle = node.op == "call_function" and not node.users
        if is_idle and (node in absent or _changes_nothing(node)):
            graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(backward, graph)


def _computed_from_missing(
    graph: fx.Graph, tangents: slice, missing: Collection[int]
) -> set[fx.Node]:
    """Returns the missing gradients, and all that depends on them and on none that arrives."""
    given = graph.find_nodes(op="placeholder")[tangents]
    absent = {given[place] for place in missing}
    arriving = {node for node in given if node not in absent}
    for node in graph.nodes:
        sources = set(node.all_input_nodes)
        if not sources.isdisjoint(arriving):
            arriving.add(node)
        elif not sources.isdisjoint(absent):
            absent.add(node)
    return absent


def _without_terms(node: fx.Node, absent: set[fx.Node]) -> None:
    """Makes a node that is computed do without the results that are not."""
    lost = [source for source in node.all_input_nodes if source in absent]
    if not lost:
        return

    graph = node.graph
    term = _other_term(node, absent)
    if term is None:
        for source in lost:
            with graph.inserting_before(node):
                node.replace_input_with(source, _zeros_like(graph, source.meta["val"]))
        return

    if node.target is aten.add_.Tensor and node.args[0] is term:
        kept = term
    else:  # a sum may be changed in place, and its terms may be read again
        with graph.inserting_before(node):
            kept = graph.call_function(aten.clone.default, (term,))
        kept.meta = dict(node.meta)
    node.replace_all_uses_with(kept)
    graph.erase_node(node)


def _other_term(node: fx.Node, absent: set[fx.Node]) -> fx.Node | None:
    """Returns the term of a sum that is computed, if it has the form of the sum."""
    if node.target not in _SUMS or node.kwargs or len(node.args) != 2:
        return None
    terms = [term for term in node.args if isinstance(term, fx.Node) and term not in absent]
    if len(terms) != 1:
        return None
    term, result = terms[0].meta["val"], node.meta["val"]
    return terms[0] if (term.shape, term.dtype) == (result.shape, result.dtype) else None


def _zeros_like(graph: fx.Graph, value: torch.Tensor) -> fx.Node:
    made = graph.call_function(
        _zeros, (tuple(value.shape), tuple(value.stride()), value.dtype, value.device)
    )
    made.meta = {"val": value}
    return made


def _zeros(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


def _changes_nothing(node: fx.Node) -> bool:
    """True for a node that may be left out if nobody reads it."""
    target = node.target
    if isinstance(target, OpOverload):
        return not target._schema.is_mutable and not is_random(node)
    return target in (operator.getitem, replay)
