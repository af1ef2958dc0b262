"""Annealing on the sequence: insert, remove and move recomputations until the memory fits and the cost is low.

Objective: cost (as a share of the keep-all cost) + weight * bytes over the budget (summed over slots, as a share of the
budget). The weight adapts so that about a third of the states fit. Moves, each undone where it is not accepted:

- add: before a use that lies long after the one before, compute the value again; inputs that are gone are computed
  again too, with a probability drawn for the move; half of these moves aim at a slot that is over the budget
- remove: a recomputation, and what was recomputed for it alone; at times several next to each other
- move: a recomputation to another slot
- exchange: a removal, then an addition aimed at what is over the budget

Simulated annealing (Kirkpatrick et al., 1983); sequences with recomputation as search space: Moccasin (2023), FastSA
(2023). It proves nothing. Driven by iterations and a random stream of its own, so that a seed gives one answer on every
machine, compiled or not. Complexity: O(degree * times + changed slots) a move.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..graph import Graph
from .accounting import Ints
from .compiled import compiled
from .occurrences import SPACING, Tables, _after, _before, _insert, _last_read, _may_be_at, _remove, lay_out, steps_of, tables

_NUM_DRAWS = 1 << 16
_MAX_CHANGES = 256
_REACH = 24  # slots looked through for an empty one


@dataclass(frozen=True)
class Round:
    """How one run of the annealing goes.

    Attributes:
        iterations: number of moves tried.
        hot: first temperature, as a share of the keep-all cost.
        cold: last temperature.
    """

    iterations: int
    hot: float
    cold: float


class LocalSearch:
    """A search on one graph under one budget, run in rounds; holds the best steps that fit."""

    def __init__(self, graph: Graph, *, budget_bytes: int, seed: int) -> None:
        """Prepares the search; nothing runs yet."""
        self.graph = graph
        self.table: Tables = tables(graph)
        self.room = budget_bytes - graph.resident_bytes
        self.random = np.random.default_rng(seed)
        self.weight = np.array([1.0])
        self.best_cost_s = np.inf
        self.best_steps: Ints | None = None
        self.least_over = np.inf

    def run(self, steps: Ints, round_: Round, *, chunk: int = 20_000, should_stop: object = None) -> Ints:
        """Anneals from `steps` and returns the last state; improves `best_steps` where it can.

        Args:
            steps: a valid sequence, within the budget or not.
            round_: length and temperatures.
            chunk: moves between two looks at `should_stop`; the sequence is laid out anew each time.
            should_stop: called without arguments between chunks; a true answer ends the round.
        """
        num_chunks = max(1, -(-round_.iterations // chunk))
        current = np.asarray(steps, np.int64)
        for index in range(num_chunks):
            slots = lay_out(self.table, current, self.room)
            best_slot, best = slots.slot.copy(), np.array([self.best_cost_s, self.least_over])
            hot = round_.hot * (round_.cold / round_.hot) ** (index / num_chunks)
            cold = round_.hot * (round_.cold / round_.hot) ** ((index + 1) / num_chunks)
            draws = self.random.random(_NUM_DRAWS)
            count = min(chunk, round_.iterations - index * chunk)
            _anneal(self.table, slots, draws, count, hot, cold, self.graph.cost_s, self.weight, best_slot, best)
            if best[0] < self.best_cost_s:
                self.best_cost_s, self.best_steps = float(best[0]), steps_of(best_slot)
            current = steps_of(slots.slot)
            if callable(should_stop) and should_stop():
                break
        return current


@compiled
def _draw(draws, cursor):  # type: ignore[no-untyped-def]
    cursor[0] = (cursor[0] + 1) % len(draws)
    return draws[cursor[0]]


@compiled
def _pick(draws, cursor, count):  # type: ignore[no-untyped-def]
    return min(int(_draw(draws, cursor) * count), count - 1)


@compiled
def _empty_before(slots, q, least):  # type: ignore[no-untyped-def]
    """The last empty slot before `q` and after `least`, -1 if none is near."""
    for k in range(q - 1, max(least, q - _REACH), -1):
        if slots.slot[k] < 0:
            return k
    return -1


@compiled
def _do_insert(table, slots, op, q, journal, size):  # type: ignore[no-untyped-def]
    _insert(table, slots, op, q)
    journal[size[0], 0], journal[size[0], 1] = op, q
    size[0] += 1


@compiled
def _do_remove(table, slots, op, q, journal, size):  # type: ignore[no-untyped-def]
    _remove(table, slots, op, q)
    journal[size[0], 0], journal[size[0], 1] = op, -q - 1
    size[0] += 1


@compiled
def _undo(table, slots, journal, size):  # type: ignore[no-untyped-def]
    while size[0] > 0:
        size[0] -= 1
        op, q = journal[size[0], 0], journal[size[0], 1]
        if q >= 0:
            _remove(table, slots, op, q)
        else:
            _insert(table, slots, op, -q - 1)


@compiled
def _add(table, slots, q, op, depth_chance, draws, cursor, journal, size):  # type: ignore[no-untyped-def]
    """Computes `op` again right before slot `q`, and with `depth_chance` each of its inputs that is gone."""
    start = size[0]
    place = _empty_before(slots, q, slots.where[op, 0])
    if place < 0 or not _may_be_at(table, slots, op, place):
        return
    _do_insert(table, slots, op, place, journal, size)
    done = start
    while done < size[0] and size[0] < start + 64:
        child, q = journal[done, 0], journal[done, 1]
        done += 1
        for k in range(table.read_start[child], table.read_start[child + 1]):
            value = table.read[k]
            p = table.producer[value]
            begin = _before(slots, p, q)
            last = _last_read(table, slots, value, begin, q)
            if q - last <= 3 or _last_read(table, slots, value, begin, _after(slots, p, q)) > q or table.size[value] == 0:
                continue
            if size[0] >= start + 64 or _draw(draws, cursor) >= depth_chance:
                continue
            place = _empty_before(slots, q, last)
            if place >= 0 and _may_be_at(table, slots, p, place):
                _do_insert(table, slots, p, place, journal, size)


@compiled
def _add_somewhere(table, slots, draws, cursor, journal, size):  # type: ignore[no-untyped-def]
    """Adds before a random use, or before one behind a slot that is over the budget."""
    capacity, over = len(slots.slot), -1
    if slots.total[1] > 0 and _draw(draws, cursor) < 0.7:
        for _ in range(40):
            q = _pick(draws, cursor, capacity)
            if slots.held[q] > slots.room:
                over = q
                break
    for _ in range(40):
        q = over + 1 + _pick(draws, cursor, capacity - over - 1) if over < capacity - 1 else over
        op = slots.slot[q]
        if op < 0:
            continue
        reads = table.read_start[op + 1] - table.read_start[op]
        if reads == 0:
            continue
        value = table.read[table.read_start[op] + _pick(draws, cursor, reads)]
        p = table.producer[value]
        last = _last_read(table, slots, value, _before(slots, p, q), q)
        if q - last > 3 and (over < 0 or last < over) and not table.is_pinned[p]:
            r = _draw(draws, cursor)
            _add(table, slots, q, p, 0.0 if r < 0.25 else 1.0 if r > 0.6 else (r - 0.25) / 0.35, draws, cursor, journal, size)
            return


@compiled
def _random_recomputation(slots, draws, cursor):  # type: ignore[no-untyped-def]
    """A slot that holds a recomputation, -1 if none is met."""
    for _ in range(60):
        q = _pick(draws, cursor, len(slots.slot))
        op = slots.slot[q]
        if op >= 0 and slots.where[op, 0] != q:
            return q
    return -1


@compiled
def _remove_with_useless(table, slots, q, journal, size):  # type: ignore[no-untyped-def]
    """Removes the recomputation at `q`, and each that was there for it alone."""
    done = size[0]
    _do_remove(table, slots, slots.slot[q], q, journal, size)
    while done < size[0] and size[0] < _MAX_CHANGES - 80:
        child, at = journal[done, 0], -journal[done, 1] - 1
        done += 1
        for k in range(table.read_start[child], table.read_start[child + 1]):
            p = table.producer[table.read[k]]
            begin = _before(slots, p, at)
            if begin == slots.where[p, 0]:
                continue
            end, is_useless = _after(slots, p, at), True
            for m in range(table.write_start[p], table.write_start[p + 1]):
                if _last_read(table, slots, table.write[m], begin, end) > begin:
                    is_useless = False
            if is_useless:
                _do_remove(table, slots, p, begin, journal, size)


@compiled
def _remove_several(table, slots, draws, cursor, journal, size):  # type: ignore[no-untyped-def]
    """Removes recomputations next to each other, each with an even chance or all of them."""
    middle = _random_recomputation(slots, draws, cursor)
    if middle < 0:
        return
    width = int(2.0 ** (2.0 + 6.0 * _draw(draws, cursor)))
    chance = 0.4 if _draw(draws, cursor) < 0.5 else 1.0
    for q in range(max(middle - width, 0), min(middle + width, len(slots.slot))):
        op = slots.slot[q]
        if op >= 0 and slots.where[op, 0] != q and size[0] < 64 and _draw(draws, cursor) < chance:
            _remove_with_useless(table, slots, q, journal, size)


@compiled
def _move(table, slots, draws, cursor, journal, size):  # type: ignore[no-untyped-def]
    """Takes a recomputation to another slot."""
    q = _random_recomputation(slots, draws, cursor)
    if q < 0:
        return
    op, capacity = slots.slot[q], len(slots.slot)
    reach = 2.0 ** (1.0 + 8.0 * _draw(draws, cursor))
    target = q + int(reach * (2 * _draw(draws, cursor) - 1))
    target = min(max(target, slots.where[op, 0] + 1), capacity - 1)
    _do_remove(table, slots, op, q, journal, size)
    place = _empty_before(slots, target + 1, slots.where[op, 0])
    if place >= 0 and place != q and _may_be_at(table, slots, op, place):
        _do_insert(table, slots, op, place, journal, size)
    else:
        _undo(table, slots, journal, size)


@compiled
def _change(table, slots, draws, cursor, journal, size):  # type: ignore[no-untyped-def]
    """Makes one random move."""
    r = _draw(draws, cursor)
    if r < 0.4:
        _add_somewhere(table, slots, draws, cursor, journal, size)
    elif r < 0.6:
        q = _random_recomputation(slots, draws, cursor)
        if q >= 0:
            _remove_with_useless(table, slots, q, journal, size)
    elif r < 0.8:
        _move(table, slots, draws, cursor, journal, size)
    elif r < 0.95:
        q = _random_recomputation(slots, draws, cursor)
        if q >= 0:
            _remove_with_useless(table, slots, q, journal, size)
        _add_somewhere(table, slots, draws, cursor, journal, size)
    else:
        _remove_several(table, slots, draws, cursor, journal, size)
        if _draw(draws, cursor) < 0.5:
            _add_somewhere(table, slots, draws, cursor, journal, size)


@compiled
def _anneal(table, slots, draws, iterations, hot, cold, scale, weight, best_slot, best):  # type: ignore[no-untyped-def]
    """Runs `iterations` moves; leaves the last state in `slots`, a better one in `best_slot` with its cost in `best`."""
    journal, size, cursor = np.zeros((_MAX_CHANGES, 2), np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    per_byte = 1.0 / (SPACING * max(slots.room, 1))
    num_fit, period = 0, 500
    old_cost, old_over = slots.total[0], slots.total[1]
    for step in range(iterations):
        temperature = hot * (cold / hot) ** (step / iterations)
        size[0] = 0
        _change(table, slots, draws, cursor, journal, size)
        if size[0] > 0:
            rise = (slots.total[0] - old_cost) / scale + weight[0] * per_byte * (slots.total[1] - old_over)
            if rise <= 0 or _draw(draws, cursor) < np.exp(-rise / temperature):
                old_cost, old_over = slots.total[0], slots.total[1]
                if old_over < best[1]:
                    best[1] = old_over
                if old_over == 0 and old_cost < best[0] - 1e-9 * scale:
                    best[0] = old_cost
                    best_slot[:] = slots.slot
            else:
                _undo(table, slots, journal, size)
                slots.total[0], slots.total[1] = old_cost, old_over
        num_fit += old_over == 0
        if (step + 1) % period == 0:
            if num_fit < 0.15 * period:
                weight[0] = min(weight[0] * 1.1, 1e6)
            elif num_fit > 0.4 * period:
                weight[0] = max(weight[0] / 1.1, 1e-4)
            num_fit = 0
