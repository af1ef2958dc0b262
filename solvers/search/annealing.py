"""Annealing on the sequence: inserts, removes and moves recomputations.

Objective: cost (as a share of the keep-all cost) + weight * bytes over the budget (summed over
slots, as a share of the budget). The weight adapts so that about a third of the states fit. Moves,
each undone where it is not accepted:

- add: recompute a value before one of its uses, long after the previous use; missing inputs are
  recomputed too, with a probability drawn for the move; most of these moves aim at a slot over the
  budget, where there is one
- remove: a recomputation, and what was recomputed only for it; sometimes several close together
- move: a recomputation, to another slot
- run: consecutive recomputations, moved to another slot or removed
- exchange: a removal, then an addition aimed at a slot over the budget

Near the least budget few states fit, and a run that leaves them does not find its way back. A
*close* run returns to the best it knows after `_PATIENCE` moves without a state that fits. With
more memory that keeps a run from exploring, so only some runs are close.

Simulated annealing (Kirkpatrick et al., 1983); sequences with recomputation as search space:
Moccasin (2023), FastSA (2023). It proves nothing. It is driven by iterations and its own random
stream, so a seed gives one answer on every machine, compiled or not. Complexity: O(degree * times +
changed slots) per move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from remat.core.graph import Graph
from remat.solvers.core.accounting import Floats, Ints
from remat.solvers.core.compiled import IS_COMPILED, compiled, inner, is_ready
from remat.solvers.search.sequence import (  # fmt: skip
    IN_PLACE,
    OVER,
    PINNED,
    PRODUCER,
    READ_FROM,
    READ_TO,
    ROOM,
    SIZE,
    SLOT,
    SPACING,
    WHERE,
    WRITE_FROM,
    WRITE_TO,
    pack,
    steps_of,
)
from remat.solvers.search.timeline import (
    computed_after,
    computed_before,
    held,
    insert,
    last_read,
    lay_out,
    may_be_at,
    remove,
)

CHUNK = 20_000 if IS_COMPILED else 500
_USUAL_OPERATORS = 400
_NUM_DRAWS = 1 << 16
_MAX_CHANGES = 256
# `journal`: row 0 is (changes made in this move, place in the random stream); then (operator,
# slot), or -slot - 1 where removed
_KICK = 100.0  # factor on the temperature when no state has fitted for long
# moves without a state that fits, after which the search returns to one that does
_PATIENCE = 1_000
# least weight of bytes over the budget when a close run starts from, or returns to, what fits
_WEIGHT_WHERE_IT_FITS = 100.0
_REACH = 24  # slots searched for an empty one


@dataclass(frozen=True)
class Round:
    """Parameters of one annealing run.

    Attributes:
        iterations: number of moves tried.
        hot: first temperature, as a share of the keep-all cost.
        cold: last temperature.
        is_close: where the start fits, return to the best that fits after a while without a fit.
    """

    iterations: int
    hot: float
    cold: float
    is_close: bool = False


class LocalSearch:
    """A search on one graph under one budget, run in rounds; holds the best steps that fit."""

    def __init__(self, graph: Graph, *, budget_bytes: int, seed: int) -> None:
        """Prepares the search; nothing runs yet."""
        self.graph = graph
        self.state = pack(graph, room=budget_bytes - graph.resident_bytes)
        self.random = np.random.default_rng(seed)
        self.weight = np.array([1.0])
        self.best_cost_s = np.inf
        self.best_steps: Ints | None = None
        self.least_over = np.inf

    @property
    def is_ready(self) -> bool:
        """True where a round need not wait for the compiler, some 10 to 30 s once per machine."""
        return is_ready(anneal)

    def run(
        self,
        steps: Ints,
        round_: Round,
        *,
        chunk: int = CHUNK,
        should_stop: Callable[[], bool] | None = None,
    ) -> Ints:
        """Anneals from `steps` and returns the last state; improves `best_steps` where it can.

        Args:
            steps: a valid sequence, within the budget or not.
            round_: length and temperatures.
            chunk: moves between two calls of `should_stop`, fewer on large graphs; the sequence is
                laid out again each time.
            should_stop: called without arguments between chunks; a true answer ends the round.
        """
        chunk = max(
            chunk * _USUAL_OPERATORS // max(self.graph.num_operators, _USUAL_OPERATORS), 100
        )
        current, done = np.asarray(steps, np.int64), 0
        fitting: Ints | None = None  # the sequence that a close run returns to
        while done < round_.iterations:
            state = lay_out(self.state, current)
            if done == 0 and round_.is_close and state.sums[OVER] == 0:
                fitting, self.weight[0] = current, max(self.weight[0], _WEIGHT_WHERE_IT_FITS)
            count = min(chunk, round_.iterations - done)
            hot, cold = (
                round_.hot * (round_.cold / round_.hot) ** (moves / round_.iterations)
                for moves in (done, done + count)
            )
            best_slot, best = (
                state.slots[SLOT].copy(),
                np.array([self.best_cost_s, self.least_over]),
            )
            draws, patience = (
                self.random.random(_NUM_DRAWS),
                count if fitting is None else _PATIENCE,
            )
            moved = anneal(
                *state,
                draws,
                count,
                hot,
                cold,
                self.graph.cost_s or 1.0,
                self.weight,
                patience,
                best_slot,
                best,
            )
            self.least_over = float(best[1])
            current = steps_of(state.slots[SLOT], self.graph.num_operators)
            if best[0] < self.best_cost_s:
                self.best_cost_s, self.best_steps = (
                    float(best[0]),
                    steps_of(best_slot, self.graph.num_operators),
                )
                fitting = None if fitting is None else self.best_steps
            if fitting is not None and moved < count:
                current, self.weight[0] = fitting, max(self.weight[0], _WEIGHT_WHERE_IT_FITS)
            done += moved
            if should_stop is not None and should_stop():
                break
        return current


@inner
def draw(draws: Floats, journal: Ints) -> float:
    """Returns the next number of the random stream, in [0, 1)."""
    journal[0, 1] = (journal[0, 1] + 1) % len(draws)
    number: float = draws[journal[0, 1]]
    return number


@inner
def pick(draws: Floats, journal: Ints, count: int) -> int:
    """Returns a random integer of 0, ..., count - 1."""
    return min(int(draw(draws, journal) * count), count - 1)


@inner
def empty_before(slots: Ints, q: int, least: int) -> int:
    """Returns the last empty slot before `q` and after `least`, -1 if none is near."""
    for k in range(q - 1, max(least, q - _REACH), -1):
        if slots[SLOT, k] < 0:
            return k
    return -1


@inner
def do_insert(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    op: int,
    q: int,
    journal: Ints,
) -> None:
    """Inserts a recomputation and records it in the journal; does nothing where that is full."""
    if journal[0, 0] + 1 >= len(journal):
        return
    insert(values, operators, links, slots, sums, costs, op, q)
    journal[0, 0] += 1
    journal[journal[0, 0], 0], journal[journal[0, 0], 1] = op, q


@inner
def do_remove(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    op: int,
    q: int,
    journal: Ints,
) -> None:
    """Removes a recomputation and records it in the journal; does nothing where that is full."""
    if journal[0, 0] + 1 >= len(journal):
        return
    remove(values, operators, links, slots, sums, costs, op, q)
    journal[0, 0] += 1
    journal[journal[0, 0], 0], journal[journal[0, 0], 1] = op, -q - 1


@inner
def undo(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    journal: Ints,
) -> None:
    """Undoes the changes of the journal, last first."""
    while journal[0, 0] > 0:
        op, q = journal[journal[0, 0], 0], journal[journal[0, 0], 1]
        journal[0, 0] -= 1
        if q >= 0:
            remove(values, operators, links, slots, sums, costs, op, q)
        else:
            insert(values, operators, links, slots, sums, costs, op, -q - 1)


@inner
def add(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    q: int,
    op: int,
    depth_chance: float,
    draws: Floats,
    journal: Ints,
) -> None:
    """Recomputes `op` right before slot `q`, and each missing input with chance `depth_chance`."""
    start = journal[0, 0]
    place = empty_before(slots, q, operators[op, WHERE])
    if place < 0 or not may_be_at(operators, op, place):
        return
    do_insert(values, operators, links, slots, sums, costs, op, place, journal)
    limit = start + int(2.0 ** (6.5 * draw(draws, journal)))
    done = start
    while done < journal[0, 0] < limit:
        done += 1
        child, q = journal[done, 0], journal[done, 1]
        for k in range(operators[child, READ_FROM], operators[child, READ_TO]):
            value = links[k]
            p = values[value, PRODUCER]
            begin, end = computed_before(operators, p, q), computed_after(operators, p, q)
            last = last_read(values, operators, links, value, begin, q)
            if (
                q - last <= SPACING
                or values[value, SIZE] == 0
                or last_read(values, operators, links, value, begin, end) > q
            ):
                continue
            if journal[0, 0] >= limit or draw(draws, journal) >= depth_chance:
                continue
            place = empty_before(slots, q, last)
            if place >= 0 and may_be_at(operators, p, place):
                do_insert(values, operators, links, slots, sums, costs, p, place, journal)


@inner
def add_somewhere(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    draws: Floats,
    journal: Ints,
) -> None:
    """Adds a recomputation before a random use, or one after a slot that is over the budget."""
    capacity, over = slots.shape[1], -1
    # between neighbouring uses this saves memory only where the first of them works in place
    least = 1 if sums[IN_PLACE] and draw(draws, journal) < 0.1 else SPACING
    if sums[OVER] > 0 and draw(draws, journal) < 0.7:
        for _ in range(40):
            q = pick(draws, journal, capacity)
            if held(slots, q) > sums[ROOM]:
                over = q
                break
    for _ in range(40):
        q = over + 1 + pick(draws, journal, capacity - over - 1) if over < capacity - 1 else over
        op = slots[SLOT, q]
        if op < 0:
            continue
        reads = operators[op, READ_TO] - operators[op, READ_FROM]
        if reads == 0:
            continue
        value = links[operators[op, READ_FROM] + pick(draws, journal, reads)]
        p = values[value, PRODUCER]
        last = last_read(values, operators, links, value, computed_before(operators, p, q), q)
        if q - last > least and (over < 0 or last < over) and operators[p, PINNED] == 0:
            r = draw(draws, journal)
            chance = min(max((r - 0.25) / 0.35, 0.0), 1.0)
            add(values, operators, links, slots, sums, costs, q, p, chance, draws, journal)
            return


@inner
def random_recomputation(operators: Ints, slots: Ints, draws: Floats, journal: Ints) -> int:
    """Returns a random slot with a recomputation, -1 if none is hit."""
    for _ in range(60):
        q = pick(draws, journal, slots.shape[1])
        op = slots[SLOT, q]
        if op >= 0 and operators[op, WHERE] != q:
            return q
    return -1


@inner
def remove_with_useless(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    q: int,
    journal: Ints,
) -> None:
    """Removes the recomputation at `q`, and those that only it needed."""
    done = journal[0, 0]
    do_remove(values, operators, links, slots, sums, costs, slots[SLOT, q], q, journal)
    while done < journal[0, 0] < _MAX_CHANGES - 80:
        done += 1
        child, at = journal[done, 0], -journal[done, 1] - 1
        for k in range(operators[child, READ_FROM], operators[child, READ_TO]):
            p = values[links[k], PRODUCER]
            begin = computed_before(operators, p, at)
            if begin == operators[p, WHERE]:
                continue
            end, is_useless = computed_after(operators, p, at), True
            for m in range(operators[p, WRITE_FROM], operators[p, WRITE_TO]):
                if last_read(values, operators, links, links[m], begin, end) > begin:
                    is_useless = False
            if is_useless:
                do_remove(values, operators, links, slots, sums, costs, p, begin, journal)


@inner
def remove_several(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    draws: Floats,
    journal: Ints,
) -> None:
    """Removes recomputations close together: all of them, or each with some chance."""
    middle = random_recomputation(operators, slots, draws, journal)
    if middle < 0:
        return
    width = int(2.0 ** (2.0 + 6.0 * draw(draws, journal)))
    chance = 0.4 if draw(draws, journal) < 0.5 else 1.0
    for q in range(max(middle - width, 0), min(middle + width, slots.shape[1])):
        op = slots[SLOT, q]
        if (
            op >= 0
            and operators[op, WHERE] != q
            and journal[0, 0] < 64
            and draw(draws, journal) < chance
        ):
            remove_with_useless(values, operators, links, slots, sums, costs, q, journal)


@inner
def move(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    draws: Floats,
    journal: Ints,
) -> None:
    """Moves a recomputation to another slot."""
    q = random_recomputation(operators, slots, draws, journal)
    if q < 0:
        return
    op, capacity = slots[SLOT, q], slots.shape[1]
    reach = 2.0 ** (1.0 + 8.0 * draw(draws, journal))
    target = q + int(reach * (2 * draw(draws, journal) - 1))
    target = min(max(target, operators[op, WHERE] + 1), capacity - 1)
    do_remove(values, operators, links, slots, sums, costs, op, q, journal)
    place = empty_before(slots, target + 1, operators[op, WHERE])
    if place >= 0 and place != q and may_be_at(operators, op, place):
        do_insert(values, operators, links, slots, sums, costs, op, place, journal)
    else:
        undo(values, operators, links, slots, sums, costs, journal)


@inner
def change_run(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    is_removal: bool,
    draws: Floats,
    journal: Ints,
) -> None:
    """Moves consecutive recomputations to another slot, or removes them.

    No first computation lies between them.
    """
    q = random_recomputation(operators, slots, draws, journal)
    if q < 0:
        return
    length, capacity = int(2.0 ** (1.0 + 4.5 * draw(draws, journal))), slots.shape[1]
    target = min(
        max(q + int(2.0 ** (2.0 + 8.0 * draw(draws, journal)) * (2 * draw(draws, journal) - 1)), 0),
        capacity - 1,
    )
    first = q
    for k in range(q + 1, min(q + int(SPACING * length * draw(draws, journal)) + 1, capacity)):
        if slots[SLOT, k] >= 0:
            if operators[slots[SLOT, k], WHERE] == k:
                break
            first = k
    while (
        journal[0, 0] < length
        and first >= 0
        and (slots[SLOT, first] < 0 or operators[slots[SLOT, first], WHERE] != first)
    ):
        if slots[SLOT, first] >= 0:
            do_remove(
                values, operators, links, slots, sums, costs, slots[SLOT, first], first, journal
            )
        first -= 1
    if is_removal:
        return
    count, place = journal[0, 0], target + 1
    for k in range(1, count + 1):
        op = journal[k, 0]
        place = empty_before(slots, place, operators[op, WHERE])
        if place < 0 or not may_be_at(operators, op, place):
            undo(values, operators, links, slots, sums, costs, journal)
            return
        do_insert(values, operators, links, slots, sums, costs, op, place, journal)


@inner
def change(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    draws: Floats,
    journal: Ints,
) -> None:
    """Makes one random move."""
    # each function is called in one place only, as the compiler copies it into every caller
    r, also = draw(draws, journal), draw(draws, journal) < 0.5
    if r < 0.15:
        move(values, operators, links, slots, sums, costs, draws, journal)
    elif r < 0.2:
        change_run(values, operators, links, slots, sums, costs, also, draws, journal)
    if r >= 0.95:
        remove_several(values, operators, links, slots, sums, costs, draws, journal)
    elif r >= 0.6:
        q = random_recomputation(operators, slots, draws, journal)
        if q >= 0:
            remove_with_useless(values, operators, links, slots, sums, costs, q, journal)
    if 0.2 <= r < 0.75 or (r >= 0.95 and also):
        add_somewhere(values, operators, links, slots, sums, costs, draws, journal)


@compiled
def anneal(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    draws: Floats,
    iterations: int,
    hot: float,
    cold: float,
    scale: float,
    weight: Floats,
    patience: int,
    best_slot: Ints,
    best: Floats,
) -> int:
    """Runs up to `iterations` moves and returns how many it made.

    Leaves the last state in `slots`, and a better one, if any, in `best_slot` with its cost in
    `best`. Ends early after `patience` moves in a row without a state that fits.
    """
    journal = np.zeros((_MAX_CHANGES, 2), np.int64)
    per_byte = 1.0 / (SPACING * max(sums[ROOM], 1))
    num_fit, period, heat, since_fit = 0, 500, 1.0, 0
    old_cost, old_over = costs[-1], sums[OVER]
    for step in range(iterations):
        temperature = heat * hot * (cold / hot) ** (step / iterations)
        journal[0, 0] = 0
        change(values, operators, links, slots, sums, costs, draws, journal)
        if journal[0, 0] > 0:
            rise = (costs[-1] - old_cost) / scale + weight[0] * per_byte * (sums[OVER] - old_over)
            if rise <= 0 or draw(draws, journal) < np.exp(-rise / temperature):
                old_cost, old_over = costs[-1], sums[OVER]
                if old_over < best[1]:
                    best[1] = old_over
                if old_over == 0 and old_cost < best[0] - 1e-9 * scale:
                    best[0] = old_cost
                    best_slot[:] = slots[SLOT]
            else:
                undo(values, operators, links, slots, sums, costs, journal)
                costs[-1], sums[OVER] = old_cost, old_over
        num_fit += old_over == 0
        since_fit = 0 if old_over == 0 else since_fit + 1
        if since_fit >= patience:
            return step + 1
        if (step + 1) % period == 0:
            heat = max(0.7 * heat, 1.0)
            if num_fit < 0.15 * period:
                weight[0] *= 1.1
                if weight[0] > 1000:  # stuck: let it leave
                    weight[0], heat = 1.0, _KICK
            elif num_fit > 0.4 * period:
                weight[0] = max(weight[0] / 1.1, 1e-4)
            num_fit = 0
    return iterations
