"""Keep everything but the inside of attention.

Other names: selective activation recomputation (Megatron-LM).
Papers: V. Korthikanti et al., "Reducing activation recomputation in large transformer models",
MLSys 2023, arXiv:2205.05198, section 5.
Optimal: never proved; it drops the values of a transformer with long sequences that are large but
cheap to recompute.
Complexity: O(E); one schedule.
Imperfections: only for transformers whose attention is written out; a fused kernel has no inside.
The inside is recognised by its operators: the batched matrix products before and after a softmax,
and everything between them; without targets, by the modules named attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import final

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.solvers.baselines.recompute_cheap import (
    MATRIX_PRODUCTS,
    is_attention_kernel,
    operator_name,
)
from remat.solvers.baselines.segment_family import Family, forward_operators
from remat.solvers.core.on_demand import forward_length, steps_on_demand

_BATCHED_PRODUCTS = frozenset({"bmm", "baddbmm"})
_SOFTMAXES = frozenset({"_softmax", "_safe_softmax", "softmax"})
_ATTENTION_MODULE = re.compile(r"attn|attention", re.IGNORECASE)


@final
@dataclass(frozen=True)
class RecomputeAttention(Family):
    """Recomputes the inside of attention (scores, softmax, dropout, ...); keeps everything else."""

    def members(self, graph: Graph) -> list[list[int]]:
        """Returns the method's one schedule.

        Raises:
            SolverError: the graph has no attention, no names to find it by, or only fused kernels.
        """
        inside = _values_inside(graph, _attention_operators(graph))
        if not inside:
            fused = any(is_attention_kernel(op.target) for op in graph.operators)
            reason = (
                "its attention is in fused kernels, which have no values inside"
                if fused
                else _missing(graph)
            )
            raise SolverError(
                f"there is no attention to recompute: {reason}. "
                'Use "recompute-cheap", "per-block" or "auto"'
            )

        kept = {v for i in forward_operators(graph) for v in graph.operators[i].writes} - inside
        return [steps_on_demand(graph, kept)]


def _missing(graph: Graph) -> str:
    if any(op.target or op.module for op in graph.operators):
        return "the graph has no softmax between two batched matrix products"
    return "no operator of the graph names its target or its module"


def _attention_operators(graph: Graph) -> set[int]:
    forward = range(forward_length(graph))
    if not any(op.target for op in graph.operators):
        return {i for i in forward if _ATTENTION_MODULE.search(graph.operators[i].module)}

    found: set[int] = set()
    for softmax in forward:
        if operator_name(graph.operators[softmax].target) not in _SOFTMAXES:
            continue

        before = _reach(graph, softmax, lambda i: graph.parents_of[i])
        after = _reach(
            graph,
            softmax,
            lambda i: (
                u for v in graph.operators[i].writes for u in graph.users_of[v] if u in forward
            ),
        )

        if _has_product(graph, before) and _has_product(graph, after):
            found |= before | after
    return found


def _reach(graph: Graph, start: int, step: Callable[[int], Iterable[int]]) -> set[int]:
    """Returns what `step` reaches from `start` up to matrix products, batched ones included."""
    reached, stack = {start}, [start]
    while stack:
        for index in step(stack.pop()):
            name = operator_name(graph.operators[index].target)
            if index in reached or (name in MATRIX_PRODUCTS and name not in _BATCHED_PRODUCTS):
                continue

            reached.add(index)
            if name not in _BATCHED_PRODUCTS:
                stack.append(index)
    return reached


def _has_product(graph: Graph, operators: set[int]) -> bool:
    return any(operator_name(graph.operators[i].target) in _BATCHED_PRODUCTS for i in operators)


def _values_inside(graph: Graph, attention: set[int]) -> set[int]:
    """Returns the values of operators whose outputs the forward reads only inside attention."""
    boundary = forward_length(graph)
    inside: set[int] = set()
    for index in attention:
        writes = graph.operators[index].writes
        readers = {u for v in writes for u in graph.users_of[v] if u < boundary}
        if readers and readers <= attention:
            inside.update(writes)
    return inside
