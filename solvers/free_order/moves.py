"""Annealing on the sequence where first computations may move too.

The moves of `annealing` add, remove and move recomputations. Here first computations move, along
with others that have to; the first computation of an operator may lie between the slots `lower` and
`upper`:

- advance: an operator moves to an earlier slot, and its ancestors behind that slot move before it
- defer: an operator moves to a later slot, and its descendants before that slot move behind it
- follow: after either, operators that waited for the moved one, or were there only for it, come
  along with some chance

A move of a first computation is an insertion and a removal (`timeline`). So it works for recomputed
operators too, and may turn a recomputation into the first computation. Complexity: O(degree * times
+ changed slots) per operator moved.
"""

from __future__ import annotations

import numpy as np

from remat.solvers.core.accounting import Floats, Ints
from remat.solvers.core.compiled import compiled, inner
from remat.solvers.search.annealing import change, do_insert, do_remove, draw, pick
from remat.solvers.search.sequence import (
    MAX_TIMES,
    OVER,
    PRODUCER,
    READ_FROM,
    READ_TO,
    ROOM,
    SLOT,
    SPACING,
    TIMES,
    WHERE,
)
from remat.solvers.search.timeline import computed_before, held, insert, remove

MAX_CHANGES = 256
# columns of `rules`: places in `relations` of the operators computed before and of those after, and
# whether the operator keeps its place
EARLIER_FROM, EARLIER_TO, LATER_FROM, LATER_TO, FIXED = range(5)
_MOST = 40  # operators that a move takes along
_SEARCHED = 400  # slots searched for empty ones


@inner
def lower(operators: Ints, rules: Ints, relations: Ints, op: int) -> int:
    """Returns the slot of the last first computation that `op` has to follow, -1 if none."""
    last = -1
    for k in range(rules[op, EARLIER_FROM], rules[op, EARLIER_TO]):
        last = max(last, operators[relations[k], WHERE])
    return last


@inner
def upper(operators: Ints, rules: Ints, relations: Ints, op: int) -> int:
    """Returns the slot of the earliest first computation that must follow `op`; the end if none."""
    first: int = operators[len(operators) - 1, WHERE]
    for k in range(rules[op, LATER_FROM], rules[op, LATER_TO]):
        first = min(first, operators[relations[k], WHERE])
    return first


@inner
def may_move(operators: Ints, rules: Ints, op: int) -> bool:
    """True where the first computation of `op` may change its slot.

    `insert` needs slots not below the number of times.
    """
    times = operators[op, TIMES]
    return bool(rules[op, FIXED] == 0 and times < MAX_TIMES and times <= operators[op, WHERE])


@inner
def relocate(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    op: int,
    place: int,
    journal: Ints,
) -> None:
    """Moves the first computation of `op` to the empty slot `place`."""
    q = operators[op, WHERE]
    do_insert(values, operators, links, slots, sums, costs, op, place, journal)
    do_remove(values, operators, links, slots, sums, costs, op, q, journal)


