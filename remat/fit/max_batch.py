"""The largest batch that fits, and the batch with the best predicted throughput.

The least peak of a step is nearly affine in the batch size, so the largest batch is found by the
secant method. Each batch on the way is traced and its least peak is searched for. A larger batch
spreads the fixed cost of operators over more samples and makes matrix products more efficient; at
some point recomputation costs more than this saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from remat.core.budget import Budget, format_bytes
from remat.core.errors import BudgetError
from remat.core.graph import Graph
from remat.core.schedule import keep_all_peak
from remat.core.units import Scale
from remat.face.step_function import as_step
from remat.fit.answer import Fit
from remat.fit.question import Question
from remat.solvers.auto.minimum import minimum
from remat.torch_border.kernels import FakeTensorMode

MakeArgs = Callable[[int], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class BatchFit:
    """A batch size, and how its step fits."""

    batch: int
    fit: Fit

    @property
    def samples_per_s(self) -> float:
        """Samples per second of forward and backward, by the cost model."""
        return self.batch / self.fit.step_s


@dataclass(frozen=True)
class Batches:
    """The batches that were planned, in ascending order; print them, or read the fields.

    Attributes:
        rows: each batch with its plan; the first one keeps everything if any batch can.
    """

    rows: tuple[BatchFit, ...]

    @property
    def largest(self) -> int:
        """The largest batch with a plan; with `solver="auto"`, the largest that fits."""
        return self.rows[-1].batch

    @property
    def best(self) -> BatchFit:
        """The batch with the best predicted throughput."""
        return max(self.rows, key=lambda row: row.samples_per_s)

    def record(self) -> dict[str, Any]:
        """Returns the figures for JSON."""
        rows = [
            {"batch": row.batch, "samples_per_s": row.samples_per_s, **row.fit.record()}
            for row in self.rows
        ]
        return {"largest": self.largest, "best": self.best.batch, "batches": rows}

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE, pad_edge=False)
        for name in ("batch", "peak", "overhead", "step", "samples/s", ""):
            table.add_column(name, justify="right" if name else "left")

        for row in self.rows:
            best = (
                "best predicted throughput"
                if row is self.best
                else "largest that fits"
                if row.batch == self.largest
                else ""
            )

            step_text = Scale.for_largest(row.fit.step_s, "s").text(row.fit.step_s)
            peak = row.fit.planned.total if row.fit.planned else 0
            table.add_row(
                str(row.batch),
                format_bytes(peak),
                f"{100 * row.fit.overhead:.2f} %",
                step_text,
                f"{row.samples_per_s:,.{1 if row.samples_per_s < 1000 else 0}f}",
                best,
            )

        console = Console(
            width=80, no_color=True, highlight=False, force_terminal=False, legacy_windows=False
        )
        fit = self.rows[-1].fit

        with console.capture() as capture:
            console.print(
                f"{fit.model} in {format_bytes(fit.budget_bytes)} of {fit.device}, with "
                f"{fit.held.optimizer.name}:"
            )
            console.print(table)

        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def max_batch(
    model: Callable[..., Any],
    make_args: MakeArgs,
    budget: Budget | None = None,
    *,
    limit: int = 1 << 16,
    points: int = 5,
    **options: Any,
) -> Batches:
    """Returns the largest batch that fits, and smaller ones, with their predicted throughput.

    Args:
        model: any module, or a step function; as for `fits`, it may be on the meta device.
        make_args: batch size -> tuple of the model's inputs; called in fake-tensor mode, so it
            allocates nothing.
        budget: the memory that may be used; by default that of the device, minus what is held or
            kept free there, as for `fits`.
        limit: the largest batch to try.
        points: the most batches to plan, from the largest that needs no recomputation to the
            largest that fits.
        **options: those of `fits`: `device`, `optimizer`, `reserve_bytes`, `autocast`,
            `time_limit_s` per batch, ...

    Raises:
        ValueError: a budget that is a percentage, a limit below 1, an unknown device or optimizer.
        BudgetError: not even one sample fits, or the solver found no plan for any batch.
        TraceError: the step can't be captured, or needs data between two pieces.
    """
    if isinstance(budget, str) and "%" in budget:
        raise ValueError(
            f"budget {budget!r} is a percentage, which would be a different budget for each batch; "
            "write it in bytes"
        )

    if limit < 1 or points < 1:
        raise ValueError(f"limit={limit} and points={points} must be at least 1")

    step = as_step(model, _fake_args(make_args, 1))
    search = _Search(Question.of(step, budget=budget, **options), make_args)
    largest = _largest(search.least_bytes, search.budget_bytes, limit)
    if largest == 0:
        raise _nothing_fits(search.question.answer(search.graph_of(1)))

    first = max(1, _largest(search.keep_all_bytes, search.budget_bytes, largest))
    rows = [
        BatchFit(batch, search.question.answer(search.graph_of(batch)))
        for batch in _between(first, largest, points)
    ]

    fitting = tuple(row for row in rows if row.fit)
    if not fitting:
        raise _nothing_fits(rows[0].fit)
    return Batches(fitting)


@dataclass
class _Search:
    """The graphs and least peaks of batches; each is found once."""

    question: Question
    make_args: MakeArgs
    _graphs: dict[int, Graph] = field(default_factory=dict)
    _least: dict[int, int] = field(default_factory=dict)

    @property
    def budget_bytes(self) -> int:
        return self.question.budget_bytes(self.graph_of(1))

    def graph_of(self, batch: int) -> Graph:
        if batch not in self._graphs:
            self._graphs[batch] = self.question.trace(_fake_args(self.make_args, batch))
        return self._graphs[batch]

    def keep_all_bytes(self, batch: int) -> int:
        return self._with_optimizer(batch, keep_all_peak(self.graph_of(batch)))

    def least_bytes(self, batch: int) -> int:
        if batch not in self._least:
            least = minimum(
                self.graph_of(batch), time_limit_s=self.question.time_limit_s
            ).peak_bytes
            self._least[batch] = self._with_optimizer(batch, least)
        return self._least[batch]

    def _with_optimizer(self, batch: int, peak_bytes: int) -> int:
        return max(
            peak_bytes + self.question.held.total,
            self.question.optimizer_step_bytes(self.graph_of(batch)),
        )


def _fake_args(make_args: MakeArgs, batch: int) -> Sequence[Any]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return make_args(batch)


def _largest(bytes_of: Callable[[int], int], budget_bytes: int, limit: int) -> int:
    """Returns the largest batch up to `limit` whose bytes are within the budget, 0 if none.

    Takes secant steps, and halves the interval if these are slow.
    """
    low, high, batch = 0, limit + 1, 1
    known: list[tuple[int, int]] = []

    while high - low > 1:
        size = bytes_of(batch)
        known.append((batch, size))

        before = high - low
        low, high = (batch, high) if size <= budget_bytes else (low, batch)
        is_slow = len(known) > 4 and 2 * (high - low) > before
        batch = (low + high) // 2 if is_slow and high <= limit else _secant(known, budget_bytes)
        batch = min(max(batch, low + 1), high - 1)

    return low


def _secant(known: list[tuple[int, int]], budget_bytes: int) -> int:
    """Returns the batch at which the line through the last two sizes meets the budget."""
    if len(known) < 2:
        return 2 * known[-1][0]
    (a, size_a), (b, size_b) = sorted(known[-2:])
    if size_b <= size_a:
        return 2 * b
    return b + int((budget_bytes - size_b) // ((size_b - size_a) / (b - a)))


def _between(first: int, last: int, points: int) -> list[int]:
    """Returns at most `points` batches in a geometric sequence, both ends included."""
    if points == 1:
        return [last]
    return sorted({round(first * (last / first) ** (i / (points - 1))) for i in range(points)})


def _nothing_fits(fit: Fit) -> BudgetError:
    return BudgetError(
        fit.verdict,
        budget_bytes=fit.budget_bytes,
        minimum_bytes=fit.minimum_bytes,
        is_proved=fit.bound_bytes > fit.budget_bytes,
    )
