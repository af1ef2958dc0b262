"""Random moves that add, remove and shift recomputations.

- add: recompute a value before one of its uses, long after the previous use; missing inputs are
  recomputed too, with a probability drawn for the move; most of these moves aim at a slot over the
  budget, where there is one
- remove: a recomputation, and what was recomputed only for it; sometimes several close together
- move: a recomputation, to another slot
- run: consecutive recomputations, moved to another slot or removed
- exchange: a removal, then an addition aimed at a slot over the budget

A move's changes are recorded in a journal, so that it can be undone. Row 0 of `journal` is (number
of changes, place in the random stream). Each later row is (operator, slot), with -slot - 1 in place
of the slot for a removal.
Complexity: O(degree * times + changed slots) per change.
"""

from __future__ import annotations

from remat.solvers.core.accounting import Floats, Ints
from remat.solvers.core.compiled import inner
from remat.solvers.search.sequence import (
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
    State,
)
from remat.solvers.search.timeline import (
    computed_after,
    computed_before,
    held,
    insert,
    last_read,
    may_be_at,
    remove,
)

MAX_CHANGES = 256  # rows of the journal; a move leaves out further changes; round, not measured
_REACH = 24  # slots searched for an empty one; two of three are empty at first; not measured

# Moves of whole runs were measured on published graphs; for the other numbers below, no measurement
# is on record.

# ends of the ranges of one random number, which chooses the kind of move: 15 % move, 5 % run, 40 %
# add, 15 % exchange, 20 % remove, 5 % remove several
_TO_MOVE, _TO_RUN, _TO_ADD, _TO_EXCHANGE, _TO_REMOVE = 0.15, 0.2, 0.6, 0.75, 0.95
# share of the runs that are removed, not moved, and of removals of several that add something too
_ALSO = 0.5
# share of additions that may lie between neighbouring uses, where operators work in place; share
# that aims at a slot over the budget, where there is one
_NEIGHBOURING, _AIMED = 0.1, 0.7
# the chance to recompute a missing input: 0 for the first share of additions, then drawn evenly for
# the second share, and 1 for the rest
_NO_INPUTS, _SOME_INPUTS = 0.25, 0.35
# share of the removals of several that take each one by chance; the chance
_PARTLY, _EACH = 0.5, 0.4

# lengths are powers of 2, whose exponents are drawn evenly: from the first number on, over a range
# of the second
_INPUTS = 6.5  # recomputations in one addition, at most: 1 to 90
_WIDTH_FROM, _WIDTH = 2.0, 6.0  # slots on each side in a removal of several: 4 to 255
_SHIFT_FROM, _SHIFT = 1.0, 8.0  # slots by which a recomputation moves, at most: 2 to 512
_RUN_FROM, _RUN = 1.0, 4.5  # recomputations in a run, at most: 2 to 45
_RUN_SHIFT_FROM, _RUN_SHIFT = 2.0, 8.0  # slots by which a run moves, at most: 4 to 1,024

# slots tried until one is over the budget or reads a value; until one is a recomputation
_TRIES, _TRIES_TO_RECOMPUTE = 40, 60
# rows of the journal that a removal leaves free; rows after which a removal of several ends
_FREE, _MOST_REMOVED = 80, 64


@inner
def draw(draws: Floats, journal: Ints) -> float:
    """Returns the next number of the random stream, in [0, 1)."""
    journal[0, 1] = (journal[0, 1] + 1) % len(draws)
    number: float = draws[journal[0, 1]]
    return number


@inner
def pick(draws: Floats, journal: Ints, count: int) -> int:
    """Returns a random integer from 0 to count - 1."""
    return min(int(draw(draws, journal) * count), count - 1)


@inner
def do_insert(state: State, op: int, q: int, journal: Ints) -> None:
    """Inserts a computation and records it in the journal; does nothing where that is full."""
    if journal[0, 0] + 1 >= len(journal):
        return
    insert(state, op, q)
    journal[0, 0] += 1
    journal[journal[0, 0], 0], journal[journal[0, 0], 1] = op, q


@inner
def do_remove(state: State, op: int, q: int, journal: Ints) -> None:
    """Removes a computation and records it in the journal; does nothing where that is full."""
    if journal[0, 0] + 1 >= len(journal):
        return
    remove(state, op, q)
    journal[0, 0] += 1
    journal[journal[0, 0], 0], journal[journal[0, 0], 1] = op, -q - 1


