"""Instance files: a plain DAG as published with papers, or a saved graph.

The plain form is one JSON object: `cost` and `size` (one number per node), `edges` (pairs `[u, v]`
with u < v: v reads the output of u) and, optionally, `first_backward`. Other keys are ignored.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from remat.core import serialize
from remat.core.errors import GraphError
from remat.core.graph import Graph

_WHAT = "an instance (an object with `cost`, `size` and `edges`)"


class _Plain(msgspec.Struct):
    cost: list[float]
    size: list[int]
    edges: list[tuple[int, int]]
    first_backward: int | None = None


def read_instance(path: str | Path) -> Graph:
    """Returns the graph that a file describes.

    Raises:
        GraphError: the file can't be read or breaks a rule; the message is one line and names the
            file and the rule.
    """
    content = serialize.read(path, GraphError)
    keys = serialize.decode(dict[str, msgspec.Raw], content, path, GraphError, _WHAT).keys()
    if "operators" in keys:
        return serialize.decode(Graph, content, path, GraphError)

    plain = serialize.decode(_Plain, content, path, GraphError, _WHAT)
    if not plain.cost:
        raise GraphError(f"{path}: the graph has no nodes; `cost` is empty")

    try:
        return Graph.from_arrays(
            plain.cost, plain.size, plain.edges, first_backward=plain.first_backward
        )
    except GraphError as reason:
        raise GraphError(f"{path}: {reason}") from None
