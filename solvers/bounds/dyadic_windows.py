"""Stages of equal length, and windows of 2, 4, 8, ... of them.

Where a budget is tight, values are recomputed all over the backward, and schedules fail at many
operators rather than at a few (`refinement`). So the backward is cut into stages of equal length.
Stages alone give a weak bound: the linear relaxation computes half of a value in one stage and half
in the next, and holds half of it in between. Windows of 2, 4, 8, ... stages, each length once from
the grid's start and once shifted by half a length, forbid that: an operator that runs anywhere in a
window counts once for its memory.

K stages have about 3 K windows. Source: this package's own; the windows are those of a segment
tree, plus shifted ones.
"""

from __future__ import annotations

from itertools import pairwise

from remat.solvers.bounds.window import Window

LEAST_OPERATORS = 2  # in the last stage; a shorter remainder joins the stage before it; not tuned
# forward operators; beyond, many small models take too long: for chosen stages, Benders, and
# refinement that gives way to it; how long, and on which graphs, is not on record
MOST_FORWARD = 250


def even_stages(first: int, end: int, length: int) -> tuple[list[Window], set[Window]]:
    """Returns the stages of `length` operators between two boundaries, and all windows.

    The boundaries are at least two operators apart. The last stage is longer where the remainder is
    too short for a stage.
    """
    boundaries = [*range(first, end - LEAST_OPERATORS + 1, length), end]
    stages, num_stages = list(pairwise(boundaries)), len(boundaries) - 1
    windows, width = {*stages, (boundaries[0], boundaries[-1])}, 2
    while width < num_stages:
        for begin in range(0, num_stages, width // 2):
            windows.add((boundaries[begin], boundaries[min(begin + width, num_stages)]))
        width *= 2
    return stages, windows
