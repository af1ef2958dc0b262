"""The paper's accounting inside a stage: each operator at most once, in the graph's order.

Checkmate, equations (5)-(8): U[t, k] is the memory after operator k of stage t, FREE[t, v, k] says
that v is freed there. Both are eliminated. With the *hold* of a value

    H[t, v, k] = 1   v is in memory right before its reader k runs in stage t

a value is held in a gap between two of its readers where the next gap needs it, so FREE is the
difference of two holds and U the sum of the holds that cover a moment. This is exact for its class:
unlike in the paper, a value without a further reader dies at once, and there is no big-M.

A model with these rows is a restriction: its optimum does not bound all schedules in fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat.solvers.checkmate.checkmate_model import CheckmateModel, Terms


@dataclass(frozen=True)
class _Holds:
    """The gaps of one stage: each value's readers in it, and the hold column before each reader."""

    stage: int
    readers: dict[int, list[int]]
    before: dict[tuple[int, int], int]
    # column after the last reader: needed by the original, or kept into the next stage
    tail: dict[int, int]

    def at(self, model: CheckmateModel, value: int, moment: int) -> int:
        """Returns the column that says whether `value` is held while operator `moment` may run."""
        if moment < model.form.producer[value]:
            return int(model.keep[self.stage, value])
        return self._from(value, moment)

    def after(self, value: int, moment: int) -> int:
        """Returns the column that covers `value` right after `moment`."""
        return self._from(value, moment + 1)

    def _from(self, value: int, moment: int) -> int:
        reader = next((k for k in self.readers.get(value, ()) if k >= moment), None)
        return self.tail[value] if reader is None else self.before[value, reader]


def add_ordered_stage(model: CheckmateModel, stage: int) -> None:
    """Restricts a stage to recomputing each operator at most once, in order, if it fits."""
    slots = np.flatnonzero(model.form.may_recompute[stage]).tolist()
    holds = _make_holds(model, stage, slots)
    _add_hold_rows(model, holds)
    for slot in slots:
        _add_slot_memory(model, holds, slot)


def _make_holds(model: CheckmateModel, stage: int, slots: list[int]) -> _Holds:
    form = model.form
    readers: dict[int, list[int]] = {}
    for slot in slots:
        for value in form.reads[slot]:
            readers.setdefault(value, []).append(slot)
    before = {(v, k): model.add_column(is_integer=False) for v, ks in readers.items() for k in ks}

    values = {
        *readers,
        *(v for k in slots for v in form.writes[k]),
        *np.flatnonzero(form.may_keep[stage]).tolist(),
    }
    tail = {
        v: model.needed[v] if v in form.reads[stage] else int(model.keep[stage + 1, v])
        for v in values
    }

    return _Holds(stage, readers, before, tail)


def _add_hold_rows(model: CheckmateModel, holds: _Holds) -> None:
    """Adds R[t, k] <= H[v, k], H[v, next k] <= H[v, k], H[v, first k] <= S[t, v] + R[t, p].

    These are the paper's (1b), (1c) and FREE >= 0 (7-8).
    """
    for value, readers in holds.readers.items():
        again = int(model.recompute[holds.stage, model.form.producer[value]])
        first = holds.before[value, readers[0]]
        model.add_row([(first, 1.0), (again, -1.0), (int(model.keep[holds.stage, value]), -1.0)])
        for reader in readers:
            hold = holds.before[value, reader]
            model.add_row([(int(model.recompute[holds.stage, reader]), 1.0), (hold, -1.0)])
            model.add_row([(holds.after(value, reader), 1.0), (hold, -1.0)])


def _add_slot_memory(model: CheckmateModel, holds: _Holds, slot: int) -> None:
    """Adds holds that cover the moment + writes + workspace <= B (paper: 5, 6, U <= budget)."""
    form = model.form
    now = int(model.recompute[holds.stage, slot])
    terms: Terms = [(now, form.workspace_bytes[slot])]

    for value in form.writes[slot]:
        column = holds.after(value, slot)
        # an output may die at once, so the larger of R and H counts at this moment
        if len(form.writes[slot]) > 1:
            column = model.add_column(is_integer=False)
            model.add_row([(holds.after(value, slot), 1.0), (column, -1.0)])
        model.add_row([(now, 1.0), (column, -1.0)])
        terms.append((column, form.size_bytes[value]))

    covered = set(holds.tail).difference(form.writes[slot])
    terms += [
        (holds.at(model, v, slot), form.size_bytes[v])
        for v in covered
        if form.producer[v] < holds.stage
    ]
    terms += model.taken_over(slot, now, lambda v: holds.after(v, slot))
    model.add_memory_row(terms, 0)
