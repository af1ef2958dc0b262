"""The inside of a stage: in which order to recompute, and the least cost of that.

The stage models say which values are in memory when a stage starts (*kept*), which must be when it
ends (*wanted*), and which operators are recomputed in between. The memory while recomputing depends
on their order, and an operator may have to run twice in one stage. Example: t reads a and b, b is
computed from c, and a is as large as c; the graph's order holds a, c, b at once, while c, b, a
holds less.

The search is A* over sets of held values (bit masks) and exact where it ends: it returns the least
cost of a stage over all sequences, or proves that there is none. It is exponential in the worst
case (rematerialization inside one stage is a pebble game) and stops at `max_states`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remat.solvers.checkmate.stage_form import StageForm


@dataclass(frozen=True)
class StageTask:
    """The task of one stage: get from `kept` to the original operator and `wanted`.

    Attributes:
        stage: the original operator that ends it.
        kept: values in memory when it starts.
        wanted: values, written before the stage, in memory when it ends.
        candidates: operators that may be recomputed in it.
        snapshots: snapshots that take memory and may be read by recomputations.
    """

    stage: int
    kept: frozenset[int]
    wanted: frozenset[int]
    candidates: frozenset[int]
    snapshots: frozenset[int]


class StageResult(NamedTuple):
    """The recomputations of a stage in order, and their cost.

    The cost is infinite where the task is proved impossible, NaN where it is unknown.
    """

    cost_s: float
    steps: tuple[int, ...]


IMPOSSIBLE = StageResult(math.inf, ())
UNKNOWN = StageResult(math.nan, ())


def cheapest_stage(form: StageForm, task: StageTask, *, max_states: int) -> StageResult:
    """Returns the cheapest sequence of recomputations that solves `task` within the capacity."""
    if original_bytes(form, task) > form.capacity_bytes:
        return IMPOSSIBLE
    if goal_of(form, task) <= task.kept:
        return StageResult(0.0, ())
    return _Search(form, task).run(max_states)


def goal_of(form: StageForm, task: StageTask) -> frozenset[int]:
    """Returns the values that must be in memory when the original operator runs."""
    read = (v for v in form.reads[task.stage] if not form.is_snapshot[v] or v in task.snapshots)
    return task.wanted.union(read)


def original_bytes(form: StageForm, task: StageTask) -> int:
    """Returns the memory while the original operator of the stage runs."""
    written = {v for v in form.writes[task.stage] if not form.is_snapshot[v] or v in task.snapshots}
    held = sum(form.size_bytes[v] for v in goal_of(form, task) | written)
    dying = [
        v
        for v in form.reuses[task.stage]
        if v not in task.wanted and (not form.is_snapshot[v] or v in task.snapshots)
    ]
    return held + form.workspace_bytes[task.stage] - form.reusable_bytes(task.stage, dying)


def is_sequence_fit(form: StageForm, task: StageTask, steps: Sequence[int]) -> bool:
    """Returns whether recomputing `steps` in this order solves `task` within the capacity."""
    if original_bytes(form, task) > form.capacity_bytes:
        return False

    alive = set(goal_of(form, task))
    for operator in reversed(steps):
        during = alive.union(form.reads[operator], form.writes[operator])
        taken = [v for v in form.reuses[operator] if v not in alive]
        held = sum(_size(form, task, v) for v in during) + form.workspace_bytes[operator]
        if held - form.reusable_bytes(operator, taken) > form.capacity_bytes:
            return False
        alive = alive.difference(form.writes[operator]).union(form.reads[operator])
    return alive <= task.kept


def _size(form: StageForm, task: StageTask, value: int) -> int:
    return 0 if form.is_snapshot[value] and value not in task.snapshots else form.size_bytes[value]


class _Move(NamedTuple):
    operator: int
    cost_s: float
    reads: int
    writes: int
    room: int  # capacity less workspace
    reuses: tuple[tuple[int, int], ...]  # (bit, bytes saved), (0, 0) first


class _Search:
    """A* over masks of held values; values that the stage cannot use have no bit.

    Holding more is never worse, as dropping is free. So values are dropped only where a computation
    needs the room, and no more than it needs.
    """

    def __init__(self, form: StageForm, task: StageTask) -> None:
        goal = goal_of(form, task)
        operators = _reachable(form, task)
        values = {v for j in operators for v in (*form.reads[j], *form.writes[j])} | goal

        self.bit = {v: 1 << i for i, v in enumerate(sorted(values))}
        self.size = {self.bit[v]: _size(form, task, v) for v in values}
        self.goal = self._mask(goal)
        self.moves = [self._move(form, j) for j in sorted(operators)]
        self.maker = {bit: move for move in self.moves for bit in _bits(move.writes)}
        self.useful = self.goal | self._mask(v for j in operators for v in form.reads[j])
        self.start = self._mask(task.kept & values) & self.useful

        # nothing in the stage recomputes these, so they are never dropped
        self.fixed = (
            self.goal & self.start & ~self._mask(v for j in operators for v in form.writes[j])
        )

    def _mask(self, values: Iterable[int]) -> int:
        return sum(self.bit[value] for value in set(values))

    def _move(self, form: StageForm, operator: int) -> _Move:
        reuses = tuple((self.bit[v], self.size[self.bit[v]]) for v in form.reuses[operator])
        return _Move(
            operator,
            form.cost_s[operator],
            self._mask(form.reads[operator]),
            self._mask(form.writes[operator]),
            form.capacity_bytes - form.workspace_bytes[operator],
            ((0, 0), *reuses),
        )

    def run(self, max_states: int) -> StageResult:
        """Returns the cheapest sequence, or `UNKNOWN` after `max_states` states."""
        num_seen = 0
        best: dict[int, float] = {self.start: 0.0}
        came: dict[int, tuple[int, int]] = {}
        queue = [(self._least_rest(self.start), 0.0, self.start)]
        done: set[int] = set()

        while queue:
            _, _, held = heapq.heappop(queue)
            if held in done:
                continue
            done.add(held)

            if self.goal & ~held == 0:
                return StageResult(best[held], self._path(came, held))
            for state, move in self._successors(held):
                num_seen += 1
                if num_seen > max_states:
                    return UNKNOWN

                reached_s = best[held] + move.cost_s
                if (
                    reached_s < best.get(state, math.inf)
                    and (rest_s := self._least_rest(state)) < math.inf
                ):
                    best[state] = reached_s
                    came[state] = (held, move.operator)
                    heapq.heappush(queue, (reached_s + rest_s, -reached_s, state))

        return IMPOSSIBLE

    def _least_rest(self, held: int) -> float:
        """Returns a lower bound on the remaining cost: all that is missing is computed once."""
        missing, operators, rest_s = self.goal & ~held, 0, 0.0
        while missing:
            move = self.maker.get(missing & -missing)
            if move is None:
                return math.inf

            rest_s += move.cost_s
            operators |= move.writes
            missing = (missing | move.reads & ~held) & ~operators
        return rest_s

    def _successors(self, held: int) -> Iterator[tuple[int, _Move]]:
        held_bytes = self._bytes(held)
        for move in self.moves:
            if move.reads & ~held or not move.writes & ~held:
                continue

            after_bytes = held_bytes + self._bytes(move.writes & ~held)
            for taken, saved in move.reuses:
                if taken & self.fixed:
                    continue
                droppable = held & ~(self.fixed | move.reads | move.writes)
                for dropped in self._smallest_drops(droppable, after_bytes - saved - move.room):
                    yield ((held | move.writes) & ~(taken | dropped)) & self.useful, move

    def _smallest_drops(self, droppable: int, excess: int) -> Iterator[int]:
        """Yields the minimal sets of at least `excess` bytes."""
        if excess <= 0:
            yield 0
            return

        bits = sorted(
            (bit for bit in _bits(droppable) if self.size[bit]),
            key=self.size.__getitem__,
            reverse=True,
        )

        left = [0] * (len(bits) + 1)
        for i in range(len(bits) - 1, -1, -1):
            left[i] = left[i + 1] + self.size[bits[i]]

        stack = [(0, 0, excess)]
        while stack:
            i, dropped, wanted = stack.pop()
            if left[i] < wanted:
                continue

            stack.append((i + 1, dropped, wanted))
            if self.size[bits[i]] >= wanted:
                yield dropped | bits[i]
            else:
                stack.append((i + 1, dropped | bits[i], wanted - self.size[bits[i]]))

    def _bytes(self, mask: int) -> int:
        return sum(self.size[bit] for bit in _bits(mask))

    def _path(self, came: dict[int, tuple[int, int]], state: int) -> tuple[int, ...]:
        steps = []
        while state in came:
            state, operator = came[state]
            steps.append(operator)
        return tuple(reversed(steps))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


def _reachable(form: StageForm, task: StageTask) -> set[int]:
    """Returns the candidates that can contribute to the goal, through other candidates."""
    wanted = set(goal_of(form, task))
    found: set[int] = set()

    for operator in sorted(task.candidates, reverse=True):
        is_readable = all(
            not form.is_snapshot[v] or v in task.snapshots for v in form.reads[operator]
        )
        if is_readable and not wanted.isdisjoint(form.writes[operator]):
            found.add(operator)
            wanted.update(form.reads[operator])
    return found
