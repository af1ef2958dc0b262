"""Builds a schedule from the values to keep: recompute on demand, depth first, hold to last use.

All methods that only decide *which values to keep over the forward's end* use it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from remat.core.graph import Graph


def forward_length(graph: Graph) -> int:
    """Returns the number of operators in the forward pass, inferred where the graph has no phases.

    In a DAG of a training step without phases, the forward ends where most values are alive.
    """
    if graph.arrays.is_backward.any():
        return graph.num_forward
    alive = np.zeros(graph.num_operators + 1, np.int64)
    for value, users in enumerate(graph.users_of):
        if users and graph.producer[value] >= 0:
            alive[graph.producer[value]] += 1
            alive[users[-1]] -= 1
    return min(int(np.argmax(np.cumsum(alive))) + 1, graph.num_operators)


def values_always_kept(graph: Graph) -> set[int]:
    """Returns the values that no schedule built here drops: resident or impossible to recompute.

    The latter are all values of a pinned operator, of a snapshot, of an operator that writes a
    result of the graph, and of one that writes a value read in another region. The caller holds a
    result. A region is recomputed only in its own backward, too late for a reader elsewhere.
    """
    arrays, count = graph.arrays, graph.num_operators
    region = np.array([op.region for op in graph.operators], np.int64)
    is_held = np.zeros(len(graph.values), np.bool_)
    is_held[arrays.output] = True
    reader = np.repeat(np.arange(count), np.diff(arrays.read_start))
    is_held[arrays.read[region[reader] != region[arrays.producer[arrays.read]]]] = True

    # the last entry, index -1, stands for values that no operator writes
    is_once = np.append(arrays.is_pinned | arrays.is_snapshot, True)
    is_once[arrays.producer[is_held]] = True
    return set(np.flatnonzero(is_once[arrays.producer]).tolist())


def steps_on_demand(
    graph: Graph, kept: Collection[int], *, later: Mapping[int, Collection[int]] | None = None
) -> list[int]:
    """Returns the steps that keep only `kept` over the forward's end and recompute the rest.

    Args:
        graph: any graph; without phases the forward's end is inferred (`forward_length`).
        kept: values to keep, besides those of `values_always_kept`.
        later: for some backward operators, which of the values in memory to keep from there on.

    Before each backward operator, its missing reads are recomputed, depth first. A recomputed value
    is held to its last use, so without `later` it is computed at most twice. Complexity: O(E).
    """
    boundary = forward_length(graph)
    always = values_always_kept(graph)
    is_available = [False] * len(graph.values)
    for value in always.union(kept):
        is_available[value] = True

    steps = list(range(boundary))
    for index in range(boundary, graph.num_operators):
        if later is not None and index in later and index > boundary:
            stays = always.union(later[index])
            is_available = [
                is_there and value in stays for value, is_there in enumerate(is_available)
            ]

        operator = graph.operators[index]
        for value in operator.reads:
            if not is_available[value]:
                _make_available(graph, index, is_available, steps)
                break

        steps.append(index)
        for value in operator.writes:
            is_available[value] = True
    return steps


def _make_available(graph: Graph, index: int, is_available: list[bool], steps: list[int]) -> None:
    stack = [(index, iter(graph.operators[index].reads))]
    while stack:
        current, reads = stack[-1]
        missing = next((v for v in reads if not is_available[v]), None)
        if missing is not None:
            parent = graph.producer[missing]
            stack.append((parent, iter(graph.operators[parent].reads)))
            continue

        stack.pop()
        if current != index and not all(is_available[v] for v in graph.operators[current].writes):
            steps.append(current)
            for value in graph.operators[current].writes:
                is_available[value] = True