@inner
def undo(state: State, journal: Ints, count: int) -> None:
    """Undoes all but the first `count` changes of the journal, last first."""
    while journal[0, 0] > count:
        op, q = journal[journal[0, 0], 0], journal[journal[0, 0], 1]
        journal[0, 0] -= 1
        if q >= 0:
            remove(state, op, q)
        else:
            insert(state, op, -q - 1)


@inner
def empty_before(slots: Ints, q: int, least: int) -> int:
    """Returns the last empty slot before `q` and after `least`, -1 if none is near."""
    for k in range(q - 1, max(least, q - _REACH), -1):
        if slots[SLOT, k] < 0:
            return k
    return -1


@inner
def random_over(state: State, draws: Floats, journal: Ints) -> int:
    """Returns a random slot over the budget, -1 if none is hit."""
    for _ in range(_TRIES):
        q = pick(draws, journal, state.slots.shape[1])
        if held(state.slots, q) > state.sums[ROOM]:
            return q
    return -1


@inner
def random_read(state: State, after: int, draws: Floats, journal: Ints) -> tuple[int, int]:
    """Returns a random slot later than `after` and a value read there, -1 if none is read."""
    operators, slots, capacity = state.operators, state.slots, state.slots.shape[1]
    q = after + 1 + pick(draws, journal, capacity - after - 1) if after < capacity - 1 else after
    op = slots[SLOT, q]
    if op < 0:
        return q, -1

    reads = operators[op, READ_TO] - operators[op, READ_FROM]
    if reads == 0:
        return q, -1
    return q, state.links[operators[op, READ_FROM] + pick(draws, journal, reads)]


@inner
def random_recomputation(state: State, draws: Floats, journal: Ints) -> int:
    """Returns a random slot with a recomputation, -1 if none is hit."""
    for _ in range(_TRIES_TO_RECOMPUTE):
        q = pick(draws, journal, state.slots.shape[1])
        op = state.slots[SLOT, q]
        if op >= 0 and state.operators[op, WHERE] != q:
            return q
    return -1


@inner
def add(state: State, q: int, op: int, depth_chance: float, draws: Floats, journal: Ints) -> None:
    """Recomputes `op` right before slot `q`, and each missing input with chance `depth_chance`."""
    values, operators, start = state.values, state.operators, journal[0, 0]
    place = empty_before(state.slots, q, operators[op, WHERE])
    if place < 0 or not may_be_at(operators, op, place):
        return
    do_insert(state, op, place, journal)

    limit = start + int(2.0 ** (_INPUTS * draw(draws, journal)))
    done = start
    while done < journal[0, 0] < limit:
        done += 1
        child, q = journal[done, 0], journal[done, 1]

        for k in range(operators[child, READ_FROM], operators[child, READ_TO]):
            value = state.links[k]
            p = values[value, PRODUCER]
            begin, end = computed_before(operators, p, q), computed_after(operators, p, q)
            last = last_read(state, value, begin, q)

            is_near = q - last <= SPACING or values[value, SIZE] == 0
            if is_near or last_read(state, value, begin, end) > q:
                continue
            if journal[0, 0] >= limit or draw(draws, journal) >= depth_chance:
                continue

            place = empty_before(state.slots, q, last)
            if place >= 0 and may_be_at(operators, p, place):
                do_insert(state, p, place, journal)


@inner
def add_somewhere(state: State, draws: Floats, journal: Ints) -> None:
    """Adds a recomputation before a random use, or before a use after a slot over the budget."""
    operators, sums, over = state.operators, state.sums, -1
    # between neighbouring uses, recomputing saves memory only if the first use works in place
    least = 1 if sums[IN_PLACE] and draw(draws, journal) < _NEIGHBOURING else SPACING
    if sums[OVER] > 0 and draw(draws, journal) < _AIMED:
        over = random_over(state, draws, journal)

    for _ in range(_TRIES):
        q, value = random_read(state, over, draws, journal)
        if value < 0:
            continue

        p = state.values[value, PRODUCER]
        last = last_read(state, value, computed_before(operators, p, q), q)
        if q - last > least and (over < 0 or last < over) and operators[p, PINNED] == 0:
            chance = min(max((draw(draws, journal) - _NO_INPUTS) / _SOME_INPUTS, 0.0), 1.0)
            add(state, q, p, chance, draws, journal)
            return


