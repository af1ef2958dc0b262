"""Prices for memory: the window model's relaxation by minimum cuts, in near-linear time.

With the memory rows (6) of the window model over forward and backward (`window`) moved into the
objective at prices u_v, what is left is a minimum cut (`min_cut`), whatever the prices. For every
u >= 0

    L(u) = sum c_j + min over cuts (R, S) of [ sum c_j R_j + sum_v u_v (row_v(R, S) - B) ]

is a lower bound on every schedule of the fixed order, and the best of these equals the bound of the
model's linear relaxation. Prices are found by Kelley's cutting planes: a small linear program over
the cuts so far proposes the next prices, and its duals mix the cuts into a point of the relaxation.
The memory rows that this point violates most are added.

The point mixes a few cuts, some of which (*heavy*) need more memory than the budget and some
(*light*) less. A schedule is spliced from a heavy and a light one: the first or last operators
follow the heavy cut, as many as fit, and the rest follow the light one. Where layers repeat, a cut
is the same in each of them, so it only remains to find how many layers follow which cut. Where even
the lightest cut exceeds the budget because of its transients, prices are found for a smaller
budget.

Complexity: some ten cuts of O(V + E) each and as many simulations: seconds for 100,000 operators,
where the simplex method takes minutes. Sources: Everett (1963) and Geoffrion (1974) for the bound,
Kelley (1960) for the prices; the use of closures for keeping or recomputing is known, the memory
rows and the splicing are this package's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers.bounds.lazy_rows import TOO_NEAR
from remat.solvers.bounds.window import WindowModel
from remat.solvers.core.accounting import Bools, Floats
from remat.solvers.core.interrupt import is_past
from remat.solvers.core.on_demand import forward_length, steps_on_demand
from remat.solvers.lp.linear import Program
from remat.solvers.lp.min_cut import Cut, MinCut

# Measured together, not one by one, on a graph of 70,000 operators; which one is not on record.
_MOST_CUTS = 60  # for each share of the budget; some ten are usual
_PRECISION = 1e-5  # of the step's cost; prices this close to the best are good enough
_ROWS_PER_ROUND = 3  # rows added after each search for prices
_VIOLATED = 1e-4  # of the budget; rows violated by less are not added
_HIGHEST_PRICE = 1e3  # limit on a price: costs of the step per whole budget
HOPELESS = 10.0  # extra cost, in costs of the step, that no schedule reaches
_SAFETY = 1e-9  # of the bound, for errors in sums of floats
_MOST_MIXED = 6  # cuts that are tried as schedules
_FINEST_SPLICE = 500  # the search for a splice is exact to 1 / 500 of the forward
_MOST_SHARES = 6  # shares of the budget that prices are found for
_STEP, _LEAST_STEP = 0.995, 0.01  # factor on a share that failed; smallest distance of two shares
_LEAST_RATIO = 0.5  # a share that failed is at most halved, before `_STEP`; not tuned
_PROGRAM_LIMIT_S = 10.0  # seconds for one linear program over the cuts; round, not measured


@dataclass(frozen=True, slots=True)
class _Point:
    """A minimum cut with its cost and memory.

    Attributes:
        cut: what is recomputed in the backward, and what is kept.
        extra: cost of its recomputations, as a multiple of the step's cost.
        usage: left sides of the memory rows by operator, as multiples of the budget.
    """

    cut: Cut
    extra: float
    usage: Floats


@dataclass(frozen=True, slots=True)
class _Row:
    """A memory row divided by the budget: coefficients of R and kept values, and a constant."""

    on_again: Floats
    on_held: Floats
    constant: float


class Lagrangian:
    """Prices, cuts and bounds for one graph and budget."""

    def __init__(self, graph: Graph, *, budget_bytes: int) -> None:
        """Builds the model and the network; nothing is solved yet.

        Graphs without a backward have no prices (`is_empty`).
        """
        self.graph, self.budget_bytes = graph, budget_bytes
        self.first = forward_length(graph)
        self.bound_s = graph.cost_s
        self.is_empty = not 0 < self.first < graph.num_operators
        if self.is_empty:
            return

        self._forward, self._backward = (0, self.first), (self.first, graph.num_operators)
        windows = (self._forward, self._backward)
        self._model = WindowModel(graph, windows, priced=windows, budget_bytes=budget_bytes)
        self._network = MinCut(graph, self._model.accounting, self.first)
        self._points: list[_Point] = []
        self._rows: dict[int, _Row] = {}
        self._mix: Floats = np.zeros(0)

    @property
    def num_cuts(self) -> int:
        """Minimum cuts found so far."""
        return 0 if self.is_empty else len(self._points)

    def raise_bound(self, *, deadline: float) -> float:
        """Returns the best lower bound on every schedule's cost found by the deadline."""
        if not self.is_empty:
            self._solve(1.0, deadline)
        return self.bound_s

    def schedules(self, *, deadline: float) -> Iterator[list[int]]:
        """Yields schedules until `deadline`, within the budget or not; call `raise_bound` first.

        The lightest cut's schedule may exceed the budget because of its transients. It is then
        yielded as a start for a search, and prices are found for a smaller budget: reduced by the
        ratio of budget to peak, then raised halfway to the last budget that failed.
        """
        share, too_much = 1.0, 1.0
        for _ in range(0 if self.is_empty else _MOST_SHARES):
            used = self._used()
            if not used:
                return

            peak = self._peak_bytes(used[-1])
            if peak <= self.budget_bytes:
                yield from self._spliced(used, deadline)
                share, fits = (share + too_much) / 2, share
                if too_much - fits < _LEAST_STEP:
                    return
            else:
                yield self._keeping(used[-1].cut, used[-1].cut, 0, True)
                share, too_much = share * max(self.budget_bytes / peak, _LEAST_RATIO) * _STEP, share

            if is_past(deadline):
                return
            if not self._solve(share, deadline):
                return

    def _solve(self, share: float, deadline: float) -> bool:
        """Finds prices for `share` of the budget; only a share of 1 gives a bound.

        Returns False where no schedule can fit that share.
        """
        if not self._points:
            self._add_row(self.first - 1)
            self._price({})

        for _ in range(_MOST_CUTS):
            prices, promised = self._master(share)
            value = self._price(prices, share)
            if value >= promised - _PRECISION or is_past(deadline):
                self._mix = self._mixed(share)
                if is_past(deadline) or not self._add_violated(share):
                    break

            if value > HOPELESS:
                return False
        return True

    def _add_row(self, v: int) -> None:
        """Adds the memory row of operator `v`."""
        model = self._model
        window = self._forward if v < self.first else self._backward
        coefficient, constant = model.memory_row(window, v)
        held = model.values_at(model.kept_columns(self.first), coefficient)
        if window == self._forward:
            held = held + model.values_at(model.through[window], coefficient)
        on_again = model.values_at(model.again[window], coefficient)
        self._rows[v] = _Row(on_again / model.budget, held / model.budget, constant / model.budget)

    def _price(self, prices: dict[int, float], share: float = 1.0) -> float:
        """Adds the cut at `prices`; returns L less the step's cost, in costs of the step."""
        cost = self.graph.arrays.cost_s / max(self.graph.cost_s, 1e-300)
        weight, before, price, at_end = (
            cost.copy(),
            cost.copy(),
            np.zeros(len(self.graph.values)),
            np.zeros(len(self.graph.values)),
        )

        constant = 0.0
        for v, each in prices.items():
            row, is_forward = self._rows[v], v < self.first
            (before if is_forward else weight)[:] += each * row.on_again
            (price if v < self.first - 1 else at_end)[:] += each * row.on_held
            constant += each * (row.constant - self._model.relative_limit * share)

        before[self._model.again[self._forward] < 0] = math.inf
        cut = self._network.cut(weight, at_end + price * self._share_paid(before, price))
        is_before = (before < 0) | (self._by_producer(np.where(cut.is_kept, price, 0.0)) > before)
        self._points.append(self._point(cut, is_before))

        value = (
            cut.value
            + constant
            + float(np.minimum(before, 0.0).sum())
            - _SAFETY * (1 + sum(prices.values()))
        )

        if share == 1.0:
            self.bound_s = max(self.bound_s, (1 + value) * self.graph.cost_s)
        return value

    def _by_producer(self, price: Floats) -> Floats:
        producer = self.graph.arrays.producer
        is_made = producer >= 0
        return np.asarray(
            np.bincount(producer[is_made], price[is_made], self.graph.num_operators), np.float64
        )

    def _share_paid(self, before: Floats, price: Floats) -> Floats:
        """Returns, by value, the share of `price` to pay, as recomputing may be cheaper.

        All values of an operator together pay no more than recomputing it in the forward costs
        (`before`), so the cut stays a lower bound on the model.
        """
        total = self._by_producer(price)
        share = np.ones(len(total))
        is_cheaper = (total > 0) & (total > before)
        share[is_cheaper] = np.maximum(before[is_cheaper], 0.0) / total[is_cheaper]
        return np.asarray(share[np.maximum(self.graph.arrays.producer, 0)])

    def _point(self, cut: Cut, is_before: Bools) -> _Point:
        model, producer = self._model, np.maximum(self.graph.arrays.producer, 0)
        point = np.zeros(model.program.num_columns)
        through = cut.is_kept & ~is_before[producer]
        again, before = model.again[self._backward], model.again[self._forward]

        for columns, chosen in (
            (again, cut.is_again),
            (before, is_before),
            (model.keep[self.first], cut.is_kept),
            (model.through[self._forward], through),
        ):
            point[columns[(columns >= 0) & chosen]] = 1.0

        usage = np.concatenate(
            [model.usage(point, self._forward), model.usage(point, self._backward)]
        )
        extra = float(np.dot(self.graph.arrays.cost_s, 1.0 * cut.is_again + is_before)) / max(
            self.graph.cost_s, 1e-300
        )
        return _Point(cut, extra, usage / model.budget)

    def _excess(self, v: int, share: float) -> Floats:
        """Returns, by point, how far the row of `v` is over its limit, in budgets."""
        return (
            np.array([point.usage[v] for point in self._points])
            - self._model.relative_limit * share
        )

    def _master(self, share: float) -> tuple[dict[int, float], float]:
        """Returns the best prices according to the cuts so far, and the bound they promise."""
        rows = sorted(self._rows)
        excess = np.stack([self._excess(v, share) for v in rows], axis=1)

        program = Program()
        program.add_columns(
            np.array([-1.0]), lower=np.array([-1.0]), upper=math.inf, is_integer=False
        )
        program.add_columns(np.zeros(len(rows)), upper=_HIGHEST_PRICE, is_integer=False)

        for point, over in zip(self._points, excess, strict=True):
            program.add_row(
                np.arange(len(rows) + 1), np.concatenate([[1.0], -over]), upper=point.extra
            )

        outcome = program.minimise(is_relaxed=True, time_limit_s=_PROGRAM_LIMIT_S)
        if outcome.point is None:
            return {}, -math.inf
        return dict(zip(rows, np.maximum(outcome.point[1:], 0.0).tolist(), strict=True)), float(
            outcome.point[0]
        )

    def _mixed(self, share: float) -> Floats:
        """Returns the weights of the cuts in the cheapest mixture that satisfies all rows.

        Where none does, rows are violated as little as possible.
        """
        program, count = Program(), len(self._points)
        program.add_columns(np.array([point.extra for point in self._points]), is_integer=False)
        over = program.add_columns(np.array([_HIGHEST_PRICE]), upper=math.inf, is_integer=False)
        program.add_rows(np.arange(count)[None, :], [1.0] * count, lower=1.0, upper=1.0)

        for v in sorted(self._rows):
            program.add_row(
                np.append(np.arange(count), over),
                np.append(self._excess(v, share), -1.0),
                upper=0.0,
            )

        outcome = program.minimise(is_relaxed=True, time_limit_s=_PROGRAM_LIMIT_S)
        return np.zeros(count) if outcome.point is None else outcome.point[:count]

    def _add_violated(self, share: float) -> int:
        """Adds the rows that the mixture violates most, some operators apart; returns how many."""
        usage = np.asarray(
            sum(weight * point.usage for weight, point in zip(self._mix, self._points, strict=True))
        )

        chosen: list[int] = []
        for v in np.argsort(-usage, kind="stable").tolist():
            if (
                usage[v] <= self._model.relative_limit * share + _VIOLATED
                or len(chosen) == _ROWS_PER_ROUND
            ):
                break

            if v not in self._rows and all(abs(v - other) > TOO_NEAR for other in chosen):
                chosen.append(v)
                self._add_row(v)
        return len(chosen)

    def _used(self) -> list[_Point]:
        """Returns the cuts of the mixture, the cheapest (heaviest) first."""
        used = [
            self._points[k]
            for k in np.argsort(-self._mix, kind="stable")[:_MOST_MIXED].tolist()
            if self._mix[k] > 0
        ]
        return sorted(used, key=lambda point: point.extra)

    def _spliced(self, used: list[_Point], deadline: float) -> Iterator[list[int]]:
        """Yields the cheapest cut that fits, then its splices with the next heavier cut.

        Splices are tried with the heavy cut at the front and at the back.
        """
        light = next(
            k for k, point in enumerate(used) if self._peak_bytes(point) <= self.budget_bytes
        )
        yield self._keeping(used[light].cut, used[light].cut, 0, True)
        for is_first in (True, False) if light else ():
            if not is_past(deadline):
                yield from self._splices(used[light - 1].cut, used[light].cut, is_first)

    def _splices(self, heavy: Cut, light: Cut, is_first: bool) -> Iterator[list[int]]:
        """Yields schedules that follow `heavy` for ever more operators, as many as fit.

        They follow it from the front where `is_first`, else from the back.
        """
        low, high = 0, self.first
        while high - low > max(1, self.first // _FINEST_SPLICE):
            middle = (low + high) // 2
            steps = self._fitting(self._keeping(heavy, light, middle, is_first))
            if steps is None:
                high = middle
            else:
                low = middle
                yield steps

    def _keeping(self, heavy: Cut, light: Cut, count: int, is_first: bool) -> list[int]:
        producer = self.graph.arrays.producer
        is_heavy = producer < count if is_first else producer >= self.first - count
        return steps_on_demand(
            self.graph, np.flatnonzero(np.where(is_heavy, heavy.is_kept, light.is_kept)).tolist()
        )

    def _fitting(self, steps: list[int]) -> list[int] | None:
        return (
            steps
            if simulate(self.graph, Schedule.from_steps(self.graph, steps)).peak_bytes
            <= self.budget_bytes
            else None
        )

    def _peak_bytes(self, point: _Point) -> int:
        steps = self._keeping(point.cut, point.cut, 0, True)
        return simulate(self.graph, Schedule.from_steps(self.graph, steps)).peak_bytes