@inner
def collect(
    operators: Ints, rules: Ints, relations: Ints, op: int, q: int, sign: int, group: Ints
) -> int:
    """Fills `group` with `op` and the operators that have to move to the other side of `q` with it.

    With `sign` -1 these are ancestors first computed behind `q`, with +1 descendants first computed
    before it. They are sorted by first computation. Returns their number, 0 where one can't move.
    """
    count, done = 1, 0
    group[0] = op
    while done < count:
        member = group[done]
        done += 1
        if not may_move(operators, rules, member):
            return 0
        column = EARLIER_FROM if sign < 0 else LATER_FROM
        for k in range(rules[member, column], rules[member, column + 1]):
            other = relations[k]
            if sign * (operators[other, WHERE] - q) >= 0:
                continue
            is_known = False
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
def transfer(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    rules: Ints,
    relations: Ints,
    op: int,
    q: int,
    group: Ints,
    journal: Ints,
) -> bool:
    """Moves `op`, and all that has to come along, to the other side of slot `q`, or nothing."""
    sign = -1 if q < operators[op, WHERE] else 1
    count = collect(operators, rules, relations, op, q, sign, group)
    if count == 0 or journal[0, 0] + 2 * count >= MAX_CHANGES:
        return False
    # find empty slots from `q` outwards; an ancestor's slot lies before its descendant's
    found, place = 0, q
    while (
        found < count
        and 0 < place < operators[len(operators) - 1, WHERE]
        and abs(place - q) < _SEARCHED
    ):
        if slots[SLOT, place] < 0:
            group[_MOST + found] = place
            found += 1
        place += sign
    if found < count:
        return False
    before = journal[0, 0]
    for i in range(count):
        member = group[i] if sign < 0 else group[count - 1 - i]
        place = group[_MOST + count - 1 - i]
        first = operators[member, WHERE]
        is_inside = (
            lower(operators, rules, relations, member)
            < place
            < upper(operators, rules, relations, member)
        )
        if sign * (place - first) <= 0 or not is_inside or place < operators[member, TIMES]:
            take_back(values, operators, links, slots, sums, costs, journal, before)
            return False
        relocate(values, operators, links, slots, sums, costs, member, place, journal)
    return True


@inner
def take_back(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    journal: Ints,
    count: int,
) -> None:
    """Undoes all but the first `count` changes of the journal."""
    while journal[0, 0] > count:
        op, q = journal[journal[0, 0], 0], journal[journal[0, 0], 1]
        journal[0, 0] -= 1
        if q >= 0:
            remove(values, operators, links, slots, sums, costs, op, q)
        else:
            insert(values, operators, links, slots, sums, costs, op, -q - 1)


@inner
def follow(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    rules: Ints,
    relations: Ints,
    sign: int,
    chance: float,
    draws: Floats,
    journal: Ints,
) -> None:
    """Moves some operators next to the moved ones that they depend on, or that depend on them.

    With `sign` -1 those that waited for a moved operator, with +1 those that were there only for
    it.
    """
    done = 0
    column = LATER_FROM if sign < 0 else EARLIER_FROM
    while done < journal[0, 0] < MAX_CHANGES - 8:
        done += 1
        op, q = journal[done, 0], journal[done, 1]
        if q < 0 or operators[op, WHERE] != q:
            continue
        for k in range(rules[op, column], rules[op, column + 1]):
            other = relations[k]
            if journal[0, 0] >= MAX_CHANGES - 8 or not may_move(operators, rules, other):
                continue
            low, high = (
                lower(operators, rules, relations, other),
                upper(operators, rules, relations, other),
            )
            if (low if sign < 0 else high) != q or draw(draws, journal) >= chance:
                continue
            place = q - sign
            while low < place < high and slots[SLOT, place] >= 0:
                place -= sign
            if (
                low < place < high
                and sign * (place - operators[other, WHERE]) > 0
                and place >= operators[other, TIMES]
            ):
                relocate(values, operators, links, slots, sums, costs, other, place, journal)


@inner
def aimed_slot(
    operators: Ints,
    links: Ints,
    values: Ints,
    slots: Ints,
    sums: Ints,
    draws: Floats,
    journal: Ints,
) -> tuple[int, int]:
    """Returns an operator and a slot over the budget that gets lighter if it moves past the slot.

    (-1, -1) if none is hit.
    """
    capacity, over = slots.shape[1], -1
    for _ in range(40):
        q = pick(draws, journal, capacity)
        if held(slots, q) > sums[ROOM]:
            over = q
            break
    if over < 0:
        return -1, -1
    for _ in range(40):
        q = over + 1 + pick(draws, journal, capacity - over - 1) if over < capacity - 1 else over
        op = slots[SLOT, q]
        if (
            op < 0
            or operators[op, READ_FROM] == operators[op, READ_TO]
            or operators[op, WHERE] != q
        ):
            continue
        value = links[
            operators[op, READ_FROM]
            + pick(draws, journal, operators[op, READ_TO] - operators[op, READ_FROM])
        ]
        p = values[value, PRODUCER]
        begin = computed_before(operators, p, q)
        # the value is held across the slot: move its reader before it, or its producer after it
        if begin < over:
            is_reader = op < len(operators) - 1 and (
                begin != operators[p, WHERE] or draw(draws, journal) < 0.5
            )
            return (op, over) if is_reader else (p, over)
    return -1, -1


