"""Digests of a captured step: of all its plan depends on, and of its structure alone."""

from __future__ import annotations

import hashlib

from remat.core.graph import Graph


def computation_of(graph: Graph) -> str:
    """Returns a digest of everything a plan depends on: a graph without its names.

    Names change when a number becomes an input of the step, but the plan stays the same.
    """
    sizes = [(value.size_bytes, value.kind) for value in graph.values]
    costs = [(op.cost_s, op.workspace_bytes) for op in graph.operators]
    return hashlib.sha256(repr((structure_of(graph), sizes, costs)).encode()).hexdigest()


def structure_of(graph: Graph) -> str:
    """Returns a digest of a graph without its sizes and costs.

    It is usually the same for two shapes of one step.
    """
    parts = [
        (op.target, op.reads, op.writes, op.phase, op.region, op.pinned, op.reuses, op.is_snapshot)
        for op in graph.operators
    ]
    return hashlib.sha256(
        repr((parts, graph.outputs, [v.kind for v in graph.values])).encode()
    ).hexdigest()
