"""The rules of a schedule, read a second time.

Slow, plain, and sharing no code with the simulator.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from remat.core.graph import Graph, Phase
from remat.core.schedule import Schedule


class Rule(StrEnum):
    """The ways in which a schedule can be wrong."""

    UNKNOWN_OPERATOR = "a step names no operator of the graph"
    MISSING_OPERATOR = "an operator is never computed"
    ORDER = "first computations leave the graph's order"
    UNCOMPUTED_READ = "an operator reads a value that was never computed"
    PINNED = "an operator that may not be computed again is computed again"
    FORWARD_MARK = "an operator is first computed on the wrong side of the forward's end"
    REGION = "an operator is computed again outside its own region"
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
    """Returns every violation of the rules.

    Memory is looked at only where nothing else is wrong. Plain Python, O(E + S log S).
    """
    found: list[Violation] = []
    first_step: dict[int, int] = {}
    newest = -1  # the last operator that was computed for the first time
    is_there = bytearray(value.is_resident for value in graph.values)
    # (region, phase) -> steps of its first and last first computation
    span: dict[tuple[int, Phase], tuple[int, int]] = {}
    for step, index in enumerate(schedule.steps):
        if not 0 <= index < graph.num_operators:
            return [
                Violation(
                    Rule.UNKNOWN_OPERATOR, step, f"{index} is none of 0..{graph.num_operators - 1}"
                )
            ]
        op = graph.operators[index]
        if not all(map(is_there.__getitem__, op.reads)):
            missing = {graph.producer[value] for value in op.reads if not is_there[value]}
            found += [
                Violation(
                    Rule.UNCOMPUTED_READ,
                    step,
                    f"{op.name} reads what {graph.operators[parent].name} writes",
                )
                for parent in sorted(missing)
            ]
        if index in first_step:
            if op.pinned:
                found.append(Violation(Rule.PINNED, step, f"{op.name}: {op.pinned}"))
            continue
        if not is_free_order and index < newest:
            found.append(Violation(Rule.ORDER, step, f"{op.name} is first computed too late"))
        if (op.phase is Phase.FORWARD) != (step < schedule.num_forward_steps):
            found.append(Violation(Rule.FORWARD_MARK, step, f"{op.name} belongs to the {op.phase}"))
        first_step[index], newest = step, index
        for value in op.writes:
            is_there[value] = True
        span[op.region, op.phase] = (span.get((op.region, op.phase), (step, step))[0], step)
    for index in sorted(set(range(graph.num_operators)) - set(first_step)):
        found.append(Violation(Rule.MISSING_OPERATOR, -1, graph.operators[index].name))
    halves: dict[int, list[tuple[int, int]]] = {}
    for (region, _), steps in span.items():
        halves.setdefault(region, []).append(steps)
    for step, index in enumerate(schedule.steps if len(halves) > 1 else ()):
        region = graph.operators[index].region
        if not any(low <= step <= high for low, high in halves.get(region, ())):
            found.append(
                Violation(Rule.REGION, step, f"{graph.operators[index].name} of region {region}")
            )
    if not found and budget_bytes is not None:
        held = _bytes_at(graph, schedule) or [graph.resident_bytes]
        if max(held) > budget_bytes:
            found.append(
                Violation(
                    Rule.BUDGET,
                    held.index(max(held)),
                    f"{max(held):,} bytes are held, {budget_bytes:,} are allowed",
                )
            )
    return found


def _bytes_at(graph: Graph, schedule: Schedule) -> list[int]:
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
