"""What a running solver reports: time, best cost and bound so far."""

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
        proved_by: the technique that proved the bound; empty until one has.
    """

    elapsed_s: float
    cost_s: float | None
    bound_s: float
    found_by: str = ""
    proved_by: str = ""

    def text(self, keep_all_cost_s: float) -> str:
        """Returns best cost and bound as text, in percent above the cost of keeping everything.

        >>> Progress(1.0, 10.5, 10.2).text(10.0)
        'found +5.00 %, at least +2.00 %'
        """
        if not keep_all_cost_s:
            return "all costs are zero"

        found = (
            "nothing found yet"
            if self.cost_s is None
            else f"found +{100 * (self.cost_s / keep_all_cost_s - 1):.2f} %"
        )
        at_least = max(0.0, 100 * (self.bound_s / keep_all_cost_s - 1))
        return f"{found}, at least +{at_least:.2f} %"


ProgressCallback = Callable[[Progress], None]
