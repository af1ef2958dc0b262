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
budget: near the least budget, plans from relaxed models need a little more.

It fails where the locked values do not fit, so the smallest budget that it meets is only near the
least budget. Complexity: O(n E) to find the next needs, plus O(alive * degree) per eviction.
Steps and cost are capped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from remat.core.graph import Graph
from remat.solvers.core.accounting import Bools, Floats, Ints
from remat.solvers.core.compiled import IS_COMPILED, compiled, in_time, inner, is_ready
from remat.solvers.core.on_demand import values_always_kept
from remat.solvers.search.sequence import users

# it takes O(n E): 0.02 s for 2,001 operators, so some 2 s for as many as this (random graphs)
MOST_OPERATORS_TO_EVICT = 20_000
_FAR = 1 << 40
# gives up beyond this multiple of the number of operators, and of the keep-all cost; a round
# number, not measured
MAX_FACTOR = 8.0
# 3 s in plain Python, less than the compiler takes (random graphs)
_MOST_OPERATORS_IN_PYTHON = 2_000


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
    max_factor: float = MAX_FACTOR,
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
    room, run = budget_bytes - graph.resident_bytes, in_time(_run, left_s)
    if room < 0 or (run is not _run and graph.num_operators > _MOST_OPERATORS_IN_PYTHON):
        return None
    steps = np.zeros(int(max_factor * graph.num_operators) + 1, np.int64)
    memory = _empty_memory(graph, rule, kept)
    length = run(memory, room, int(rule), max_factor * graph.cost_s, steps)
    return steps[:length].copy() if length >= 0 else None


class _Memory(NamedTuple):
    """The graph, with one more operator that reads the outputs, the plan, and what is in memory.

    Attributes:
        cost, workspace, is_pinned, is_fixed: by operator; what fixed ones write is not evicted.
        size, producer: by value.
        possible: the last operator that may need each value.
        read_start, read, write_start, write, reuse_start, reuse: by operator, in CSR form.
        user_start, user: the operators that read each value, in CSR form.
        drop_at, stays: the plan: some operators, and for each, which values stay.
        is_held: which values are in memory.
        locks: how many computations under way need each value.
        need: the next operator that needs each value.
        again: the cost to recompute each value that was evicted.
    """

    cost: Floats
    workspace: Ints
    is_pinned: Bools
    is_fixed: Bools
    size: Ints
    producer: Ints
    possible: Ints
    read_start: Ints
    read: Ints
    write_start: Ints
    write: Ints
    reuse_start: Ints
    reuse: Ints
    user_start: Ints
    user: Ints
    drop_at: Ints
    stays: Bools
    is_held: Bools
    locks: Ints
    need: Ints
    again: Floats