@inner
def reorder(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    rules: Ints,
    relations: Ints,
    group: Ints,
    draws: Floats,
    journal: Ints,
) -> None:
    """Makes one random move of first computations."""
    op, target, r = -1, -1, draw(draws, journal)
    if sums[OVER] > 0 and r < 0.3:
        op, target = aimed_slot(operators, links, values, slots, sums, draws, journal)
    if op < 0:
        op = pick(draws, journal, len(operators) - 1)
        first = operators[op, WHERE]
        if r < 0.5:
            target = (
                lower(operators, rules, relations, op) + 1
                if r < 0.4
                else upper(operators, rules, relations, op) - 1
            )
        else:
            reach = 2.0 ** (1.0 + np.log2(slots.shape[1]) * draw(draws, journal))
            target = first + int(reach * (1.0 if draw(draws, journal) < 0.5 else -1.0))
        target = min(max(target, 1), operators[len(operators) - 1, WHERE] - 1)
    if abs(target - operators[op, WHERE]) < 2:
        return
    sign = -1 if target < operators[op, WHERE] else 1
    chance = min(max(1.5 * draw(draws, journal) - 0.4, 0.0), 1.0)
    if (
        transfer(
            values,
            operators,
            links,
            slots,
            sums,
            costs,
            rules,
            relations,
            op,
            target,
            group,
            journal,
        )
        and chance > 0
    ):
        follow(
            values,
            operators,
            links,
            slots,
            sums,
            costs,
            rules,
            relations,
            sign,
            chance,
            draws,
            journal,
        )


@compiled
def anneal_free(
    values: Ints,
    operators: Ints,
    links: Ints,
    slots: Ints,
    sums: Ints,
    costs: Floats,
    rules: Ints,
    relations: Ints,
    draws: Floats,
    iterations: int,
    order_chance: float,
    hot: float,
    cold: float,
    scale: float,
    weight: Floats,
    best_slot: Ints,
    best: Floats,
) -> None:
    """Runs `iterations` moves; each moves first computations with chance `order_chance`.

    For the rest see `annealing.anneal`.
    """
    journal = np.zeros((MAX_CHANGES, 2), np.int64)
    group = np.zeros(2 * _MOST, np.int64)
    per_byte = 1.0 / (SPACING * max(sums[ROOM], 1))
    num_fit, period = 0, 500
    old_cost, old_over = costs[-1], sums[OVER]
    for step in range(iterations):
        temperature = hot * (cold / hot) ** (step / iterations)
        journal[0, 0] = 0
        if draw(draws, journal) < order_chance:
            reorder(
                values,
                operators,
                links,
                slots,
                sums,
                costs,
                rules,
                relations,
                group,
                draws,
                journal,
            )
        else:
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
                take_back(values, operators, links, slots, sums, costs, journal, 0)
                costs[-1], sums[OVER] = old_cost, old_over
        num_fit += old_over == 0
        if (step + 1) % period == 0:
            if num_fit < 0.15 * period:
                weight[0] = weight[0] * 1.1 if weight[0] < 1000 else 1.0  # stuck: let it leave
            elif num_fit > 0.4 * period:
                weight[0] = max(weight[0] / 1.1, 1e-4)
            num_fit = 0
            if old_over == 0 and old_cost <= scale:
                break
