"""The Checkmate MILP as plain arrays: which values to keep, which operators to recompute, by stage.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys
2020, equations (1)-(9). Legend, with the paper's letters:

    R[t, i]  operator i is computed (again) in stage t; R[t, t] = 1, and i < t elsewhere
    S[t, v]  value v is kept across the start of stage t
    U, FREE  memory after each computation and what it frees: eliminated here (no big-M). The memory
             of the original computation is linear in S of the next stage, since nothing follows it
             in its stage; the memory while recomputing is added per moment, where it is needed

There are two ways to account for the memory at a moment of recomputation:

- `add_moment` holds for every schedule in fixed order: it assumes no order and no multiplicity
  inside a stage. The model with any number of these rows is a relaxation: its optimum is a bound.
- `add_ordered_stage` is the paper's: in a stage each operator is recomputed at most once, in the
  graph's order. Schedules outside that class can be better (see `stage_order`), so it is a
  restriction.

Differences from the paper, all to match the simulator (`remat.core.schedule`): values die at their
last use, also those without a user in the stage; several outputs per operator; in-place operators;
workspace; snapshots. Memory rows are divided by the capacity, costs by `unit_s`.
Complexity: O(n (n + E)) columns and nonzeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set

import numpy as np

from remat.core.errors import SolverError
from remat.solvers.checkmate.stage_form import StageForm
from remat.solvers.lp.arrays import ONE, ZERO, ModelArrays

MAX_NONZEROS = 2_000_000  # of the model; larger ones are refused; a round number, not measured
# where the total cost exceeds it, costs are scaled to a total of 1e4, not to whole numbers
_LARGEST_EXACT_TOTAL = 1e7

Terms = list[tuple[int, float]]


class CheckmateModel:
    """The growing model of one graph and budget.

    Attributes:
        form: the problem.
        recompute: [t, i] -> column of R, or `ZERO`.
        keep: [t, v] -> column of S, or `ZERO`.
        needed: [v] -> `ONE`, or the column that says whether a snapshot is needed.
        unit_s: seconds per unit of the objective.
        is_integral: True where all costs are multiples of `unit_s`.
    """

    def __init__(self, form: StageForm) -> None:
        self.form = form
        self.unit_s, self.is_integral = _cost_unit(form.cost_s)

        self.costs: list[float] = []
        self.uppers: list[float] = []
        self.is_integer: list[bool] = []
        self.row_terms: list[dict[int, float]] = []
        self.row_upper: list[float] = []

        self.recompute = np.full((form.num_operators, form.num_operators), ZERO)
        self.keep = np.full((form.num_operators + 1, form.num_values), ZERO)
        self.needed = [ONE] * form.num_values
        self.held_through: dict[tuple[int, int], int] = {}
        self.extra_cost: dict[int, int] = {}
        self._add_columns()

    def _add_columns(self) -> None:
        """Adds R and S where they can be useful; all others are zero (1d-1f and more)."""
        for stage, operator in np.argwhere(self.form.may_recompute).tolist():
            self.recompute[stage, operator] = self.add_column(self.form.cost_s[operator])
        for stage, value in np.argwhere(self.form.may_keep).tolist():
            self.keep[stage, value] = self.add_column()
        for value in np.flatnonzero(self.form.is_snapshot).tolist():
            self.needed[value] = self.add_column()

    def add_column(
        self, cost_s: float = 0.0, *, is_integer: bool = True, upper: float = 1.0
    ) -> int:
        """Returns a new column between 0 and `upper`."""
        self.costs.append(cost_s / self.unit_s)
        self.uppers.append(upper)
        self.is_integer.append(is_integer)
        return len(self.costs) - 1

    def add_row(self, terms: Iterable[tuple[int, float]], upper: float = 0.0) -> None:
        """Adds `terms <= upper` unless it always holds.

        Constants move to the right side, and repeated columns are summed.
        """
        row: dict[int, float] = {}
        for column, factor in terms:
            if column == ONE:
                upper -= factor
            elif column != ZERO:
                row[column] = row.get(column, 0.0) + factor

        if sum(factor for factor in row.values() if factor > 0) > upper:
            self.row_terms.append(row)
            self.row_upper.append(upper)

    def add_memory_row(self, terms: Terms, fixed_bytes: int) -> None:
        """Adds `fixed + terms <= capacity`, factors in bytes, divided by the capacity."""
        capacity = max(self.form.capacity_bytes, 1)
        self.add_row(
            ((c, factor / capacity) for c, factor in terms if factor),
            (self.form.capacity_bytes - fixed_bytes) / capacity,
        )

    def arrays(self) -> ModelArrays:
        """Returns the model as it is now."""
        lengths = [len(row) for row in self.row_terms]
        return ModelArrays(
            cost=np.array(self.costs, np.float64),
            offset=math.fsum(self.form.cost_s) / self.unit_s,
            column_upper=np.array(self.uppers, np.float64),
            is_integer=np.array(self.is_integer, np.bool_),
            row_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
            index=np.fromiter((c for row in self.row_terms for c in row), np.int32, sum(lengths)),
            value=np.fromiter(
                (f for row in self.row_terms for f in row.values()), np.float64, sum(lengths)
            ),
            row_upper=np.array(self.row_upper, np.float64),
        )

    def through(self, stage: int, value: int) -> Terms:
        """Returns the term H[t, v]: 1 where `value` is held from the stage's start to its original.

        H >= S[t+1, v] - R[t, p], or H = 1 - R[t, p] where the original reads v. It is zero where v
        is recomputed.
        """
        again = int(self.recompute[stage, self.form.producer[value]])
        end = (
            self.needed[value]
            if value in self.form.reads[stage]
            else int(self.keep[stage + 1, value])
        )
        if again == ZERO or end in (ZERO, ONE):
            return [(end, 1.0)] + ([(again, -1.0)] if end == ONE else [])

        key = (stage, value)
        if key not in self.held_through:
            self.held_through[key] = self.add_column(is_integer=False)
            self.add_row([(end, 1.0), (again, -1.0), (self.held_through[key], -1.0)])
        return [(self.held_through[key], 1.0)]

    def taken_over(self, operator: int, now: int, after: Callable[[int], int]) -> Terms:
        """Returns the terms -m_v D[v]: the memory of one dying input, which is reused in place.

        D[v] <= 1 - held after, D <= computed now, sum D <= 1.
        """
        candidates = [
            v for v in self.form.reuses[operator] if self.form.size_bytes[v] and after(v) != ONE
        ]
        chosen = [(v, self.add_column(is_integer=False)) for v in candidates]

        for value, column in chosen:
            self.add_row([(column, 1.0), (after(value), 1.0)], 1.0)
            self.add_row([(column, 1.0), (now, -1.0)])
            self.add_row([(column, 1.0), (self.needed[value], -1.0)])
        self.add_row([(column, 1.0) for _, column in chosen], 1.0)
        return [(column, -self.form.size_bytes[value]) for value, column in chosen]


def stage_model(form: StageForm) -> CheckmateModel:
    """Returns the model with all rows but the moments of recomputation: a relaxation.

    Raises:
        SolverError: the model would have more than `MAX_NONZEROS` nonzeros.
    """
    nonzeros = form.num_nonzeros()
    if nonzeros > MAX_NONZEROS:
        raise SolverError(
            f"the Checkmate MILP of this graph ({form.num_steps:,} operators) has about "
            f"{nonzeros:,} nonzeros; "
            f"more than {MAX_NONZEROS:,} are too many for a MILP solver; use solver='auto'"
        )

    model = CheckmateModel(form)
    add_dependencies(model)
    add_retention(model)
    add_snapshot_needs(model)
    for stage in range(form.num_operators):
        add_original_memory(model, stage)
    return model


def add_dependencies(model: CheckmateModel) -> None:
    """Adds R[t, j] <= R[t, i] + S[t, v] for every value v of i that j reads (paper: 1b)."""
    form = model.form
    for stage in range(form.num_operators):
        for operator in [*np.flatnonzero(form.may_recompute[stage]), stage]:
            for value in form.reads[operator]:
                now = (
                    model.needed[value]
                    if operator == stage
                    else int(model.recompute[stage, operator])
                )
                again = int(model.recompute[stage, form.producer[value]])
                model.add_row([(now, 1.0), (again, -1.0), (int(model.keep[stage, value]), -1.0)])


def add_retention(model: CheckmateModel) -> None:
    """Adds S[t+1, v] <= R[t, i] + S[t, v] for every value v of an i < t (paper: 1c)."""
    form = model.form
    for stage in range(form.num_operators):
        for value in np.flatnonzero(form.may_keep[stage + 1]):
            producer = form.producer[value]
            if producer < stage:
                again = int(model.recompute[stage, producer])
                model.add_row(
                    [
                        (int(model.keep[stage + 1, value]), 1.0),
                        (again, -1.0),
                        (int(model.keep[stage, value]), -1.0),
                    ]
                )


def add_snapshot_needs(model: CheckmateModel) -> None:
    """Adds R[t, j] <= Z[v] for every snapshot v that j reads.

    A snapshot takes memory where a reader is recomputed.
    """
    form = model.form
    for value in np.flatnonzero(form.is_snapshot):
        for reader in form.users[value]:
            for stage in np.flatnonzero(form.may_recompute[:, reader]):
                model.add_row(
                    [(int(model.recompute[stage, reader]), 1.0), (model.needed[value], -1.0)]
                )


def add_original_memory(model: CheckmateModel, stage: int) -> None:
    """Adds m(writes) + m(reads) + workspace + sum of m_v S[t+1, v] over the others <= B.

    This is (5)-(6) of the paper at k = t. It is exact: the original computation ends its stage, so
    what is kept into the next one is held while it runs.
    """
    form = model.form
    own = {*form.reads[stage], *form.writes[stage]}

    terms: Terms = [(model.needed[v], form.size_bytes[v]) for v in own]
    terms += [
        (int(model.keep[stage + 1, v]), form.size_bytes[v])
        for v in np.flatnonzero(form.may_keep[stage + 1])
        if v not in own
    ]
    terms += model.taken_over(stage, ONE, lambda v: int(model.keep[stage + 1, v]))
    model.add_memory_row(terms, form.workspace_bytes[stage])


def add_moment(model: CheckmateModel, stage: int, operator: int) -> None:
    """Adds (m(writes) + m(reads) + workspace) R[t, j] + sum of m_v H[t, v] over the others <= B.

    H (see `CheckmateModel.through`) says which values are held through the whole stage, whatever
    the order and number of its recomputations. The row is valid for every schedule.
    """
    form = model.form
    own = {*form.reads[operator], *form.writes[operator]}
    terms: Terms = [(int(model.recompute[stage, operator]), moment_bytes(form, operator))]

    for value in {
        *np.flatnonzero(form.may_keep[stage] & form.may_keep[stage + 1]),
        *form.reads[stage],
    } - own:
        if form.size_bytes[value] and form.producer[value] < stage:
            terms += [
                (column, factor * form.size_bytes[value])
                for column, factor in model.through(stage, int(value))
            ]

    model.add_memory_row(terms, 0)


def moment_bytes(form: StageForm, operator: int) -> int:
    """Returns the least memory in which the operator can be recomputed, snapshots included."""
    return form.working_bytes(operator) + sum(
        form.size_bytes[v] for v in form.reads[operator] if form.is_snapshot[v]
    )


def add_stage_cut(
    model: CheckmateModel,
    stage: int,
    kept: Set[int],
    wanted: Set[int],
    snapshots: Set[int],
    cost_s: float,
) -> None:
    """Adds the cut sum of c_i R[t, i] + E[t] >= f (1 - values kept beyond A - values of B missing).

    It is valid where the recomputations of stage t cost at least f (`cost_s`) for every schedule
    that starts the stage with no values beyond A (`kept`), ends it with all of B (`wanted`) and
    needs exactly `snapshots`; an infinite f forbids that. E[t] is what a stage costs beyond one
    computation of each R. A logic-based Benders cut (Hooker and Ottosson 2003).
    """
    form = model.form
    away: Terms = [
        (int(model.keep[stage, v]), 1.0)
        for v in np.flatnonzero(form.may_keep[stage])
        if v not in kept
    ]
    away += [term for v in wanted for term in ((ONE, 1.0), (int(model.keep[stage + 1, v]), -1.0))]

    away += [
        (ONE, 1.0) if v in snapshots else (ZERO, 0.0) for v in np.flatnonzero(form.is_snapshot)
    ]
    away += [
        (model.needed[v], -1.0 if v in snapshots else 1.0) for v in np.flatnonzero(form.is_snapshot)
    ]

    if math.isinf(cost_s):
        model.add_row([(column, -factor) for column, factor in away], -1.0)
        return

    if stage not in model.extra_cost:
        model.extra_cost[stage] = model.add_column(model.unit_s, is_integer=False, upper=math.inf)
    scaled = cost_s / model.unit_s
    paid: Terms = [(model.extra_cost[stage], -1.0)]
    for operator in np.flatnonzero(form.may_recompute[stage]):
        paid.append((int(model.recompute[stage, operator]), -form.cost_s[operator] / model.unit_s))
    model.add_row([*paid, *((column, -scaled * factor) for column, factor in away)], -scaled)


def _cost_unit(cost_s: Sequence[float]) -> tuple[float, bool]:
    total = math.fsum(cost_s)
    if 0 < total < 2**53 and all(cost == int(cost) for cost in cost_s):
        unit = math.gcd(*map(int, cost_s))
        if total / unit <= _LARGEST_EXACT_TOTAL:
            return float(unit), True
    return (total / 1e4, False) if total > 0 else (1.0, True)