def _empty_memory(graph: Graph, rule: Rule, kept: Mapping[int, Collection[int]]) -> _Memory:
    arrays, num_values = graph.arrays, len(graph.values)
    drop_at = np.array(sorted(kept), np.int64)
    stays = np.zeros((len(drop_at), num_values), np.bool_)
    for index, target in enumerate(drop_at.tolist()):
        stays[index, list(kept[target])] = True
    stays[:, list(values_always_kept(graph)) if kept else []] = True

    may_any_go = rule in (Rule.ANY, Rule.LOOSE)
    fixed = arrays.is_pinned if may_any_go else arrays.is_pinned | arrays.is_backward
    user_start, user = users(graph)

    return _Memory(
        cost=np.append(arrays.cost_s, 0.0),
        workspace=np.append(arrays.workspace_bytes, 0),
        is_pinned=np.append(arrays.is_pinned, True),
        is_fixed=np.append(fixed, True),
        size=np.where(arrays.producer >= 0, arrays.size_bytes, 0),
        producer=arrays.producer,
        possible=(
            np.full(num_values, -1) if rule is Rule.LOOSE else _last_possible_needs(graph, fixed)
        ),
        read_start=np.append(arrays.read_start, len(arrays.read) + len(arrays.output)),
        read=np.concatenate([arrays.read, arrays.output]),
        write_start=np.append(arrays.write_start, arrays.write_start[-1]),
        write=arrays.write,
        reuse_start=np.append(arrays.reuse_start, arrays.reuse_start[-1]),
        reuse=arrays.reuse,
        user_start=user_start,
        user=user,
        drop_at=drop_at,
        stays=stays,
        is_held=arrays.producer < 0,
        locks=np.zeros(num_values, np.int64),
        need=np.zeros(num_values, np.int64),
        again=np.zeros(num_values),
    )


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
def _run(memory: _Memory, room: int, rule: int, max_cost: float, steps: Ints) -> int:
    """Fills `steps` and returns their number; -1 where it gets stuck or exceeds a limit."""
    end = len(memory.cost) - 1
    held, length, spent, stage = 0, 0, 0.0, 0
    stack = np.zeros(end + 2, np.int64)

    for target in range(end + 1):
        if stage < len(memory.drop_at) and memory.drop_at[stage] == target:
            held -= _drop(memory, stage)
            stage += 1
        _find_needs(memory, target)
        stack[0], depth = target, 1

        while depth > 0:
            op = stack[depth - 1]
            missing = _first_missing(memory, op)
            _lock(memory, op, 1)
            if missing >= 0:
                if depth > end or memory.is_pinned[memory.producer[missing]]:
                    return -1
                stack[depth] = memory.producer[missing]
                depth += 1
                continue

            held = _compute(memory, op, target, stage, room, rule, held)
            if held < 0:
                return -1
            if op < end:
                spent += memory.cost[op]
                if length >= len(steps) or spent > max_cost:
                    return -1
                steps[length] = op
                length += 1

            depth -= 1
            if depth > 0:
                _lock(memory, stack[depth - 1], -1)
    return length


@inner
def _drop(memory: _Memory, stage: int) -> int:
    """Drops the values that the plan does not keep; returns their bytes."""
    dropped = 0
    for value in range(len(memory.size)):
        if memory.is_held[value] and not memory.stays[stage, value]:
            dropped += _forget(memory, value)
    return dropped


@inner
def _first_missing(memory: _Memory, op: int) -> int:
    """Returns the first value that `op` reads and that is not in memory, -1 if none."""
    for k in range(memory.read_start[op], memory.read_start[op + 1]):
        if not memory.is_held[memory.read[k]]:
            missing: int = memory.read[k]
            return missing
    return -1


@inner
def _lock(memory: _Memory, op: int, change: int) -> None:
    """Locks what `op` reads once more (+1) or once less (-1)."""
    for k in range(memory.read_start[op], memory.read_start[op + 1]):
        memory.locks[memory.read[k]] += change


@inner
def _compute(
    memory: _Memory, op: int, target: int, stage: int, room: int, rule: int, held: int
) -> int:
    """Makes room for `op`, whose inputs are in memory, and computes it; unlocks its inputs.

    Returns the bytes then held, -1 where there is no room.
    """
    size, locks, is_held = memory.size, memory.locks, memory.is_held
    first, last = memory.write_start[op], memory.write_start[op + 1]
    free = room - memory.workspace[op]

    for k in range(first, last):
        if not is_held[memory.write[k]]:
            free -= size[memory.write[k]]
        locks[memory.write[k]] += 1

    held, taken = _make_room(memory, free, held, rule, target, stage), -1
    if held > free:
        taken = _take_over(memory, op, target)
        if taken < 0 or held > free + size[taken]:
            return -1

    for k in range(first, last):
        locks[memory.write[k]] -= 1
        if not is_held[memory.write[k]]:
            is_held[memory.write[k]] = True
            held += size[memory.write[k]]
    _lock(memory, op, -1)
    return held - _forget(memory, taken) if taken >= 0 else held


@inner
def _take_over(memory: _Memory, op: int, target: int) -> int:
    """Returns the largest input that `op` may reuse in place, which loses it; -1 if none."""
    best, size = -1, memory.size
    for k in range(memory.reuse_start[op], memory.reuse_start[op + 1]):
        value = memory.reuse[k]
        is_needed = memory.user[memory.user_start[value + 1] - 1] > target
        is_lost = memory.is_pinned[memory.producer[value]] and is_needed
        if memory.locks[value] == 1 and not is_lost and (best < 0 or size[value] > size[best]):
            best = value
    return best


