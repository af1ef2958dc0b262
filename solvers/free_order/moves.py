"""Random moves of first computations, made among those of `search.moves`.

A first computation may lie between the slots `lower` and `upper`; when it moves, others may have to
move too:

- advance: an operator moves to an earlier slot, and its ancestors after that slot move before it
- defer: an operator moves to a later slot, and its descendants before that slot move after it
- follow: after either, operators that waited for the moved one, or were there only for it, come
  along with some chance

A move of a first computation is an insertion and a removal (`timeline`). So it works for recomputed
operators too, and may turn a recomputation into the first computation. Complexity: O(degree * times
+ changed slots) per operator moved.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from remat.solvers.core.accounting import Floats, Ints
from remat.solvers.core.compiled import compiled, inner
from remat.solvers.free_order.rules import OrderRules
from remat.solvers.search.annealing import Chunk, set_out, settle
from remat.solvers.search.moves import (
    MAX_CHANGES,
    change,
    do_insert,
    do_remove,
    draw,
    pick,
    random_over,
    random_read,
    undo,
)
from remat.solvers.search.sequence import MAX_TIMES, OVER, PRODUCER, SLOT, TIMES, WHERE, State
from remat.solvers.search.timeline import computed_before

# columns of `Rules.operators`: places in `Rules.links` of the operators computed before and of
# those after, and whether the operator keeps its place
EARLIER_FROM, EARLIER_TO, LATER_FROM, LATER_TO, FIXED = range(5)
# no measurement of these two is on record
_MOST = 40  # operators that a move takes along at most
_SEARCHED = 400  # slots searched for empty ones


class Rules(NamedTuple):
    """The order rules for compiled functions.

    Attributes:
        operators: (operators + 1, 5).
        links: the operators that come before and after each; `*_FROM` and `*_TO` point into it.
        group: (2 * `_MOST`,), overwritten: the operators of a move, then their slots.
    """

    operators: Ints
    links: Ints
    group: Ints


def pack_rules(rules: OrderRules) -> Rules:
    """Returns the order rules as arrays."""
    count, offset = len(rules.is_fixed), len(rules.earlier)
    packed = np.zeros((count + 1, 5), np.int64)
    packed[:count, EARLIER_FROM] = rules.earlier_start[:-1]
    packed[:count, EARLIER_TO] = rules.earlier_start[1:]
    packed[:count, LATER_FROM] = rules.later_start[:-1] + offset
    packed[:count, LATER_TO] = rules.later_start[1:] + offset
    packed[:count, FIXED] = rules.is_fixed
    packed[count, FIXED] = 1

    links = np.concatenate([rules.earlier, rules.later])
    return Rules(packed, links, np.zeros(2 * _MOST, np.int64))


@inner
def lower(state: State, rules: Rules, op: int) -> int:
    """Returns the slot of the last first computation that `op` has to follow, -1 if none."""
    last = -1
    for k in range(rules.operators[op, EARLIER_FROM], rules.operators[op, EARLIER_TO]):
        last = max(last, state.operators[rules.links[k], WHERE])
    return last


@inner
def upper(state: State, rules: Rules, op: int) -> int:
    """Returns the slot of the earliest first computation that must follow `op`; the end if none."""
    first: int = state.operators[len(state.operators) - 1, WHERE]
    for k in range(rules.operators[op, LATER_FROM], rules.operators[op, LATER_TO]):
        first = min(first, state.operators[rules.links[k], WHERE])
    return first


@inner
def may_move(state: State, rules: Rules, op: int) -> bool:
    """True where the first computation of `op` may change its slot.

    `insert` needs a slot of at least the number of times that `op` is computed.
    """
    times = state.operators[op, TIMES]
    is_free = rules.operators[op, FIXED] == 0
    return bool(is_free and times < MAX_TIMES and times <= state.operators[op, WHERE])


@inner
def may_move_to(state: State, rules: Rules, op: int, place: int, sign: int) -> bool:
    """True where `place` is on the side `sign` of the first computation of `op`, and allowed."""
    if sign * (place - state.operators[op, WHERE]) <= 0 or place < state.operators[op, TIMES]:
        return False
    return lower(state, rules, op) < place < upper(state, rules, op)


@inner
def relocate(state: State, op: int, place: int, journal: Ints) -> None:
    """Moves the first computation of `op` to the empty slot `place`."""
    q = state.operators[op, WHERE]
    do_insert(state, op, place, journal)
    do_remove(state, op, q, journal)


@inner
def collect(state: State, rules: Rules, op: int, q: int, sign: int) -> int:
    """Fills the group with `op` and the operators that have to move to the other side of `q` too.

    With `sign` -1 these are ancestors first computed after `q`, with +1 descendants first computed
    before it. They are sorted by first computation. Returns their number, 0 where one can't move.
    """
    operators, group, count, done = state.operators, rules.group, 1, 0
    column = EARLIER_FROM if sign < 0 else LATER_FROM
    group[0] = op

    while done < count:
        member = group[done]
        done += 1
        if not may_move(state, rules, member):
            return 0

        for k in range(rules.operators[member, column], rules.operators[member, column + 1]):
            other, is_known = rules.links[k], False
            if sign * (operators[other, WHERE] - q) >= 0:
                continue
            for i in range(count):
                is_known = is_known or group[i] == other
            if is_known:
                continue

            if count == _MOST:
                return 0
            group[count] = other
            count += 1

    for i in range(1, count):  # by first computation
        member, k = group[i], i
        while k > 0 and operators[group[k - 1], WHERE] > operators[member, WHERE]:
            group[k] = group[k - 1]
            k -= 1
        group[k] = member
    return count


@inner
def find_slots(state: State, rules: Rules, q: int, sign: int, count: int) -> bool:
    """Finds `count` empty slots from `q` outwards for the group; False if too few are near."""
    found, place = 0, q
    last = state.operators[len(state.operators) - 1, WHERE]
    while found < count and 0 < place < last and abs(place - q) < _SEARCHED:
        if state.slots[SLOT, place] < 0:
            rules.group[_MOST + found] = place
            found += 1
        place += sign
    return found == count


@inner
def transfer(state: State, rules: Rules, op: int, q: int, journal: Ints) -> bool:
    """Moves `op`, and all that has to come along, to the other side of slot `q`, or nothing."""
    sign = -1 if q < state.operators[op, WHERE] else 1
    count, before = collect(state, rules, op, q, sign), journal[0, 0]
    if count == 0 or before + 2 * count >= MAX_CHANGES:
        return False
    if not find_slots(state, rules, q, sign, count):
        return False

    for i in range(count):  # an ancestor's slot lies before its descendant's
        member = rules.group[i] if sign < 0 else rules.group[count - 1 - i]
        place = rules.group[_MOST + count - 1 - i]
        if not may_move_to(state, rules, member, place, sign):
            undo(state, journal, before)
            return False
        relocate(state, member, place, journal)
    return True


@inner
def follow(
    state: State, rules: Rules, sign: int, chance: float, draws: Floats, journal: Ints
) -> None:
    """Moves some operators next to the moved ones that they depend on, or that depend on them.

    With `sign` -1 it moves those that waited for a moved operator, with +1 those that were there
    only for it.
    """
    slots, done = state.slots, 0
    column = LATER_FROM if sign < 0 else EARLIER_FROM

    while done < journal[0, 0] < MAX_CHANGES - 8:
        done += 1
        op, q = journal[done, 0], journal[done, 1]
        if q < 0 or state.operators[op, WHERE] != q:
            continue

        for k in range(rules.operators[op, column], rules.operators[op, column + 1]):
            other = rules.links[k]
            if journal[0, 0] >= MAX_CHANGES - 8 or not may_move(state, rules, other):
                continue
            low, high = lower(state, rules, other), upper(state, rules, other)
            if (low if sign < 0 else high) != q or draw(draws, journal) >= chance:
                continue

            place = q - sign
            while low < place < high and slots[SLOT, place] >= 0:
                place -= sign
            if may_move_to(state, rules, other, place, sign):
                relocate(state, other, place, journal)


@inner
def aimed_slot(state: State, draws: Floats, journal: Ints) -> tuple[int, int]:
    """Returns an operator and a slot over the budget: moving it past the slot frees bytes.

    (-1, -1) if none is hit.
    """
    operators, over = state.operators, random_over(state, draws, journal)
    for _ in range(40 if over >= 0 else 0):
        q, value = random_read(state, over, draws, journal)
        op = state.slots[SLOT, q]
        if value < 0 or operators[op, WHERE] != q:
            continue

        p = state.values[value, PRODUCER]
        begin = computed_before(operators, p, q)
        # the value is held across the slot: move its reader before it, or its producer after it
        if begin < over:
            is_reader = op < len(operators) - 1 and (
                begin != operators[p, WHERE] or draw(draws, journal) < 0.5
            )
            return (op, over) if is_reader else (p, over)

    return -1, -1


@inner
def random_slot(
    state: State, rules: Rules, r: float, draws: Floats, journal: Ints
) -> tuple[int, int]:
    """Returns a random operator and where to move it: next to what limits it, or anywhere."""
    op = pick(draws, journal, len(state.operators) - 1)
    if r < 0.4:
        target = lower(state, rules, op) + 1
    elif r < 0.5:
        target = upper(state, rules, op) - 1
    else:
        reach = 2.0 ** (1.0 + np.log2(state.slots.shape[1]) * draw(draws, journal))
        side = 1.0 if draw(draws, journal) < 0.5 else -1.0
        target = state.operators[op, WHERE] + int(reach * side)

    return op, min(max(target, 1), state.operators[len(state.operators) - 1, WHERE] - 1)


@inner
def reorder(state: State, rules: Rules, draws: Floats, journal: Ints) -> None:
    """Makes one random move of first computations."""
    op, target, r = -1, -1, draw(draws, journal)
    if state.sums[OVER] > 0 and r < 0.3:
        op, target = aimed_slot(state, draws, journal)
    if op < 0:
        op, target = random_slot(state, rules, r, draws, journal)
    if abs(target - state.operators[op, WHERE]) < 2:
        return

    sign = -1 if target < state.operators[op, WHERE] else 1
    chance = min(max(1.5 * draw(draws, journal) - 0.4, 0.0), 1.0)
    if transfer(state, rules, op, target, journal) and chance > 0:
        follow(state, rules, sign, chance, draws, journal)


@compiled
def anneal_free(state: State, chunk: Chunk, rules: Rules, order_chance: float) -> int:
    """Makes the moves of a chunk as `anneal` does; each reorders with chance `order_chance`."""
    walk = set_out(state)
    for step in range(chunk.iterations):
        if draw(chunk.draws, chunk.journal) < order_chance:
            reorder(state, rules, chunk.draws, chunk.journal)
        else:
            change(state, chunk.draws, chunk.journal)
        walk = settle(state, chunk, walk, step)
    return chunk.iterations
