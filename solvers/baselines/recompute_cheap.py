"""Keep what is expensive to compute, recompute the rest.

Other names: recompute-elementwise, "save dots" (JAX's `dots_saveable` policy), selective activation
checkpointing with the usual list of operators, fusible recomputation of AOTAutograd's min-cut.
Papers: none; JAX's `jax.checkpoint_policies` and
`torch.utils.checkpoint.create_selective_checkpoint_contexts` are the best-known forms.
Optimal: never proved.
Complexity: O(E) per schedule; one where operators have targets, twenty-one where they have only
costs.
Imperfections: one rule for the whole network; with targets it does not depend on the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from remat.core.graph import Graph
from remat.solvers.baselines.segment_family import Family, forward_operators
from remat.solvers.core.on_demand import steps_on_demand

MATRIX_PRODUCTS = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "matmul", "linear", "einsum",
    "_scaled_mm", "_grouped_mm", "_int_mm",
    "convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution",
    "cudnn_convolution", "conv1d", "conv2d", "conv3d",
})  # fmt: skip
_NUM_SHARES = 20  # tried besides 0, in steps of 5 %; a round number, not measured


@final
@dataclass(frozen=True)
class RecomputeCheap(Family):
    """Keeps the outputs of matrix products, convolutions and attention, and recomputes the others.

    Where operators have no targets, it keeps the most expensive ones up to a share of the forward's
    cost; shares from 0 to 100 % are tried, and the cheapest schedule that fits is taken.
    """

    def members(self, graph: Graph) -> Iterator[list[int]]:
        """Yields one schedule, or one per share where operators have no targets."""
        return (
            steps_on_demand(graph, {v for i in kept for v in graph.operators[i].writes})
            for kept in _kept_operators(graph)
        )


def operator_name(target: str) -> str:
    """Returns an operator's name without namespace and overload.

    >>> operator_name("aten.mm.default"), operator_name("aten::mm")
    ('mm', 'mm')
    """
    parts = target.replace("::", ".").split(".")
    return parts[1] if len(parts) > 1 else target


def is_attention_kernel(target: str) -> bool:
    """True for the fused kernels of scaled dot product attention.

    >>> is_attention_kernel("aten._scaled_dot_product_flash_attention.default")
    True
    """
    name = operator_name(target)
    return "scaled_dot_product" in name or name in {
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "flex_attention",
    }


def _kept_operators(graph: Graph) -> Iterator[list[int]]:
    forward = forward_operators(graph)
    targets = [graph.operators[i].target for i in forward]
    if any(targets):
        yield [
            i
            for i, t in zip(forward, targets, strict=True)
            if operator_name(t) in MATRIX_PRODUCTS or is_attention_kernel(t)
        ]
        return

    by_cost = sorted(forward, key=lambda i: -graph.operators[i].cost_s)
    total_s = sum(graph.operators[i].cost_s for i in forward)

    for part in range(_NUM_SHARES + 1):
        kept: list[int] = []
        held_s = 0.0
        for i in by_cost:
            if held_s >= total_s * part / _NUM_SHARES:
                break
            kept.append(i)
            held_s += graph.operators[i].cost_s
        yield kept
