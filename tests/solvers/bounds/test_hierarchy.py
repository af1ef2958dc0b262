"""Even stages tile the backward, and their windows are unions of them.

Linear programs may start from the last basis.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from remat.solvers.bounds.dyadic_windows import LEAST_OPERATORS, even_stages
from remat.solvers.lp.linear import Program


@pytest.mark.parametrize(
    ("first", "end", "length"), [(5, 45, 4), (5, 46, 4), (3, 40, 8), (0, 7, 16), (2, 103, 1)]
)
def test_windows_are_unions_of_stages_that_tile_the_backward(
    first: int, end: int, length: int
) -> None:
    stages, windows = even_stages(first, end, length)
    boundaries = [first, *(b for _, b in stages)]
    assert stages == list(pairwise(boundaries))
    assert boundaries[-1] == end
    assert all(b - a == length for a, b in stages[:-1])
    assert stages[-1][1] - stages[-1][0] >= LEAST_OPERATORS

    assert {*stages, (first, end)} <= windows
    assert all(a in boundaries and b in boundaries and a < b for a, b in windows)
    assert len(windows) <= 4 * len(stages) + 1


def test_every_two_neighbours_are_in_a_window_of_two() -> None:
    stages, windows = even_stages(0, 64, 4)
    assert all((a, d) in windows for (a, _), (_, d) in pairwise(stages))


@pytest.mark.parametrize("seed", range(5))
def test_relaxations_that_start_from_the_last_basis_give_the_same_bounds(seed: int) -> None:
    random = np.random.default_rng(seed)
    programs = [Program(), Program()]
    programs[1].starts_from_last = True
    bounds: list[list[float]] = [[], []]

    for _ in range(4):
        cost, width = (
            random.uniform(0, 5, 12),
            np.stack([random.permutation(12)[:3] for _ in range(6)]),
        )

        for program, found in zip(programs, bounds, strict=True):
            first = program.num_columns
            program.add_columns(cost)
            program.add_rows(width + first, [1.0, 1.0, 1.0], lower=1.0)
            if first:
                program.add_rows(
                    np.stack([width[:, 0] + first, width[:, 1] + first - 12], axis=1),
                    [1.0, 1.0],
                    lower=1.5,
                )
            found.append(program.minimise(is_relaxed=True, time_limit_s=10).bound)

    assert bounds[1] == pytest.approx(bounds[0], rel=1e-9)
    assert bounds[0] == sorted(bounds[0])
    assert bounds[0][0] > 0
