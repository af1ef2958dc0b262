"""What a running solver tells: how long, how good, how close."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a solve.

    Attributes:
        elapsed_s: time since the solve began.
        cost_s: cost of the best schedule so far; None where there is none.
        bound_s: proved lower bound so far.
        found_by: the technique that found the schedule; empty where a solver has only one.
        proved_by: the technique that proved the bound; empty before any did.
    """

    elapsed_s: float
    cost_s: float | None
    bound_s: float
    found_by: str = ""
    proved_by: str = ""


ProgressCallback = Callable[[Progress], None]
