"""Warns, with the reasons, when a module is captured a third time.

A number that changed once becomes an input of the captured step, and may then change without a new
plan. Some numbers can't be inputs and need a plan for each value: those that decide a size, the
number of a loop's passes or which operators run, and those that torch needs before the step runs,
such as the probability of dropout.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

_LOG = logging.getLogger(__name__)
_PLANS = 3  # plans of one module at which the warning is given
_ROOMS = 4  # sizes of earlier gradients with a plan of their own; round, not measured
_SHOWN = 3  # changes listed in the warning, at most
_PREFIX = re.compile(r"^\d+/\d+(_\d+)?: ")  # dynamo's number of the earlier capture
_SHAPE = re.compile(r"(size|stride|rank|shape) mismatch|\.size\(|\.shape|\.stride\(")


def room_for(held_bytes: int, rooms: Sequence[int]) -> int:
    """Returns for which size of earlier gradients a step is planned, given the known `rooms`.

    The first few sizes get a capture and a plan of their own, others the next larger plan.
    """
    if held_bytes in rooms or len(rooms) < _ROOMS:
        return held_bytes
    return min((room for room in rooms if room > held_bytes), default=held_bytes)


class Recaptures:
    """What changed between the captures of one module."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.shapes: dict[str, None] = {}
        self.values: dict[str, None] = {}
        self._pending: list[str] = []
        self._told: set[str] = set()

    def note(self, reason: str) -> None:
        """Notes why an earlier capture does not fit this step; dynamo reports the latest first."""
        self._pending.append(reason)

    def settle(self) -> None:
        """Records why the step that just ran was captured again, and warns at the third plan."""
        if not self._pending:
            return
        change = _PREFIX.sub("", self._pending[0].split("\n")[0]).split("  #")[0].strip()
        self._pending.clear()

        changes, advice = (
            (self.shapes, _ON_SHAPES) if _SHAPE.search(change) else (self.values, _ON_VALUES)
        )
        changes[change] = None

        if len(changes) == _PLANS - 1 and advice not in self._told:
            self._told.add(advice)
            _LOG.warning(
                "%s has its third plan, since something changes from step to step. Earlier plans "
                "were for: %s. %s",
                self.name,
                "; ".join(list(changes)[:_SHOWN]),
                advice,
            )


_ON_SHAPES = (
    "Each new shape is captured and planned once: pad batches to a few lengths, drop the last "
    "short batch, or declare the largest size with "
    "torch._dynamo.mark_dynamic(tensor, dim, max=...), whose schedule then serves smaller ones"
)
_ON_VALUES = (
    "Floats and ints that are only used in arithmetic become inputs once they change, and need "
    "no further plan. A number that decides sizes, loops or branches, or that torch needs before "
    "the step runs (dropout's p, an eps), needs a plan for each value: pass it as a tensor, move "
    "it out of the planned module, or use only a few values"
)
