"""Why a planned module was captured again, said once it happens a third time.

A number that changed becomes an input of the captured step, and changes without a new plan from
then on. What can't be one has a plan for each value: what decides a size, how often a loop runs or
which operators run, and what torch computes with before the step runs, such as dropout's share.
"""

from __future__ import annotations

import logging
import re

_LOG = logging.getLogger(__name__)
_PLANS = 3  # so many plans of one module, and what changes is said
_SHOWN = 3  # changes in a warning
_PREFIX = re.compile(r"^\d+/\d+(_\d+)?: ")  # which of dynamo's captures did not do
_SHAPE = re.compile(r"(size|stride|rank|shape) mismatch|\.size\(|\.shape|\.stride\(")


class Recaptures:
    """What changed from capture to capture of one module."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.shapes: dict[str, None] = {}
        self.values: dict[str, None] = {}
        self._pending: list[str] = []

    def note(self, reason: str) -> None:
        """Notes why an earlier capture does not do for this step, the last one first."""
        self._pending.append(reason)

    def settle(self) -> None:
        """Takes note of the step that just ran, and warns where it made the third plan."""
        if not self._pending:
            return
        change = _PREFIX.sub("", self._pending[0].split("\n")[0]).split("  #")[0].strip()
        self._pending.clear()

        changes, advice = (
            (self.shapes, _ON_SHAPES) if _SHAPE.search(change) else (self.values, _ON_VALUES)
        )
        changes[change] = None
        if len(changes) == _PLANS - 1:
            _LOG.warning(
                "%s has its third plan, as something changes from step to step. Earlier plans "
                "were for: %s. %s",
                self.name,
                "; ".join(list(changes)[:_SHOWN]),
                advice,
            )


_ON_SHAPES = (
    "Each new shape is captured and planned once: pad batches to a few lengths, drop the last "
    "short batch, or declare the largest with "
    "torch._dynamo.mark_dynamic(tensor, dim, max=...), whose schedule then serves smaller ones"
)
_ON_VALUES = (
    "Floats and ints that only enter arithmetic become inputs once they changed, and cost no "
    "further plan. What decides sizes, loops or branches, or is an argument that torch needs "
    "before the step runs (dropout's p, an eps), has a plan for each value: pass it as a tensor, "
    "take it out of the module that is planned, or let it have a few values only"
)