@inner
def _forget(memory: _Memory, value: int) -> int:
    """Takes `value` out of memory and returns its bytes.

    Records the cost to recompute it in `again`, infinite where its operator is pinned.
    """
    p = memory.producer[value]
    memory.again[value] = np.inf if memory.is_pinned[p] else _cost_with_missing(memory, p)
    memory.is_held[value] = False
    num_bytes: int = memory.size[value]
    return num_bytes


@inner
def _cost_with_missing(memory: _Memory, op: int) -> float:
    """Returns the cost of `op` and of recomputing its missing inputs."""
    cost: float = memory.cost[op]
    for k in range(memory.read_start[op], memory.read_start[op + 1]):
        if not memory.is_held[memory.read[k]]:
            cost += memory.again[memory.read[k]]
    return cost


@inner
def _find_needs(memory: _Memory, target: int) -> None:
    """Fills `need`: the next operator from `target` on that needs each value.

    Values that are needed to recompute missing ones count as well.
    """
    need, read, write = memory.need, memory.read, memory.write
    for value in range(len(need)):
        need[value] = _FAR
        if memory.producer[value] < 0:
            continue
        for k in range(memory.user_start[value], memory.user_start[value + 1]):
            if memory.user[k] >= target:
                need[value] = memory.user[k]
                break

    for op in range(target - 1, -1, -1):
        first = _FAR
        for k in range(memory.write_start[op], memory.write_start[op + 1]):
            if not memory.is_held[write[k]] and need[write[k]] < first:
                first = need[write[k]]
        if first < _FAR and not memory.is_pinned[op]:
            for k in range(memory.read_start[op], memory.read_start[op + 1]):
                need[read[k]] = min(need[read[k]], first)


@inner
def _make_room(memory: _Memory, room: int, held: int, rule: int, target: int, stage: int) -> int:
    """Evicts until at most `room` bytes are held or nothing can go; returns the bytes held."""
    if held <= room:
        return held

    for value in range(len(memory.size)):
        if _is_free_to_go(memory, value) and _is_unwanted(memory, value, target, stage):
            held -= _forget(memory, value)

    while held > room:
        best = _best_to_evict(memory, rule, target, held - room)
        if best < 0:
            break
        held -= _forget(memory, best)
        p, first = memory.producer[best], memory.need[best]
        for k in range(memory.read_start[p], memory.read_start[p + 1]):
            memory.need[memory.read[k]] = min(memory.need[memory.read[k]], first)
    return held


@inner
def _is_free_to_go(memory: _Memory, value: int) -> bool:
    """True where `value` is in memory, not resident, and not locked."""
    is_there = memory.is_held[value] and memory.producer[value] >= 0
    return bool(is_there and memory.locks[value] <= 0)


@inner
def _is_unwanted(memory: _Memory, value: int, target: int, stage: int) -> bool:
    """True where the plan drops `value` before it is needed, or nothing will need it."""
    need, drop_at = memory.need[value], memory.drop_at
    if stage < len(drop_at) and not memory.stays[stage, value] and need >= drop_at[stage]:
        return True
    is_pinned = memory.is_pinned[memory.producer[value]]
    return bool(need >= _FAR and (not is_pinned or memory.possible[value] < target))


@inner
def _best_to_evict(memory: _Memory, rule: int, target: int, missing: int) -> int:
    """Returns the value to evict first by the rule, -1 if none can go.

    `missing` is the number of bytes to free in all.
    """
    best, best_score = -1, np.inf
    for value in range(len(memory.size)):
        p, size = memory.producer[value], memory.size[value]
        if not _is_free_to_go(memory, value) or size == 0 or memory.is_fixed[p]:
            continue

        back = _cost_with_missing(memory, p)
        distance = memory.need[value] - target + 1.0
        if rule in (0, 3, 4):
            score = (back + 1e-30) / (size * distance)
        elif rule == 1:
            score = -distance - size * 1e-18
        elif rule == 5:
            score = (back + 1e-30) / min(size, missing)
        else:
            score = (back + 1e-30) / size

        if score < best_score:
            best, best_score = value, score
    return best
