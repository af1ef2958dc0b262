"""Estimates how long a pass over a graph takes.

Code that does not check the clock while it runs is started only if it will finish in time. Its
duration is given in passes: the time to go once over all operators and their reads in plain Python,
on this machine and under its present load.
"""

from __future__ import annotations

import time

from remat.core.graph import Graph

# reads that take as long as one operator; measured on a chain and on a complete graph
_READS_PER_OPERATOR = 12
_USUAL_WORK = 20_000  # operators; a pass over fewer takes milliseconds
_SAMPLES = 50_000  # some 8 ms


def work_of(graph: Graph) -> float:
    """Returns the work of a pass over a graph, as a number of operators with few reads."""
    return graph.num_operators + len(graph.arrays.read) / _READS_PER_OPERATOR


def pace_s(graph: Graph) -> float:
    """Returns the seconds that a pass takes; 0 for graphs of usual size."""
    work = work_of(graph)
    if work <= _USUAL_WORK:
        return 0.0

    began = time.perf_counter()
    for index in range(_SAMPLES):
        {index}  # noqa: B018 - as much work as an operator
    return (time.perf_counter() - began) * work / _SAMPLES
