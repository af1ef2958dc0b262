"""The exceptions of `remat`.

Messages say what was given, what is needed, and what to do. Wrong arguments are a `ValueError` or
`TypeError`.
"""

from __future__ import annotations


class RematError(Exception):
    """The base of the exceptions that `remat` defines."""


class GraphError(RematError):
    """A graph or an instance file breaks a rule; the message names the first one."""


class TraceError(RematError):
    """A training step can't be captured, or can't be run from its graph."""


class ScheduleError(RematError):
    """A schedule or solution breaks a rule, or belongs to another graph."""


class SolverError(RematError):
    """A solver can't be used: its backend is missing, or it does not take such a graph."""


# Accelerate (1.15, `should_reduce_batch_size`) and Lightning (2.6, `is_oom_error`) search `args[0]`
# for " out of memory." and "CUDA", and then try a smaller batch.
_COUNTS_AS = "A search for a batch size takes this as CUDA out of memory."


class BudgetError(RematError, RuntimeError):
    """A memory budget can't be met.

    `accelerate.utils.find_executable_batch_size`, the `Trainer`'s `auto_find_batch_size` and
    Lightning's `scale_batch_size` treat it like CUDA out of memory: they try a smaller batch.

    Attributes:
        budget_bytes: the budget that was given.
        minimum_bytes: the smallest budget for which a schedule is known.
        is_proved: True if it is proved that no schedule fits in `budget_bytes`; False if the
            search stopped without finding one.
    """

    def __init__(
        self, message: str, *, budget_bytes: int, minimum_bytes: int, is_proved: bool
    ) -> None:
        super().__init__(f"{message} {_COUNTS_AS}")
        self._message = message
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.is_proved = is_proved

    def __str__(self) -> str:
        return self._message
