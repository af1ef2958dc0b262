"""Inserts or removes one computation in place and keeps the bytes at every slot up to date.

The last read of a value is not stored but looked up in its readers' slots, so a change only touches
the lifetimes of values that the operator writes or reads. Any insertion after the first computation
is valid, and so is any removal but that of the first: the graph's rules hold by construction, and
only memory has to be checked. The bytes agree exactly with `simulate`, in-place operators and
snapshots included.

A change of bytes over many slots is recorded once per block. The slots of a block are visited only
where its bounds do not tell by how much its bytes over the budget change.

Complexity: O(degree * times + changed slots) per change; blocks entirely below or above the budget
count as one slot. Compiled where numba is installed (see `compiled`).
"""

from __future__ import annotations

import numpy as np

from remat.solvers.core.accounting import Ints
from remat.solvers.core.compiled import compiled, copied, inner
from remat.solvers.search.sequence import (  # fmt: skip
    ADDED,
    BLOCK,
    FAR,
    HELD,
    IN_PLACE,
    LEAST,
    MAX_TIMES,
    MOST,
    NOW,
    OVER,
    PINNED,
    PRODUCER,
    READ_FROM,
    READ_TO,
    REPEATED,
    REUSE_FROM,
    REUSE_TO,
    ROOM,
    SAVED,
    SIZE,
    SLOT,
    SNAPSHOT,
    SPACING,
    SPAN,
    TIMES,
    USER_FROM,
    USER_TO,
    WHERE,
    WORKSPACE,
    WRITE_FROM,
    WRITE_TO,
    State,
    with_empty_slots,
)


def lay_out(state: State, steps: Ints) -> State:
    """Returns the sequence `steps` in slots, with the step that reads the outputs; O(E log S)."""
    result = with_empty_slots(state, len(steps) + 1)
    fill(result, np.append(steps, len(state.operators) - 1))
    return result


@inner
def computed_before(operators: Ints, op: int, q: int) -> int:
    """Returns the last slot before `q` that computes `op`, -1 if none."""
    for i in range(operators[op, TIMES] - 1, -1, -1):
        if operators[op, WHERE + i] < q:
            position: int = operators[op, WHERE + i]
            return position
    return -1


@inner
def computed_after(operators: Ints, op: int, q: int) -> int:
    """Returns the first slot after `q` that computes `op`, `FAR` if none."""
    for i in range(operators[op, TIMES]):
        if operators[op, WHERE + i] > q:
            position: int = operators[op, WHERE + i]
            return position
    return FAR


@copied
def last_read(state: State, value: int, begin: int, end: int) -> int:
    """Returns the last slot inside (begin, end) that reads `value`, `begin` if none."""
    values, operators, last = state.values, state.operators, begin
    for k in range(values[value, USER_FROM], values[value, USER_TO]):
        u = state.links[k]
        for i in range(operators[u, TIMES] - 1, -1, -1):
            position = operators[u, WHERE + i]
            if position < end:
                last = max(last, position)
                break
    return last


