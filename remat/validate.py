"""The rules of a schedule, read a second time: slow, plain, and sharing no code with the simulator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from .graph import Graph, Phase
from .schedule import Schedule


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


def validate(graph: Graph, schedule: Schedule, *, budget_bytes: int | None = None, is_free_order: bool = False) -> list[Violation]:
    """Returns every violation of the rules in `schedule`, none where the schedule is valid.

    Complexity: O(E + S) in plain Python. The memory is checked only where nothing else is wrong.
    """
    found: list[Violation] = []
    first_step: dict[int, int] = {}
    latest = -1
    last_in_region: dict[int, list[int]] = {}  # region -> its steps of first computations, per phase the span
    for step, index in enumerate(schedule.steps):
        if not 0 <= index < graph.num_operators:
            return [Violation(Rule.UNKNOWN_OPERATOR, step, f"{index} is none of 0..{graph.num_operators - 1}")]
        op = graph.operators[index]
        for parent in graph.parents_of[index]:
            if parent not in first_step:
                found.append(Violation(Rule.UNCOMPUTED_READ, step, f"{op.name} reads what {graph.operators[parent].name} writes"))
        if index in first_step:
            if op.pinned:
                found.append(Violation(Rule.PINNED, step, f"{op.name}: {op.pinned}"))
            continue
        if not is_free_order and index < latest:
            found.append(Violation(Rule.ORDER, step, f"{op.name} is first computed too late"))
        if (op.phase is Phase.FORWARD and step >= schedule.num_forward_steps) or (
            op.phase is Phase.BACKWARD and step < schedule.num_forward_steps
        ):
            found.append(Violation(Rule.FORWARD_MARK, step, f"{op.name} belongs to the {op.phase}"))
        first_step[index], latest = step, max(latest, index)
        last_in_region.setdefault(op.region * 2 + (op.phase is Phase.BACKWARD), []).append(step)
    for index in set(range(graph.num_operators)) - set(first_step):
        found.append(Violation(Rule.MISSING_OPERATOR, -1, graph.operators[index].name))
    for step, index in enumerate(schedule.steps):
        region = graph.operators[index].region
        spans = [(s[0], s[-1]) for half in (0, 1) if (s := last_in_region.get(region * 2 + half))]
        if len(last_in_region) > 2 and not any(lo <= step <= hi for lo, hi in spans):
            found.append(Violation(Rule.REGION, step, f"{graph.operators[index].name} of region {region}"))
    if not found and budget_bytes is not None:
        step, held = max(enumerate(_bytes_at(graph, schedule)), key=lambda pair: pair[1], default=(-1, graph.resident_bytes))
        if held > budget_bytes:
            found.append(Violation(Rule.BUDGET, step, f"{held:,} bytes are held, {budget_bytes:,} are allowed"))
    return found


def _bytes_at(graph: Graph, schedule: Schedule) -> list[int]:
    last_read: dict[tuple[int, int], int] = {}  # (value, step that computed it) -> last step that reads it
    computed: dict[int, int] = {}
    repeated = {index for index, count in Counter(schedule.steps).items() if count > 1}
    for step, index in enumerate(schedule.steps):
        for value in graph.operators[index].reads:
            if value in computed:
                last_read[value, computed[value]] = step
        computed |= {value: step for value in graph.operators[index].writes}
        last_read |= {(value, step): step for value in graph.operators[index].writes}
    last_read |= {(v, computed[v]): len(schedule.steps) for v in graph.outputs if v in computed}
    held, result, ends = graph.resident_bytes, [], sorted(((s, k) for k, s in last_read.items()), reverse=True)
    for step, index in enumerate(schedule.steps):
        op = graph.operators[index]
        is_idle = op.is_snapshot and not any(u in repeated for v in op.writes for u in graph.users_of[v])
        held += 0 if is_idle else sum(graph.values[v].size_bytes for v in op.writes)
        dying = {}
        while ends and ends[-1][0] == step:
            value, born = ends.pop()[1]
            owner = graph.operators[graph.producer[value]]
            is_void = owner.is_snapshot and not any(u in repeated for v in owner.writes for u in graph.users_of[v])
            dying[value, born] = 0 if is_void else graph.values[value].size_bytes
        taken = max((dying[v, b] for v, b in dying if v in op.reuses and b < step), default=0)
        result.append(held + op.workspace_bytes - taken)
        held -= sum(dying.values())
    return result
