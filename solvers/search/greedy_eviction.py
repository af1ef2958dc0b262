"""Greedy recomputation with eviction.

Run the operators in order, evict values to make room, recompute on demand.

Other names: dynamic tensor rematerialization (Kirisame et al., ICLR 2021) with full knowledge of
the graph instead of an online guess. Before each computation, values are evicted until it fits:
first those that nothing will need, then those with the smallest (cost to recompute) / (bytes * time
until needed); the rules (`Rule`) differ in this order. A missing value is recomputed, its missing
inputs first; meanwhile everything that this chain needs is locked in memory.

A value that cannot be recomputed stays even if no operator left needs it, as long as something
computed from it may be recomputed (a random generator's state, for a dropout). Otherwise nothing
that depends on it could ever be evicted.

A plan (`kept`) says what to keep at some operators. All other values are dropped there, or earlier,
at no cost, where room is needed. Values that the plan keeps are evicted where it exceeds the
budget: near the least budget, plans from relaxed models need a little more than it.

It fails where the locked values do not fit, so the smallest budget that it meets is near the least
one, not the least. Complexity: O(n E) to find the next needs, plus O(alive * degree) per eviction.
Steps and cost are capped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from enum import IntEnum
from types import MappingProxyType

import numpy as np

from remat.core.graph import Graph
from remat.solvers.core.accounting import Bools, Floats, Ints
from remat.solvers.core.compiled import IS_COMPILED, compiled, in_time, inner, is_ready
from remat.solvers.core.on_demand import values_always_kept
from remat.solvers.search.sequence import users

MOST_OPERATORS_TO_EVICT = 20_000  # it takes O(n E)
_FAR = 1 << 40
_MOST_OPERATORS_IN_PYTHON = 2_000  # a few seconds in plain Python, less than the compiler takes


class Rule(IntEnum):
    """Which value to evict first."""

    CHEAP = 0  # least cost to recompute, per byte and per step until it is needed
    FAR = 1  # needed last
    LARGE = 2  # most bytes per cost to recompute
    # as CHEAP, but values of the backward may go too, though they are expensive to recompute
    ANY = 3
    # as ANY, but a value that cannot be recomputed goes as soon as no operator needs it; values
    # computed from it then stay
    LOOSE = 4
    # least cost to recompute per byte, where bytes beyond those that are missing don't count
    ENOUGH = 5


def is_compiled() -> bool:
    """True where greedy eviction is compiled, so that it takes milliseconds."""
    return IS_COMPILED and is_ready(_run)


def steps_with_eviction(
    graph: Graph,
    budget_bytes: int,
    rule: Rule = Rule.CHEAP,
    *,
    max_factor: float = 8.0,
    left_s: float = math.inf,
    kept: Mapping[int, Collection[int]] = MappingProxyType({}),
) -> Ints | None:
    """Returns steps that fit `budget_bytes`, or None where greedy eviction gets stuck.

    Args:
        graph: any graph.
        budget_bytes: resident bytes included.
        rule: which value is evicted first.
        max_factor: gives up beyond this multiple of the number of operators, and of the keep-all
            cost.
        left_s: seconds left. Where the code is not compiled yet and this is too short to compile
            it, small graphs run in plain Python and large ones return None.
        kept: for some operators, which values written before stay when the operator is reached;
            others are dropped if they can be recomputed. Values that stay may be evicted later.

    Operators work in place only where they must, and snapshots count in full, so the simulated peak
    can be lower.
    """
    arrays = graph.arrays
    room, run = budget_bytes - graph.resident_bytes, in_time(_run, left_s)
    if room < 0 or (run is not _run and graph.num_operators > _MOST_OPERATORS_IN_PYTHON):
        return None
    size = np.where(arrays.producer >= 0, arrays.size_bytes, 0)
    user_start, user = users(graph)
    # the end reads the outputs
    read_start = np.append(arrays.read_start, len(arrays.read) + len(arrays.output))
    write_start = np.append(arrays.write_start, arrays.write_start[-1])
    read = np.concatenate([arrays.read, arrays.output])
    reuse_start = np.append(arrays.reuse_start, arrays.reuse_start[-1])
    steps = np.zeros(int(max_factor * graph.num_operators) + 1, np.int64)
    drop_at = np.array(sorted(kept), np.int64)
    stays = np.zeros((len(drop_at), len(size)), np.bool_)
    for index, target in enumerate(drop_at.tolist()):
        stays[index, list(kept[target])] = True
    stays[:, list(values_always_kept(graph)) if kept else []] = True
    cost, workspace, is_pinned = (
        np.append(arrays.cost_s, 0.0),
        np.append(arrays.workspace_bytes, 0),
        np.append(arrays.is_pinned, True),
    )
    is_fixed = (
        is_pinned
        if rule in (Rule.ANY, Rule.LOOSE)
        else np.append(arrays.is_pinned | arrays.is_backward, True)
    )
    possible = (
        np.full(len(size), -1) if rule is Rule.LOOSE else _last_possible_needs(graph, is_fixed)
    )
    length = run(
        cost, size, possible, workspace, arrays.producer, read_start, read, write_start,
        arrays.write, reuse_start, arrays.reuse,
        user_start, user, is_pinned, is_fixed, room, int(rule), max_factor * graph.cost_s, drop_at,
        stays, steps,
    )  # fmt: skip
    return steps[:length].copy() if length >= 0 else None


def _last_possible_needs(graph: Graph, is_fixed: Bools) -> Ints:
    """Returns, for each value, the last operator that may need it, directly or to recompute; O(E).

    What operators of `is_fixed` write is neither evicted nor recomputed.
    """
    arrays = graph.arrays
    last = np.full(len(arrays.size_bytes), -1, np.int64)
    last[arrays.output] = graph.num_operators
    for op in range(graph.num_operators - 1, -1, -1):
        written = arrays.write[arrays.write_start[op] : arrays.write_start[op + 1]]
        latest = op if is_fixed[op] else max(op, last[written].max(initial=-1))
        read = arrays.read[arrays.read_start[op] : arrays.read_start[op + 1]]
        last[read] = np.maximum(last[read], latest)
    return last


@compiled
def _run(
    cost: Floats,
    size: Ints,
    possible: Ints,
    workspace: Ints,
    producer: Ints,
    read_start: Ints,
    read: Ints,
    write_start: Ints,
    write: Ints,
    reuse_start: Ints,
    reuse: Ints,
    user_start: Ints,
    user: Ints,
    is_pinned: Bools,
    is_fixed: Bools,
    room: int,
    rule: int,
    max_cost: float,
    drop_at: Ints,
    stays: Bools,
    steps: Ints,
) -> int:
    end, num_values = len(cost) - 1, len(size)
    held, length, spent, stage = 0, 0, 0.0, 0
    in_memory = producer < 0
    locks = np.zeros(num_values, np.int64)
    need = np.zeros(num_values, np.int64)
    again = np.zeros(num_values)
    stack = np.zeros(end + 2, np.int64)
    for target in range(end + 1):
        if stage < len(drop_at) and drop_at[stage] == target:
            for value in range(num_values):
                if in_memory[value] and not stays[stage, value]:
                    held -= _forget(
                        value, cost, size, producer, read_start, read, is_pinned, in_memory, again
                    )
            stage += 1
        _find_needs(
            target,
            producer,
            read_start,
            read,
            write_start,
            write,
            user_start,
            user,
            is_pinned,
            in_memory,
            need,
        )
        depth = 1
        stack[0] = target
        while depth > 0:
            op = stack[depth - 1]
            missing = -1
            for k in range(read_start[op], read_start[op + 1]):
                if not in_memory[read[k]]:
                    missing = read[k]
                    break
            for k in range(read_start[op], read_start[op + 1]):
                locks[read[k]] += 1
            if missing >= 0:
                if depth > end or is_pinned[producer[missing]]:
                    return -1
                stack[depth] = producer[missing]
                depth += 1
                continue
            wanted = workspace[op]
            for k in range(write_start[op], write_start[op + 1]):
                if not in_memory[write[k]]:
                    wanted += size[write[k]]
                locks[write[k]] += 1
            held = _make_room(
                room - wanted,
                held,
                rule,
                target,
                stage,
                drop_at,
                stays,
                cost,
                size,
                possible,
                producer,
                read_start,
                read,
                is_pinned,
                is_fixed,
                in_memory,
                locks,
                need,
                again,
            )
            taken = -1
            if held > room - wanted:
                taken = _take_over(
                    op,
                    target,
                    size,
                    producer,
                    reuse_start,
                    reuse,
                    user_start,
                    user,
                    is_pinned,
                    locks,
                )
                if taken < 0 or held > room - wanted + size[taken]:
                    return -1
            if op < end:
                spent += cost[op]
                if length >= len(steps) or spent > max_cost:
                    return -1
                steps[length] = op
                length += 1
            for k in range(write_start[op], write_start[op + 1]):
                locks[write[k]] -= 1
                if not in_memory[write[k]]:
                    in_memory[write[k]] = True
                    held += size[write[k]]
            for k in range(read_start[op], read_start[op + 1]):
                locks[read[k]] -= 1
            if taken >= 0:
                held -= _forget(
                    taken, cost, size, producer, read_start, read, is_pinned, in_memory, again
                )
            depth -= 1
            if depth > 0:
                above = stack[depth - 1]
                for k in range(read_start[above], read_start[above + 1]):
                    locks[read[k]] -= 1
    return length


@inner
def _take_over(
    op: int,
    target: int,
    size: Ints,
    producer: Ints,
    reuse_start: Ints,
    reuse: Ints,
    user_start: Ints,
    user: Ints,
    is_pinned: Bools,
    locks: Ints,
) -> int:
    """Returns the largest input that `op` may reuse in place, which loses it; -1 if none."""
    best = -1
    for k in range(reuse_start[op], reuse_start[op + 1]):
        value = reuse[k]
        is_lost = is_pinned[producer[value]] and user[user_start[value + 1] - 1] > target
        if locks[value] == 1 and not is_lost and (best < 0 or size[value] > size[best]):
            best = value
    return best


@inner
def _forget(
    value: int,
    cost: Floats,
    size: Ints,
    producer: Ints,
    read_start: Ints,
    read: Ints,
    is_pinned: Bools,
    in_memory: Bools,
    again: Floats,
) -> int:
    """Takes `value` out of memory and returns its bytes.

    Records the cost to recompute it in `again`, infinite where its operator is pinned.
    """
    p = producer[value]
    again[value] = np.inf if is_pinned[p] else cost[p]
    for k in range(read_start[p], read_start[p + 1]):
        if not in_memory[read[k]]:
            again[value] += again[read[k]]
    in_memory[value] = False
    num_bytes: int = size[value]
    return num_bytes


@inner
def _find_needs(
    target: int,
    producer: Ints,
    read_start: Ints,
    read: Ints,
    write_start: Ints,
    write: Ints,
    user_start: Ints,
    user: Ints,
    is_pinned: Bools,
    in_memory: Bools,
    need: Ints,
) -> None:
    """Fills `need`: the next operator from `target` on that needs each value.

    Values that are needed to recompute missing ones count as well.
    """
    for value in range(len(need)):
        need[value] = _FAR
        if producer[value] < 0:
            continue
        for k in range(user_start[value], user_start[value + 1]):
            if user[k] >= target:
                need[value] = user[k]
                break
    for op in range(target - 1, -1, -1):
        first = _FAR
        for k in range(write_start[op], write_start[op + 1]):
            if not in_memory[write[k]] and need[write[k]] < first:
                first = need[write[k]]
        if first < _FAR and not is_pinned[op]:
            for k in range(read_start[op], read_start[op + 1]):
                need[read[k]] = min(need[read[k]], first)


@inner
def _make_room(
    room: int,
    held: int,
    rule: int,
    target: int,
    stage: int,
    drop_at: Ints,
    stays: Bools,
    cost: Floats,
    size: Ints,
    possible: Ints,
    producer: Ints,
    read_start: Ints,
    read: Ints,
    is_pinned: Bools,
    is_fixed: Bools,
    in_memory: Bools,
    locks: Ints,
    need: Ints,
    again: Floats,
) -> int:
    """Evicts until at most `room` bytes are held or nothing can go; returns the bytes held."""
    if held <= room:
        return held
    for value in range(len(size)):
        if not in_memory[value] or producer[value] < 0 or locks[value] > 0:
            continue
        is_planned_out = (
            stage < len(drop_at) and not stays[stage, value] and need[value] >= drop_at[stage]
        )
        is_useless = need[value] >= _FAR and (
            not is_pinned[producer[value]] or possible[value] < target
        )
        if is_planned_out or is_useless:
            held -= _forget(
                value, cost, size, producer, read_start, read, is_pinned, in_memory, again
            )
    while held > room:
        best, best_score = -1, np.inf
        for value in range(len(size)):
            p = producer[value]
            if p < 0 or not in_memory[value] or locks[value] > 0 or size[value] == 0 or is_fixed[p]:
                continue
            back = cost[p]
            for k in range(read_start[p], read_start[p + 1]):
                if not in_memory[read[k]]:
                    back += again[read[k]]
            distance = need[value] - target + 1.0
            if rule in (0, 3, 4):
                score = (back + 1e-30) / (size[value] * distance)
            elif rule == 1:
                score = -distance - size[value] * 1e-18
            elif rule == 5:
                score = (back + 1e-30) / min(size[value], held - room)
            else:
                score = (back + 1e-30) / size[value]
            if score < best_score:
                best, best_score = value, score
        if best < 0:
            break
        p = producer[best]
        held -= _forget(best, cost, size, producer, read_start, read, is_pinned, in_memory, again)
        first = need[best]
        for k in range(read_start[p], read_start[p + 1]):
            need[read[k]] = min(need[read[k]], first)
    return held