@inner
def held(slots: Ints, q: int) -> int:
    """Returns the bytes held at slot `q`."""
    total: int = slots[HELD, q] + slots[ADDED, q // BLOCK]
    return total


@inner
def shift(slots: Ints, sums: Ints, begin: int, end: int, change: int) -> None:
    """Adds `change` bytes to the slots of [begin, end), whole blocks at once."""
    if begin >= end or change == 0:
        return

    first, last = (begin + BLOCK - 1) // BLOCK, end // BLOCK
    if first > last:
        shift_part(slots, sums, last, begin, end, change)
        return

    if begin < first * BLOCK:
        shift_part(slots, sums, first - 1, begin, first * BLOCK, change)
    if first < last:
        shift_blocks(slots, sums, first, last, change)
    if last * BLOCK < end:
        shift_part(slots, sums, last, last * BLOCK, end, change)


@inner
def shift_part(slots: Ints, sums: Ints, block: int, begin: int, end: int, change: int) -> None:
    """Adds `change` bytes to slots of one block."""
    over, room, part = 0, sums[ROOM] - slots[ADDED, block], slots[HELD, begin:end]
    most, least = slots[MOST, block], slots[LEAST, block]

    # from 0 on, so that the compiler sees no negative index and vectorises
    for k in range(len(part)):
        old = part[k]
        new = old + change
        over += max(new - room, 0) - max(old - room, 0)
        most, least = max(most, new), min(least, new)
        part[k] = new

    slots[MOST, block], slots[LEAST, block] = most, least
    sums[OVER] += over


@inner
def shift_blocks(slots: Ints, sums: Ints, first: int, last: int, change: int) -> None:
    """Adds `change` bytes to whole blocks.

    Visits a block's slots only where some are over the budget and some are not.
    """
    added, most, least = slots[ADDED, first:last], slots[MOST, first:last], slots[LEAST, first:last]
    over, total, more, less = 0, sums[ROOM], max(change, 0), min(change, 0)

    for b in range(len(added)):
        room = total - added[b]
        added[b] += change
        if most[b] + more <= room:
            continue
        if least[b] + less >= room:
            over += BLOCK * change
            continue

        part = slots[HELD, (first + b) * BLOCK : (first + b + 1) * BLOCK]
        high, low = part[0], part[0]
        for k in range(len(part)):
            over += max(part[k] + change - room, 0) - max(part[k] - room, 0)
            high, low = max(high, part[k]), min(low, part[k])
        most[b], least[b] = high, low
    sums[OVER] += over


@inner
def refresh(state: State, q: int) -> None:
    """Recomputes the bytes that the operator at `q` saves by working in place."""
    values, operators, slots = state.values, state.operators, state.slots
    op = slots[SLOT, q]
    if op < 0 or operators[op, REUSE_FROM] == operators[op, REUSE_TO]:
        return

    best = 0
    for k in range(operators[op, REUSE_FROM], operators[op, REUSE_TO]):
        value = state.links[k]
        p = values[value, PRODUCER]
        begin, end = computed_before(operators, p, q), computed_after(operators, p, q)
        if values[value, NOW] > best and last_read(state, value, begin, end) == q:
            best = values[value, NOW]

    shift(slots, state.sums, q, q + 1, slots[SAVED, q] - best)
    slots[SAVED, q] = best


@inner
def refresh_around(state: State, op: int, q: int) -> None:
    """Refreshes the slots where a change of `op` at `q` may add or remove a last read."""
    values, operators, links = state.values, state.operators, state.links
    if state.sums[IN_PLACE] == 0:
        return

    before = computed_before(operators, op, q)
    for k in range(operators[op, WRITE_FROM], operators[op, WRITE_TO]):
        refresh(state, last_read(state, links[k], before, q))

    for k in range(operators[op, READ_FROM], operators[op, READ_TO]):
        value = links[k]
        if values[value, NOW] == 0:
            continue
        begin = computed_before(operators, values[value, PRODUCER], q)
        refresh(state, last_read(state, value, begin, q))
    refresh(state, q)


@inner
def toggle(state: State, op: int, sign: int) -> None:
    """Makes the snapshots that `op` reads take memory (+1), or no longer (-1).

    Called when `op` gets its first recomputation or loses its last one.
    """
    values, operators = state.values, state.operators
    for k in range(operators[op, READ_FROM], operators[op, READ_TO]):
        value = state.links[k]
        if values[value, SNAPSHOT] == 0:
            continue

        values[value, REPEATED] += sign
        if values[value, REPEATED] == (1 if sign > 0 else 0):
            p = values[value, PRODUCER]
            values[value, NOW] = values[value, SIZE] if sign > 0 else 0

            for i in range(operators[p, TIMES]):
                begin = operators[p, WHERE + i]
                end = operators[p, WHERE + i + 1] if i + 1 < operators[p, TIMES] else FAR
                last = last_read(state, value, begin, end)
                shift(state.slots, state.sums, begin, last + 1, sign * values[value, SIZE])
                # its last reader may overwrite it in place
                refresh(state, last)


@inner
def may_be_at(operators: Ints, op: int, q: int) -> bool:
    """True where `op` may be recomputed in slot `q`."""
    if operators[op, PINNED] != 0 or operators[op, TIMES] >= MAX_TIMES or operators[op, WHERE] > q:
        return False
    is_first = operators[operators[op, SPAN], WHERE] < q < operators[operators[op, SPAN + 1], WHERE]
    is_second = (
        operators[operators[op, SPAN + 2], WHERE] < q < operators[operators[op, SPAN + 3], WHERE]
    )
    return bool(is_first or is_second)


@copied
def shift_lifetimes(state: State, op: int, q: int, sign: int) -> None:
    """Applies (+1) or reverts (-1) the change of bytes by a computation of `op` at `q`.

    Slot `q` is empty when this is called.
    """
    values, operators, slots, sums = state.values, state.operators, state.slots, state.sums
    before, after = computed_before(operators, op, q), computed_after(operators, op, q)

    for k in range(operators[op, WRITE_FROM], operators[op, WRITE_TO]):
        value = state.links[k]
        if last_read(state, value, before, after) > q:
            last = last_read(state, value, before, q)
            shift(slots, sums, last + 1, q, -sign * values[value, NOW])
        else:
            shift(slots, sums, q, q + 1, sign * values[value, NOW])

    for k in range(operators[op, READ_FROM], operators[op, READ_TO]):
        value = state.links[k]
        if values[value, NOW] == 0:
            continue
        p = values[value, PRODUCER]
        begin, end = computed_before(operators, p, q), computed_after(operators, p, q)
        last = last_read(state, value, begin, end)
        shift(slots, sums, last + 1, q + 1, sign * values[value, NOW])


@inner
def insert(state: State, op: int, q: int) -> None:
    """Inserts a computation of `op` in the empty slot `q`.

    `q` must be at least the number of times that `op` is computed.
    """
    operators, slots = state.operators, state.slots
    shift_lifetimes(state, op, q, 1)
    shift(slots, state.sums, q, q + 1, operators[op, WORKSPACE])

    i = operators[op, TIMES]
    while operators[op, WHERE + i - 1] > q:
        operators[op, WHERE + i] = operators[op, WHERE + i - 1]
        i -= 1
    operators[op, WHERE + i] = q
    operators[op, TIMES] += 1

    slots[SLOT, q] = op
    state.costs[-1] += state.costs[op]
    refresh_around(state, op, q)
    if operators[op, TIMES] == 2:
        toggle(state, op, 1)


@inner
def remove(state: State, op: int, q: int) -> None:
    """Removes the computation of `op` from slot `q`."""
    operators, slots = state.operators, state.slots
    if operators[op, TIMES] == 2:
        toggle(state, op, -1)
    shift(slots, state.sums, q, q + 1, slots[SAVED, q] - operators[op, WORKSPACE])
    slots[SAVED, q] = 0

    i = 0
    while operators[op, WHERE + i] != q:
        i += 1
    operators[op, TIMES] -= 1
    for m in range(i, operators[op, TIMES]):
        operators[op, WHERE + m] = operators[op, WHERE + m + 1]

    slots[SLOT, q] = -1
    state.costs[-1] -= state.costs[op]
    shift_lifetimes(state, op, q, -1)
    refresh_around(state, op, q)


@inner
def add_lifetimes(state: State, change: Ints) -> None:
    """Adds to `change` the bytes that begin and cease to be held at each slot."""
    values, operators = state.values, state.operators
    for op in range(len(operators)):
        for i in range(operators[op, TIMES]):
            begin = operators[op, WHERE + i]
            end = operators[op, WHERE + i + 1] if i + 1 < operators[op, TIMES] else FAR
            for k in range(operators[op, WRITE_FROM], operators[op, WRITE_TO]):
                value = state.links[k]
                change[begin] += values[value, NOW]
                change[last_read(state, value, begin, end) + 1] -= values[value, NOW]


@compiled
def fill(state: State, steps: Ints) -> None:
    """Puts `steps` into empty slots, at most `MAX_TIMES` computations per operator."""
    values, operators, slots, sums = state.values, state.operators, state.slots, state.sums
    capacity, room = slots.shape[1], sums[ROOM]

    for index in range(len(steps)):
        op, q = steps[index], SPACING * index + SPACING - 1
        if operators[op, TIMES] < MAX_TIMES:
            slots[SLOT, q] = op
            operators[op, WHERE + operators[op, TIMES]] = q
            operators[op, TIMES] += 1
            state.costs[-1] += state.costs[op]
            slots[HELD, q] += operators[op, WORKSPACE]

    for value in range(len(values)):
        if values[value, SNAPSHOT] != 0:
            for k in range(values[value, USER_FROM], values[value, USER_TO]):
                values[value, REPEATED] += operators[state.links[k], TIMES] > 1
            if values[value, REPEATED] == 0:
                values[value, NOW] = 0

    change = np.zeros(capacity + 1, np.int64)
    add_lifetimes(state, change)
    alive = 0
    for q in range(capacity):
        alive += change[q]
        slots[HELD, q] += alive
        sums[OVER] += max(slots[HELD, q] - room, 0)

    for block in range(-(-capacity // BLOCK)):
        part = slots[HELD, block * BLOCK : (block + 1) * BLOCK]
        slots[MOST, block], slots[LEAST, block] = part.max(), part.min()

    for q in range(capacity):
        refresh(state, q)
