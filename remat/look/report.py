"""What was planned and what came of it, as a table a person likes to read."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat.core.budget import describe_bytes, format_bytes
from remat.core.cuda_peaks import CudaPeaks
from remat.core.graph import Graph, Phase, Value
from remat.core.room import Room
from remat.core.schedule import Schedule, Simulation, lifetimes, simulate
from remat.core.solution import Solution
from remat.look.labels import SOURCE_WIDTH, shape_text, short_source, short_target

_WIDTH = 80
_ROWS = 12
_SCALARS_BYTES = 512  # what a loss and its gradient may differ by
_MODULE = 15  # columns for a module's path
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Group:
    """Values or operators that several like modules have in common.

    Attributes:
        module: the module's path, `*` for an index: `blocks.*.attn`.
        target: the operator that makes them.
        source: the line of code it comes from.
        shape: of the largest value.
        dtype: of the largest value.
        count: how many there are.
        size_bytes: their bytes together.
        cost_s: of computing them again, all of them together.
    """

    module: str
    target: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    size_bytes: int
    cost_s: float


@dataclass(frozen=True)
class Report:
    """A planned step: print it, or read its fields.

    Attributes:
        graph: the captured step.
        solution: its plan.
        measured_peak_bytes: measured at the first step; None before its backward ran.
        captured_s: how long the first call took: capturing, planning and compiling.
        breaks: where `torch.compile` cut the step, and why; empty where it was captured whole.
        num_pieces: how many compiled pieces a step runs.
        unplanned_bytes: what the step was measured to hold between its pieces, and the plan leaves
            room for.
        room: the budget as the user gave it, and what of it is kept free; that of the plan alone
            without one.
        cuda_peaks: the measured peak on CUDA, counted in three ways.
        outside_bytes: what the step was measured to hold outside of the planned calls, and the plan
            leaves room for; 0 where the budget was enough for it all along.
        whole_peak_bytes: measured from the module's first call to the end of the backward, the loss
            and all else included; None before, and where the step runs in pieces.
    """

    graph: Graph
    solution: Solution
    measured_peak_bytes: int | None = None
    captured_s: float = 0.0
    breaks: tuple[str, ...] = ()
    num_pieces: int = 1
    unplanned_bytes: int = 0
    room: Room | None = None
    cuda_peaks: CudaPeaks | None = None
    outside_bytes: int = 0
    whole_peak_bytes: int | None = None

    @property
    def budget_bytes(self) -> int:
        """The budget that the user gave, in bytes."""
        return self.room.budget_bytes if self.room else self.solution.budget_bytes

    @property
    def schedule(self) -> Schedule:
        """The schedule that runs."""
        assert self.solution.schedule is not None, "only solved plans run"
        return self.solution.schedule

    @cached_property
    def keep_all(self) -> Simulation:
        """What keeping everything takes."""
        return simulate(self.graph, Schedule.keep_all(self.graph))

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """The values kept from the forward for the backward."""
        lives = lifetimes(self.graph, self.schedule.array)
        mark = self.schedule.num_forward_steps
        crosses = (lives.first < mark) & (lives.last >= mark)
        outputs = set(self.graph.outputs)
        return tuple(
            v for v in lives.value[crosses].tolist() if v not in outputs or self.graph.users_of[v]
        )

    @cached_property
    def recomputed(self) -> dict[int, int]:
        """The operators computed again, and how often."""
        counts = Counter(self.schedule.steps)
        return {index: count - 1 for index, count in sorted(counts.items()) if count > 1}

    @cached_property
    def pinned(self) -> dict[str, int]:
        """Why operators may not be computed again, and how many have each reason."""
        return dict(
            Counter(
                op.pinned
                for op in self.graph.operators
                if op.pinned and op.target not in ("tangent", "snapshot", "generator_state")
            )
        )

    def saved_groups(self) -> list[Group]:
        """Returns what is saved, like modules together, largest first."""
        return self._groups((self.graph.producer[value], (value,), 0.0) for value in self.saved)

    def recomputed_groups(self) -> list[Group]:
        """Returns what is recomputed, like modules together, largest first."""
        operators = self.graph.operators
        return self._groups(
            (i, operators[i].writes, times * operators[i].cost_s)
            for i, times in self.recomputed.items()
        )

    def save(self, path: str | Path, *, curve: Sequence[Solution] = (), title: str = "") -> None:
        """Writes the report as one HTML file that needs no network.

        Args:
            path: where to write it.
            curve: solutions for other budgets, from `remat.frontier`; they make the trade-off
                curve.
            title: of the page; the file's name without one.

        Raises:
            ImportError: Bokeh is not installed; the message names the extra.
        """
        from remat.look.html_page import write_html  # Bokeh takes a second to import

        write_html(self, path, curve=curve, title=title)

    def _groups(self, items: Iterable[tuple[int, tuple[int, ...], float]]) -> list[Group]:
        found: dict[tuple[str, str, str], list[tuple[list[Value], float]]] = defaultdict(list)
        for index, written, cost_s in items:
            op = self.graph.operators[index]
            found[_INDEX.sub("*", op.module), op.target, op.source].append(
                ([self.graph.values[v] for v in written], cost_s)
            )
        groups = []
        for (module, target, source), members in found.items():
            values = [value for member, _ in members for value in member]
            largest = max(values, key=lambda value: value.size_bytes)
            size_bytes = sum(value.size_bytes for value in values)
            cost_s = sum(cost for _, cost in members)
            groups.append(
                Group(
                    module,
                    target,
                    source,
                    largest.shape,
                    largest.dtype,
                    len(members),
                    size_bytes,
                    cost_s,
                )
            )
        return sorted(groups, key=lambda group: -group.size_bytes)

    def __str__(self) -> str:
        console = Console(
            width=_WIDTH,
            no_color=True,
            highlight=False,
            legacy_windows=False,
            force_terminal=False,
            file=None,
        )
        with console.capture() as capture:
            console.print(self._summary())
            console.print(_group_table("saved for the backward", self.saved_groups()))
            if self.recomputed:
                console.print(
                    _group_table("computed again in the backward", self.recomputed_groups())
                )
            if self.breaks:
                console.print(
                    f"{self.num_pieces} compiled pieces under one budget; torch.compile cut "
                    "the step at"
                )
                for place in self.breaks:
                    console.print(f"- {place}", markup=False)
            if self.unplanned_bytes:
                console.print(
                    f"{describe_bytes(self.unplanned_bytes)} between the pieces are not "
                    "planned: the plan leaves room for them"
                )
            if self.cuda_peaks and self.cuda_peaks.advice():
                console.print(self.cuda_peaks.advice())
            for reason, count in sorted(self.pinned.items(), key=lambda item: -item[1]):
                console.print(
                    f"{count} operator{'s' if count > 1 else ''} never computed again: {reason}",
                    markup=False,
                )
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def _budget_rows(self) -> list[tuple[str, str]]:
        left = describe_bytes(self.solution.budget_bytes)
        if self.room is None:
            return [("budget", left)]
        rows = [("budget", self.room.budget_text())]
        if self.room.held_bytes:
            rows += [(f"- {name}", describe_bytes(size)) for name, size in self.room.held().items()]
            rows.append(("left for the plan", left))
        return rows

    def _whole_rows(self) -> list[tuple[str, str]]:
        whole, rows = self.whole_peak_bytes, []
        if whole is not None and whole - (self.measured_peak_bytes or 0) > _SCALARS_BYTES:
            rows.append(("- of the whole step", describe_bytes(whole)))
        if self.outside_bytes:
            outside = f"{describe_bytes(self.outside_bytes)}, which the plan leaves room for"
            rows.append(("outside of the module", outside))
        return rows

    def _summary(self) -> Table:
        solution, table = self.solution, Table(box=box.SIMPLE, show_header=False, pad_edge=False)
        backward = sum(op.phase is Phase.BACKWARD for op in self.graph.operators)
        rows = [
            *self._budget_rows(),
            ("predicted peak", describe_bytes(solution.peak_bytes)),
            (
                "measured peak",
                describe_bytes(self.measured_peak_bytes)
                if self.measured_peak_bytes
                else "known after the first backward",
            ),
            *([("- as CUDA counts", self.cuda_peaks.text())] if self.cuda_peaks else []),
            *self._whole_rows(),
            ("keeping everything", describe_bytes(self.keep_all.peak_bytes)),
            (
                "held throughout",
                f"{describe_bytes(self.graph.resident_bytes)}: parameters, buffers, inputs",
            ),
            (
                "overhead",
                f"{100 * solution.overhead:.2f} % more compute, at "
                f"{self.graph.costs or 'given'} costs",
            ),
            (
                "lower bound",
                f"{100 * solution.overhead_bound:.2f} % ({solution.bound_source})",
            ),
            ("gap", f"{100 * solution.gap:.2f} % ({solution.status})"),
            (
                "operators",
                f"{self.graph.num_operators - backward} forward, {backward} backward; "
                f"{sum(self.recomputed.values())} recomputations",
            ),
            ("planned", f"by {solution.solver}, in {solution.wall_s:.2f} s"),
        ]
        if solution.cut_short:
            rows.append(("cut short", f"{solution.cut_short}; not kept for later jobs"))
        for name, text in rows:
            table.add_row(name, Text(text))
        return table


def _group_table(title: str, groups: list[Group]) -> Table:
    total = sum(group.size_bytes for group in groups)
    table = Table(
        box=box.SIMPLE,
        title=f"{title}: {format_bytes(total)}",
        title_justify="left",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    # with the padding
    for name, width in (
        ("module", _MODULE + 1),
        ("operator", 14),
        ("largest", 18),
        ("source", SOURCE_WIDTH + 1),
    ):
        table.add_column(name, overflow="ellipsis", no_wrap=True, width=width)
    for name, width in (("of", 3), ("bytes", 9)):
        table.add_column(name, justify="right", no_wrap=True, width=width)
    for group in groups[:_ROWS]:
        shape, target = shape_text(group.dtype, group.shape), short_target(group.target)
        module = group.module if len(group.module) <= _MODULE else "…" + group.module[1 - _MODULE :]
        cells = (
            module or "(top)",
            target,
            shape,
            short_source(group.source),
            str(group.count),
            format_bytes(group.size_bytes),
        )
        table.add_row(*map(Text, cells))  # a name in brackets is no markup
    rest = groups[_ROWS:]
    if rest:
        table.add_row(
            "...",
            "",
            "",
            "",
            str(sum(group.count for group in rest)),
            format_bytes(sum(group.size_bytes for group in rest)),
        )
    return table