@inner
def remove_with_useless(state: State, q: int, journal: Ints) -> None:
    """Removes the recomputation at `q`, and those that only it needed."""
    operators, done = state.operators, journal[0, 0]
    do_remove(state, state.slots[SLOT, q], q, journal)

    while done < journal[0, 0] < MAX_CHANGES - _FREE:
        done += 1
        child, at = journal[done, 0], -journal[done, 1] - 1
        for k in range(operators[child, READ_FROM], operators[child, READ_TO]):
            p = state.values[state.links[k], PRODUCER]
            begin = computed_before(operators, p, at)
            if begin == operators[p, WHERE]:
                continue

            end, is_useless = computed_after(operators, p, at), True
            for m in range(operators[p, WRITE_FROM], operators[p, WRITE_TO]):
                if last_read(state, state.links[m], begin, end) > begin:
                    is_useless = False
            if is_useless:
                do_remove(state, p, begin, journal)


@inner
def remove_several(state: State, draws: Floats, journal: Ints) -> None:
    """Removes recomputations close together: all of them, or each with some chance."""
    slots, middle = state.slots, random_recomputation(state, draws, journal)
    if middle < 0:
        return

    width = int(2.0 ** (_WIDTH_FROM + _WIDTH * draw(draws, journal)))
    chance = _EACH if draw(draws, journal) < _PARTLY else 1.0
    for q in range(max(middle - width, 0), min(middle + width, slots.shape[1])):
        op = slots[SLOT, q]
        is_recomputation = op >= 0 and state.operators[op, WHERE] != q
        if is_recomputation and journal[0, 0] < _MOST_REMOVED and draw(draws, journal) < chance:
            remove_with_useless(state, q, journal)


@inner
def move(state: State, draws: Floats, journal: Ints) -> None:
    """Moves a recomputation to another slot."""
    operators, slots = state.operators, state.slots
    q = random_recomputation(state, draws, journal)
    if q < 0:
        return

    op = slots[SLOT, q]
    reach = 2.0 ** (_SHIFT_FROM + _SHIFT * draw(draws, journal))
    target = q + int(reach * (2 * draw(draws, journal) - 1))
    target = min(max(target, operators[op, WHERE] + 1), slots.shape[1] - 1)

    do_remove(state, op, q, journal)
    place = empty_before(slots, target + 1, operators[op, WHERE])
    if place >= 0 and place != q and may_be_at(operators, op, place):
        do_insert(state, op, place, journal)
    else:
        undo(state, journal, 0)


@inner
def change_run(state: State, is_removal: bool, draws: Floats, journal: Ints) -> None:
    """Moves consecutive recomputations to another slot, or removes them.

    No first computation lies between them.
    """
    operators, slots, capacity = state.operators, state.slots, state.slots.shape[1]
    q = random_recomputation(state, draws, journal)
    if q < 0:
        return

    length = int(2.0 ** (_RUN_FROM + _RUN * draw(draws, journal)))
    reach = 2.0 ** (_RUN_SHIFT_FROM + _RUN_SHIFT * draw(draws, journal))
    target = min(max(q + int(reach * (2 * draw(draws, journal) - 1)), 0), capacity - 1)

    first = q
    for k in range(q + 1, min(q + int(SPACING * length * draw(draws, journal)) + 1, capacity)):
        if slots[SLOT, k] >= 0:
            if operators[slots[SLOT, k], WHERE] == k:
                break
            first = k

    while journal[0, 0] < length and first >= 0:
        op = slots[SLOT, first]
        if op >= 0 and operators[op, WHERE] == first:
            break
        if op >= 0:
            do_remove(state, op, first, journal)
        first -= 1

    if is_removal:
        return

    count, place = journal[0, 0], target + 1
    for k in range(1, count + 1):
        op = journal[k, 0]
        place = empty_before(slots, place, operators[op, WHERE])
        if place < 0 or not may_be_at(operators, op, place):
            undo(state, journal, 0)
            return
        do_insert(state, op, place, journal)


@inner
def change(state: State, draws: Floats, journal: Ints) -> None:
    """Makes one random move."""
    # each function is called in one place only, as the compiler copies it into every caller
    r, also = draw(draws, journal), draw(draws, journal) < _ALSO
    if r < _TO_MOVE:
        move(state, draws, journal)
    elif r < _TO_RUN:
        change_run(state, also, draws, journal)

    if r >= _TO_REMOVE:
        remove_several(state, draws, journal)
    elif r >= _TO_ADD:
        q = random_recomputation(state, draws, journal)
        if q >= 0:
            remove_with_useless(state, q, journal)

    if _TO_RUN <= r < _TO_EXCHANGE or (r >= _TO_REMOVE and also):
        add_somewhere(state, draws, journal)
