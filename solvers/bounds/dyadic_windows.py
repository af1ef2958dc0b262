"""Even stages, and windows of every length above them.

Where a budget is tight, values are computed again all over the backward, and no few operators fail
(`refinement`). So the backward is cut into stages of equal length. Stages alone bound little: the
linear relaxation computes half of a value in one stage and half in the next, and holds half of it
meanwhile. Windows of 2, 4, 8 ... stages, each length once from the grid's start and once shifted by
half a length, forbid that: whatever runs anywhere in a window counts once for its memory.

K stages have about 3 K windows. Source: this package's own; the windows are those of a segment
tree, and the same shifted.
"""

from __future__ import annotations

from itertools import pairwise

from remat.solvers.bounds.window import Window

LEAST_OPERATORS = 2  # of a stage
MOST_FORWARD = 250  # operators of a forward, beyond which many small models take too long


def even_stages(first: int, end: int, length: int) -> tuple[list[Window], set[Window]]:
    """Returns the stages of `length` operators between two boundaries, and the windows of all
    lengths with them.

    The boundaries are two operators apart at least. The last stage may be longer, by as much as
    would make one too short.
    """
    boundaries = [*range(first, end - LEAST_OPERATORS + 1, length), end]
    stages, num_stages = list(pairwise(boundaries)), len(boundaries) - 1
    windows, width = {*stages, (boundaries[0], boundaries[-1])}, 2
    while width < num_stages:
        for begin in range(0, num_stages, width // 2):
            windows.add((boundaries[begin], boundaries[min(begin + width, num_stages)]))
        width *= 2
    return stages, windows
