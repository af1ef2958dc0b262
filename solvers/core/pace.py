"""How long it takes to go through a graph.

What looks at no clock before it is done begins only where it will be done in time. How long that
takes is told in passes: the time to go once over all operators and what they read, in plain Python
and on this machine, as busy as it is.
"""

from __future__ import annotations

import time

from remat.core.graph import Graph

_READS_AN_OPERATOR = 12  # that take as long; measured on a chain and on a complete graph
_USUAL_WORK = 20_000  # operators; a pass over fewer takes milliseconds
_SAMPLES = 50_000  # some 8 ms


def work_of(graph: Graph) -> float:
    """Returns the size of a graph, in operators of few reads."""
    return graph.num_operators + len(graph.arrays.read) / _READS_AN_OPERATOR


def pace_s(graph: Graph) -> float:
    """Returns the seconds of a pass; 0 for usual graphs."""
    work = work_of(graph)
    if work <= _USUAL_WORK:
        return 0.0

    began = time.perf_counter()
    for index in range(_SAMPLES):
        {index}  # noqa: B018 - as much work as an operator
    return (time.perf_counter() - began) * work / _SAMPLES
