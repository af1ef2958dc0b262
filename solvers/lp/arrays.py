"""A mixed-integer program as plain arrays, and the constants that stand in for a column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ZERO, ONE = -1, -2  # constants in place of a column's index


@dataclass(frozen=True)
class ModelArrays:
    """min cost'x + offset over Ax <= row_upper, 0 <= x <= column_upper; A in CSR form."""

    cost: NDArray[np.float64]
    offset: float
    column_upper: NDArray[np.float64]
    is_integer: NDArray[np.bool_]
    row_start: NDArray[np.int32]
    index: NDArray[np.int32]
    value: NDArray[np.float64]
    row_upper: NDArray[np.float64]
