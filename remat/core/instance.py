"""Instance files: a plain DAG as published with papers, or a saved graph.

The plain form is one JSON object: `cost` and `size` (one number a node), `edges` (pairs `[u, v]`
with u < v: v reads the output of u) and, where the graph has one, `first_backward`. Other keys
are for people. This module knows neither torch nor a solver.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from remat.core.errors import GraphError
from remat.core.graph import Graph

_EXACT_INT = 2**53  # sums of sizes are exact in floating point up to here


class _Plain(msgspec.Struct):
    cost: list[float]
    size: list[int]
    edges: list[tuple[int, int]]
    first_backward: int | None = None


def read_instance(path: str | Path) -> Graph:
    """Returns the graph that a file describes.

    Raises:
        GraphError: the file can't be read or breaks a rule; one line names it and says how.
    """
    try:
        content = Path(path).read_bytes()
        keys = msgspec.json.decode(content, type=dict[str, msgspec.Raw]).keys()
        return (
            Graph.load(path)
            if "operators" in keys
            else _from_plain(msgspec.json.decode(content, type=_Plain))
        )
    except OSError as reason:
        raise GraphError(f"{path}: {reason.strerror or reason}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as reason:
        raise GraphError(
            f"{path} is no instance (an object with `cost`, `size` and `edges`): {reason}"
        ) from None
    except GraphError as reason:
        message = str(reason)
        raise GraphError(message if str(path) in message else f"{path}: {message}") from None


def _from_plain(plain: _Plain) -> Graph:
    if not plain.cost:
        raise GraphError("the graph has no nodes; `cost` is empty")
    for node, (cost, size) in enumerate(zip(plain.cost, plain.size, strict=False)):
        if not (math.isfinite(cost) and cost >= 0):
            raise GraphError(f"node {node} has the cost {cost}; a cost is finite and not negative")
        if size < 0:
            raise GraphError(f"node {node} has the size {size:,}; a size is not negative")
    if sum(plain.size) >= _EXACT_INT or not math.isfinite(sum(plain.cost)):
        raise GraphError(
            "costs or sizes add up to more than can be counted exactly (2**53); use a larger unit"
        )
    return Graph.from_arrays(
        plain.cost, plain.size, plain.edges, first_backward=plain.first_backward
    )
