"""A slow second implementation of a schedule's rules; shares no code with the simulator."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from remat.core.graph import Graph
from remat.core.operators import Phase
from remat.core.schedule import Schedule


class Rule(StrEnum):
    """The ways in which a schedule can be wrong."""

    UNKNOWN_OPERATOR = "a step names no operator of the graph"
    MISSING_OPERATOR = "an operator is never computed"
    ORDER = "first computations leave the graph's order"
    UNCOMPUTED_READ = "an operator reads a value that was never computed"
    PINNED = "an operator that must not be recomputed is recomputed"
    FORWARD_MARK = "an operator is first computed on the wrong side of the forward's end"
    REGION = "an operator is recomputed outside its own region"
    BUDGET = "the memory exceeds the budget"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: which, at which step, and in words."""

    rule: Rule
    step: int
    detail: str


def validate(
    graph: Graph,
    schedule: Schedule,
    *,
    budget_bytes: int | None = None,
    is_free_order: bool = False,
) -> list[Violation]:
    """Returns every violation of the rules; memory is checked only if nothing else is wrong.

    A step that is not an operator of the graph is reported alone. Plain Python, O(E + S log S).
    """
    if unknown := _unknown_operator(graph, schedule):
        return [unknown]

    found = [
        *_broken_steps(graph, schedule, is_free_order=is_free_order),
        *_missing_operators(graph, schedule),
        *_outside_regions(graph, schedule),
    ]

    if not found and budget_bytes is not None:
        held = _bytes_at(graph, schedule) or [graph.resident_bytes]
        if max(held) > budget_bytes:
            text = f"{max(held):,} bytes are held, {budget_bytes:,} are allowed"
            found.append(Violation(Rule.BUDGET, held.index(max(held)), text))
    return found


def _unknown_operator(graph: Graph, schedule: Schedule) -> Violation | None:
    count = graph.num_operators
    for step, index in enumerate(schedule.steps):
        if not 0 <= index < count:
            text = f"{index} is not an operator; operators are 0..{count - 1}"
            return Violation(Rule.UNKNOWN_OPERATOR, step, text)
    return None


def _broken_steps(graph: Graph, schedule: Schedule, *, is_free_order: bool) -> Iterator[Violation]:
    """Yields what is wrong with a step, given the steps before it."""
    is_computed = bytearray(graph.num_operators)
    newest = -1  # the last operator that was computed for the first time
    is_there = bytearray(value.is_resident for value in graph.values)

    for step, index in enumerate(schedule.steps):
        op = graph.operators[index]
        if not all(map(is_there.__getitem__, op.reads)):
            missing = {graph.producer[value] for value in op.reads if not is_there[value]}
            for parent in sorted(missing):
                text = f"{op.name} reads a value of {graph.operators[parent].name}"
                yield Violation(Rule.UNCOMPUTED_READ, step, text)

        if is_computed[index]:
            if op.pinned:
                yield Violation(Rule.PINNED, step, f"{op.name}: {op.pinned}")
            continue

        if not is_free_order and index < newest:
            yield Violation(Rule.ORDER, step, f"{op.name} is first computed too late")
        if (op.phase is Phase.FORWARD) != (step < schedule.num_forward_steps):
            yield Violation(Rule.FORWARD_MARK, step, f"{op.name} belongs to the {op.phase}")

        is_computed[index], newest = True, index
        for value in op.writes:
            is_there[value] = True


def _missing_operators(graph: Graph, schedule: Schedule) -> Iterator[Violation]:
    for index in sorted(set(range(graph.num_operators)) - set(schedule.steps)):
        yield Violation(Rule.MISSING_OPERATOR, -1, graph.operators[index].name)


def _outside_regions(graph: Graph, schedule: Schedule) -> Iterator[Violation]:
    """Yields steps outside their region's forward and backward, if there are several regions.

    Each half of a region spans from its earliest to its latest first computation.
    """
    if len({graph.operators[index].region for index in schedule.steps}) < 2:
        return

    seen: set[int] = set()
    halves: dict[int, dict[Phase, tuple[int, int]]] = {}  # region -> phase -> first and last step
    for step, index in enumerate(schedule.steps):
        if index not in seen:
            seen.add(index)
            op = graph.operators[index]
            half = halves.setdefault(op.region, {})
            half[op.phase] = (half.get(op.phase, (step, step))[0], step)

    for step, index in enumerate(schedule.steps):
        op = graph.operators[index]
        if not any(low <= step <= high for low, high in halves[op.region].values()):
            yield Violation(Rule.REGION, step, f"{op.name} of region {op.region}")


def _bytes_at(graph: Graph, schedule: Schedule) -> list[int]:
    """Returns the memory while each step runs, resident values included."""
    repeated = {index for index, count in Counter(schedule.steps).items() if count > 1}
    snapshots = {value for op in graph.operators if op.is_snapshot for value in op.writes}
    is_idle = {
        value for value in snapshots if not any(user in repeated for user in graph.users_of[value])
    }
    size = [
        0 if value in is_idle or v.is_resident else v.size_bytes
        for value, v in enumerate(graph.values)
    ]

    born, last = [-1] * len(size), [-1] * len(size)  # of each value's latest computation
    dying: dict[int, list[tuple[int, int]]] = {}  # step -> (value, step that computed it)
    for step, index in enumerate(schedule.steps):
        for value in graph.operators[index].reads:
            last[value] = step
        for value in graph.operators[index].writes:
            if born[value] >= 0:
                dying.setdefault(last[value], []).append((value, born[value]))
            born[value] = last[value] = step

    for value in graph.outputs:
        last[value] = len(schedule.steps)
    for value, step in enumerate(born):
        if step >= 0:
            dying.setdefault(last[value], []).append((value, step))

    held, result = graph.resident_bytes, []
    for step, index in enumerate(schedule.steps):
        op, ending, taken = graph.operators[index], dying.get(step, ()), 0
        for value in op.writes:
            held += size[value]
        if op.reuses:
            reused = (size[v] for v, start in ending if v in op.reuses and start < step)
            taken = max(reused, default=0)
        result.append(held + op.workspace_bytes - taken)
        for value, _ in ending:
            held -= size[value]

    return result
