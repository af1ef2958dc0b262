"""Bounds that do not depend on an LP solver's tolerances.

Linear programs. For `min c'x, L <= Ax <= U, l <= x <= u`, *any* row multipliers y, and d = c - A'y,

    c'x = y'Ax + (c - A'y)'x >= sum_i min(y_i L_i, y_i U_i) + sum_j min(d_j l_j, d_j u_j)

for every feasible x (Neumaier and Shcherbina, "Safe bounds in linear and mixed-integer linear
programming", 2004). The solver's duals are only a good choice of y: where they are slightly
infeasible, the second sum gets smaller. A multiplier of an infinite side is set to zero. With
c = 0 a positive right side proves that there is no feasible x (Farkas): a solver's claim of
infeasibility is checked with its dual ray as y.

Rounding. With u = 2^-53, a sum of k products computed in any order is off by at most (k + 1) u sum
|products| (1 + O(k u)) (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, chapter 3).
d is lowered by twice that before it is multiplied with l >= 0, and so is the total, so the result
is below the exact right side. The model's own coefficients are rounded once, when sizes are divided
by the budget and costs are scaled: relative errors of u, ten orders of magnitude below the window
model's slack of 1e-6 of the budget and of the keep-all cost.

Integer programs. HiGHS's dual bound is the smallest LP objective over the open nodes, each LP being
optimal up to its dual tolerance t = 0.1 * `mip_feasibility_tolerance` (`HighsLpRelaxation`, HiGHS
1.5 to 1.15). By the formula above, an LP's objective exceeds its safe bound by at most t sum_j (u_j
- l_j) plus rounding, as each d_j is at most t on the wrong side. Nodes that HiGHS pruned as
infeasible or too expensive were so by more than the tolerances: rows hold up to 1e-6, rows of 0/1
columns with integer coefficients are violated by 1 or not at all, memory rows have a slack of 1e-6
of the budget, and cuts (`benders`, `rounding_cuts`) hold for every schedule with slack for their
own rounding. So the bound less `branching_margin` holds for every schedule. This is an argument
about HiGHS's algorithm, not a certificate of its tree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from remat.solvers.core.accounting import Floats, Ints

_UNIT = 2.0**-53
_DUAL_SHARE = 0.1  # HiGHS's dual tolerance in branch and bound, over its feasibility tolerance
_ABSOLUTE_GAP = 1e-6  # HiGHS's `mip_abs_gap`: nodes this close to the best point are pruned


@dataclass(frozen=True)
class LinearProgram:
    """min cost'x over row_lower <= Ax <= row_upper, 0 <= lower <= x <= upper.

    A is in CSR form, of shape (rows, columns).
    """

    cost: Floats
    lower: Floats
    upper: Floats
    row_lower: Floats
    row_upper: Floats
    row_start: Ints
    index: Ints
    value: Floats


@dataclass(frozen=True)
class Support:
    """A lower bound `constant + slope @ x` on the objective, affine in some columns.

    It holds for every feasible point, whatever the bounds of these columns are.

    Attributes:
        constant: in units of the objective.
        slope: by column.
        is_ray: the function bounds no objective; where it is positive there is no feasible point.
    """

    constant: float
    slope: Floats
    is_ray: bool = False

    def at(self, point: Floats) -> float:
        """Returns the function's value, rounded to nearest."""
        return self.constant + float(np.dot(self.slope, point))


def safe_bound(program: LinearProgram, multipliers: Floats) -> float:
    """Returns a lower bound on the objective that holds for any multipliers; may be -inf.

    Complexity: O(nonzeros).
    """
    return safe_support(program, program.cost, multipliers, np.zeros(0, np.int64)).constant


def is_surely_infeasible(program: LinearProgram, ray: Floats) -> bool:
    """True where `ray` proves that there is no feasible point."""
    return (
        safe_support(program, np.zeros(len(program.cost)), ray, np.zeros(0, np.int64)).constant > 0
    )


def proves_infeasible(solver: Any, program: LinearProgram) -> bool:
    """True where HiGHS's dual rays prove its claim that the linear program is infeasible.

    If they do not at first, HiGHS solves once more, without presolve.
    """
    if any(is_surely_infeasible(program, ray) for ray in dual_rays(solver)):
        return True
    solver.setOptionValue("presolve", "off")
    solver.clearSolver()
    solver.run()
    return any(is_surely_infeasible(program, ray) for ray in dual_rays(solver))


def dual_rays(solver: Any) -> list[Floats]:
    """Returns the dual ray of a `highspy.Highs` in both directions; empty where it has none."""
    _, has_ray, ray = solver.getDualRay()
    return [sign * np.array(ray) for sign in (1.0, -1.0)] if has_ray else []


def branching_margin(
    lower: Floats, upper: Floats, feasibility_tolerance: float, largest: float
) -> float:
    """Returns what is subtracted from HiGHS's dual bound of an integer program.

    Args:
        lower: of the columns.
        upper: of the columns.
        feasibility_tolerance: HiGHS's `mip_feasibility_tolerance`.
        largest: bound on the columns without an upper one, valid at every point of interest.
    """
    width = math.fsum(np.minimum(upper, largest) - lower)
    return _DUAL_SHARE * feasibility_tolerance * width * (1 + 1e-9) + _ABSOLUTE_GAP


def safe_support(
    program: LinearProgram, cost: Floats, multipliers: Floats, columns: Ints
) -> Support:
    """Returns the right side of the module's formula as a function of `columns`; O(nonzeros).

    The constant may be -inf. The slopes are rounded down as d is, which for x >= 0 lowers the
    function.
    """
    side = np.where(multipliers > 0, program.row_lower, program.row_upper)
    y = np.where(np.isfinite(side) & np.isfinite(multipliers), multipliers, 0.0)
    rows = y * np.where(np.isfinite(side), side, 0.0)
    reduced = _reduced_costs(program, cost, y)
    slope = reduced[columns]
    reduced[columns] = 0.0

    with np.errstate(invalid="ignore"):  # 0 * inf where an unbounded column has no reduced cost
        corners = np.minimum(
            reduced * program.lower, np.where(reduced < 0, reduced * program.upper, 0.0 * reduced)
        )
        least = np.where(reduced < 0, corners, reduced * program.lower)
    if not np.isfinite(least).all():
        return Support(-math.inf, slope)

    terms = np.concatenate([rows, least])
    return Support(
        float(terms.sum()) - 2 * (len(terms) + 3) * _UNIT * float(np.abs(terms).sum()), slope
    )


def _reduced_costs(program: LinearProgram, cost: Floats, y: Floats) -> Floats:
    """Returns c - A'y, each lowered by more than what rounding can have added."""
    count = len(cost)
    products = program.value * np.repeat(y, np.diff(program.row_start))
    total = np.bincount(program.index, weights=products, minlength=count)
    size = np.bincount(program.index, weights=np.abs(products), minlength=count) + np.abs(cost)
    entries = np.bincount(program.index, minlength=count)
    lowered: Floats = cost - total - 2 * (entries + 3) * _UNIT * size
    return lowered
