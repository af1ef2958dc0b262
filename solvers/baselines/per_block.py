"""One segment per block: what users of `torch.utils.checkpoint` write by hand.

Other names: full activation recomputation (Megatron-LM), `gradient_checkpointing_enable` (Hugging
Face), uniform checkpointing.
Papers: T. Chen et al., 2016, arXiv:1604.06174, with layers as stages.
Optimal: never proved.
Complexity: O(E) per schedule; one for each depth of nested containers that most operators share.
Imperfections: needs module paths with numbered containers (`blocks.3.attn`); treats all blocks
alike, whatever the budget. It is slightly better than `torch.utils.checkpoint`, which recomputes a
whole block when the backward enters it: here only what is read is recomputed, when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.solvers.baselines.segment_family import Family
from remat.solvers.core.on_demand import forward_length, steps_on_demand


@final
@dataclass(frozen=True)
class PerBlock(Family):
    """Drops the inside of each block; where containers are nested, the cheapest depth that fits.

    A block is a module whose name is a number, such as `blocks.3` or `layer1.0`.
    """

    def members(self, graph: Graph) -> list[list[int]]:
        """Returns one schedule per depth.

        Raises:
            SolverError: the operators' modules name fewer than two blocks.
        """
        members = list(block_schedules(graph))
        if not members:
            named = sum(bool(op.module) for op in graph.operators)
            raise SolverError(
                "per-block needs module paths with at least two numbered blocks, such as "
                f"`blocks.0` and `blocks.1`; {named} of "
                f"{graph.num_operators} operators name a module. Trace a model that keeps its "
                'layers in a ModuleList, or use "auto"'
            )

        return members


def block_of(module: str, depth: int) -> str:
    """Returns the path of the block around `module` at a depth of nested containers, or "".

    >>> path = "layers.0.blocks.1.mlp"
    >>> block_of(path, 1), block_of(path, 2), block_of("head", 1)
    ('layers.0', 'layers.0.blocks.1', '')
    """
    parts = module.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[min(depth, len(numbered)) - 1] + 1]) if numbered else ""


def block_schedules(graph: Graph) -> Iterator[list[int]]:
    """Yields one schedule per depth that at least half of the operators in blocks reach.

    A block's own small `Sequential` (`blocks.3.mlp.0`) does not make a depth; stages of blocks do.
    """
    modules = [op.module for op in graph.operators[: forward_length(graph)]]
    depths = sorted(
        depth for module in modules if (depth := sum(part.isdigit() for part in module.split(".")))
    )
    for depth in range(1, depths[len(depths) // 2] + 1 if depths else 1):
        if len({block_of(module, depth) for module in modules} - {""}) > 1:
            yield steps_on_demand(graph, _kept_values(graph, _segments(graph, depth)))


def _segments(graph: Graph, depth: int) -> dict[int, int]:
    """Returns the segment of each forward operator in a block; a block that runs twice has two."""
    segment_of: dict[int, int] = {}
    segment, latest = -1, ""

    for index, op in enumerate(graph.operators[: forward_length(graph)]):
        block = block_of(op.module, depth)
        if op.is_snapshot or (not block and not op.module):
            continue  # it neither belongs to a block nor ends one
        if block != latest:
            segment, latest = segment + 1, block
        if block:
            segment_of[index] = segment

    return segment_of


def _kept_values(graph: Graph, segment_of: dict[int, int]) -> set[int]:
    """Returns the forward values that are written or read outside their segment."""
    boundary = forward_length(graph)
    kept: set[int] = set()

    for index, op in enumerate(graph.operators[:boundary]):
        segment = segment_of.get(index)
        for value in op.writes:
            readers = [u for u in graph.users_of[value] if u < boundary]
            if segment is None or any(segment_of.get(u) != segment for u in readers):
                kept.add(value)
    return kept
