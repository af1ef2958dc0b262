"""Mixed-integer rounding cuts of memory rows: values are kept whole or not at all.

A memory row over 0/1 columns is a knapsack, sum of a_i x_i <= b with integers a and b (`window`,
`transient_rows`). A network's values come in few sizes, and the budget is not a multiple of the
large ones: a point of the linear relaxation fills what is left with a fraction of one more value.
With some columns replaced by their complements, any unit d > 0, and f = b mod d, every 0/1 point
satisfies

    sum_i ( floor(a_i / d) + max(0, a_i mod d - f) / (d - f) ) x_i  <=  floor(b / d)

(Marchand and Wolsey, "Aggregation and mixed integer rounding to solve MIPs", 2001; Nemhauser and
Wolsey, 1990). As in these papers, columns above a half are complemented, then one fractional column
is flipped; units are the sizes of fractional columns, and these sizes divided by 2, 4 and 8.

A point can escape such a cut by dropping a little of the complemented values, many of which are
cheap to drop. So the cut is also returned with few complements: columns kept in full are no longer
complemented, those written first before others, as long as floor(b / d) stays the same. The cut
then does not constrain them, and the values left in it are expensive to drop, such as gradients.

Columns that are 0 or 1 in every schedule may be declared continuous in the model; the cuts hold
nevertheless. Everything but the last quotient is computed in integers. Complexity per row:
O(units * (fractional columns)^2), and O(columns) for the cut itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat.solvers.core.accounting import Bools, Floats, Ints

# Divisors, flips and sizes were measured together on published graphs (ResNet-50 at 5 GB); other
# numbers are tolerances and were not tuned.
_FRACTIONAL = 1e-5  # columns farther than this from 0 and 1 are fractional
_DIVISORS = np.array([1, 2, 4, 8])
_LEAST_VIOLATION = 1e-3  # Euclidean distance, over the fractional columns
_LEAST_EXCESS = 1e-5  # over the upper side; fraction of the largest coefficient
_TINY = 1e-7  # fraction of the largest coefficient; smaller ones are dropped, on the safe side
_MOST_FLIPS = 10  # columns flipped one by one, those nearest to a half
_MOST_SIZES = 16  # sizes that units are made from, those of the columns nearest to a half
_SLACK = 1e-9  # fraction of a cut's coefficients, which are rounded twice


@dataclass(frozen=True)
class Knapsack:
    """The row `bytes @ x[columns] <= upper` over columns that are 0 or 1 for every schedule.

    Attributes:
        columns: distinct.
        bytes: exact, of either sign.
        upper: exact.
        written: the operator that writes each column's bytes; values written early are cheap to
            drop.
    """

    columns: Ints
    bytes: Ints
    upper: int
    written: Ints


@dataclass(frozen=True)
class Cut:
    """The row `coefficients @ x[columns] <= upper`, whose largest coefficient is 1."""

    columns: Ints
    coefficients: Floats
    upper: float


def rounded(knapsack: Knapsack, point: Floats) -> list[Cut]:
    """Returns the most violated cut tried, and its version with few complements, if violated.

    Args:
        knapsack: a row that holds for every schedule.
        point: values of all columns.
    """
    value = np.clip(point[knapsack.columns], 0.0, 1.0)
    is_complement = value > 0.5
    fractional = _fractional(knapsack, value)
    sizes = np.abs(knapsack.bytes[fractional])
    if not len(fractional) or knapsack.upper - float(np.dot(knapsack.bytes, value)) > sizes.max():
        return []

    sizes = np.unique(sizes[:_MOST_SIZES])
    units = np.unique((sizes[:, None] // _DIVISORS)[sizes[:, None] % _DIVISORS == 0])
    flips = np.arange(-1, min(len(fractional), _MOST_FLIPS))  # -1 for none

    complement = is_complement[fractional] ^ (np.arange(len(fractional)) == flips[:, None])
    signed = np.where(complement, -knapsack.bytes[fractional], knapsack.bytes[fractional])
    others = is_complement.copy()
    others[fractional] = False
    left = knapsack.upper - int(knapsack.bytes[others].sum())
    upper = left + np.where(complement, signed, 0).sum(axis=1)

    weight = _weights(signed[:, None, :], upper[:, None, None], units[:, None])
    inside = np.where(complement, 1 - value[fractional], value[fractional])
    excess = np.einsum("fuc,fc->fu", weight, inside) - upper[:, None] // units
    excess /= np.maximum(np.sqrt((weight**2).sum(axis=2)), 1e-9)
    flip, unit = np.unravel_index(int(np.argmax(excess)), excess.shape)
    if excess[flip, unit] <= _LEAST_VIOLATION:
        return []

    is_complement[fractional] = complement[flip]
    spare = _spare(knapsack, int(units[unit]), is_complement, value)
    cuts = [
        _cut(knapsack, int(units[unit]), chosen)
        for chosen in (is_complement, is_complement ^ spare)[: 1 + int(spare.any())]
    ]

    return [
        cut
        for cut in cuts
        if float(np.dot(cut.coefficients, point[cut.columns])) > cut.upper + _LEAST_EXCESS
    ]


def _fractional(knapsack: Knapsack, value: Floats) -> Ints:
    """Returns the places of columns with bytes between 0 and 1, the nearest to a half first."""
    is_between = np.abs(value - (value > 0.5)) > _FRACTIONAL
    places: Ints = np.flatnonzero(is_between & (knapsack.bytes != 0))
    distance: Floats = np.abs(value[places] - 0.5)
    return places[np.argsort(distance, kind="stable")]


def _spare(knapsack: Knapsack, unit: int, is_complement: Bools, value: Floats) -> Bools:
    """Returns the columns kept in full that the cut can leave out, those written first."""
    missing = unit - (knapsack.upper - int(knapsack.bytes[is_complement].sum())) % unit
    is_full = np.where(
        knapsack.bytes > 0,
        is_complement & (value >= 1 - _FRACTIONAL),
        ~is_complement & (value <= _FRACTIONAL),
    )

    size = np.abs(knapsack.bytes)
    chosen = np.flatnonzero(is_full & (size < missing))
    chosen = chosen[np.argsort(knapsack.written[chosen], kind="stable")]
    result = np.zeros(len(size), np.bool_)
    result[chosen[np.cumsum(size[chosen]) < missing]] = True
    return result


def _weights(bytes_: Ints, upper: Ints, unit: Ints) -> Floats:
    """Returns floor(a / d) + max(0, a mod d - f) / (d - f)."""
    rest = upper % unit
    whole, part = np.divmod(bytes_, unit)
    return np.asarray(whole + np.maximum(part - rest, 0) / (unit - rest))


def _cut(knapsack: Knapsack, unit: int, complement: Bools) -> Cut:
    upper = knapsack.upper - int(knapsack.bytes[complement].sum())
    weight = _weights(
        np.where(complement, -knapsack.bytes, knapsack.bytes), np.array(upper), np.array(unit)
    )

    coefficient = np.where(complement, -weight, weight)
    limit = float(upper // unit) - float(weight[complement].sum())
    scale = float(np.abs(weight).max()) or 1.0
    is_tiny = np.abs(coefficient) < _TINY * scale
    limit += float(np.maximum(-coefficient[is_tiny], 0).sum())

    slack = _SLACK * (abs(limit) + float(np.abs(weight).sum()))
    used = np.flatnonzero(~is_tiny)
    return Cut(knapsack.columns[used], coefficient[used] / scale, (limit + slack) / scale)
