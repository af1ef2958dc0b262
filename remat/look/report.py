"""The report of a planned step: budget, peaks, bound, saved and recomputed values."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat.core.budget import describe_bytes, format_bytes
from remat.core.cuda_peaks import CudaPeaks
from remat.core.graph import Graph
from remat.core.operators import Phase, Value
from remat.core.room import Room
from remat.core.schedule import Schedule, Simulation, lifetimes, simulate
from remat.core.solution import Solution
from remat.look.labels import SOURCE_WIDTH, shape_text, short_source, short_target

_WIDTH = 80
_ROWS = 12
_SCALARS_BYTES = 512  # an excess up to this is just a loss and its gradient
_MODULE = 15  # columns for a module's path
_REPORT_PACKAGES = ("bokeh", "jinja2")  # of the extra `report`
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Group:
    """The same values or operators of several modules that differ only in an index.

    Attributes:
        module: the modules' path with `*` for indices, such as `blocks.*.attn`.
        target: the operator that writes the values.
        source: the line of code that it comes from.
        shape: that of the largest value.
        dtype: that of the largest value.
        count: the number of members.
        size_bytes: the total size of the values.
        cost_s: the total cost of the recomputations; 0 for saved values.
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
        measured_peak_bytes: the peak measured in the first step; None before its backward ran.
        captured_s: how long the first call took: capturing, planning and compiling.
        breaks: where `torch.compile` cut the step, and why; empty if it was captured whole.
        num_pieces: how many compiled pieces a step runs.
        unplanned_bytes: the memory measured between the pieces of a step, for which the plan leaves
            room.
        room: the budget as the user gave it, and the parts that are kept free; None if only the
            plan's own budget is known.
        cuda_peaks: the measured peak on CUDA, counted in three ways.
        outside_bytes: the memory measured outside of the planned calls, for which the plan leaves
            room; 0 if the budget was enough from the start.
        whole_peak_bytes: the peak measured from the module's first call to the end of the backward,
            with the loss and everything else; None before that, and for a step in pieces.
        kernels_peak_bytes: the peak of the kernels that Inductor made of the plan, known before
            they run; None if operators run one by one.
        executor: what runs and why; empty if operators run one by one, as by default.
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
    kernels_peak_bytes: int | None = None
    executor: str = ""

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
        """The simulation of keeping everything."""
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
        """The operators that are recomputed, and how often."""
        counts = Counter(self.schedule.steps)
        return {index: count - 1 for index, count in sorted(counts.items()) if count > 1}

    @cached_property
    def pinned(self) -> dict[str, int]:
        """The reasons why operators must not be recomputed, and how many operators have each."""
        return dict(
            Counter(
                op.pinned
                for op in self.graph.operators
                if op.pinned and op.target not in ("tangent", "snapshot", "generator_state")
            )
        )

    def saved_groups(self) -> list[Group]:
        """Returns the saved values grouped over similar modules, largest first."""
        return self._groups((self.graph.producer[value], (value,), 0.0) for value in self.saved)

    def recomputed_groups(self) -> list[Group]:
        """Returns the recomputed operators grouped over similar modules, largest first."""
        operators = self.graph.operators
        return self._groups(
            (i, operators[i].writes, times * operators[i].cost_s)
            for i, times in self.recomputed.items()
        )

    def save(self, path: str | Path, *, curve: Sequence[Solution] = (), title: str = "") -> None:
        """Writes the report as one HTML file that needs no network.

        Args:
            path: where to write it.
            curve: solutions for other budgets, from `remat.frontier`; they form the trade-off
                curve.
            title: title of the page; the file's name if empty.

        Raises:
            ImportError: Bokeh is not installed; the message names the extra.
        """
        try:
            from remat.look.html_page import write_html  # Bokeh takes a second to import
        except ModuleNotFoundError as missing:
            if (missing.name or "").split(".")[0] not in _REPORT_PACKAGES:
                raise
            raise ImportError(
                "the HTML report needs Bokeh; install it with: pip install 'remat[report]'"
            ) from missing

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

            for note in self._notes():
                console.print(note, markup=False)

        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def _notes(self) -> Iterator[str]:
        """Yields what stands below the tables."""
        if self.breaks:
            yield (
                f"{self.num_pieces} compiled pieces share the budget; torch.compile cut the step at"
            )
            for place in self.breaks:
                yield f"- {place}"

        if self.unplanned_bytes:
            yield (
                f"{describe_bytes(self.unplanned_bytes)} are held between the pieces; the plan "
                "leaves room for them"
            )

        if self.cuda_peaks and self.cuda_peaks.advice():
            yield self.cuda_peaks.advice()

        for reason, count in sorted(self.pinned.items(), key=lambda item: -item[1]):
            yield f"{count} operator{'s' if count > 1 else ''} never computed again: {reason}"

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

    def _peak_rows(self) -> list[tuple[str, str]]:
        resident, measured = self.graph.resident_bytes, self.measured_peak_bytes
        kernels = self.kernels_peak_bytes

        return [
            ("predicted peak", describe_bytes(self.solution.peak_bytes)),
            *([("- of the kernels", describe_bytes(kernels))] if kernels else []),
            (
                "measured peak",
                describe_bytes(measured) if measured else "known after the first backward",
            ),
            *([("- as CUDA counts", self.cuda_peaks.text())] if self.cuda_peaks else []),
            *self._whole_rows(),
            ("keeping everything", describe_bytes(self.keep_all.peak_bytes)),
            ("held throughout", f"{describe_bytes(resident)}: parameters, buffers, inputs"),
        ]

    def _summary(self) -> Table:
        solution, table = self.solution, Table(box=box.SIMPLE, show_header=False, pad_edge=False)
        backward = sum(op.phase is Phase.BACKWARD for op in self.graph.operators)

        rows = [
            *self._budget_rows(),
            *self._peak_rows(),
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
            *([("executor", self.executor)] if self.executor else []),
        ]

        if solution.techniques:
            rows.append(("techniques", solution.techniques))
        if solution.cut_short:
            rows.append(("cut short", f"{solution.cut_short}; not kept for later jobs"))

        for name, text in rows:
            table.add_row(name, Text(text))
        return table


def _group_table(title: str, groups: list[Group]) -> Table:
    table = _empty_group_table(f"{title}: {_total(groups)}")
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
        table.add_row(*map(Text, cells))  # Text: a name in brackets is not markup

    rest = groups[_ROWS:]
    if rest:
        table.add_row("...", "", "", "", str(sum(group.count for group in rest)), _total(rest))
    return table


def _empty_group_table(title: str) -> Table:
    table = Table(
        box=box.SIMPLE, title=title, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0)
    )

    # widths include the padding
    for name, width in (
        ("module", _MODULE + 1),
        ("operator", 14),
        ("largest", 18),
        ("source", SOURCE_WIDTH + 1),
    ):
        table.add_column(name, overflow="ellipsis", no_wrap=True, width=width)
    for name, width in (("of", 3), ("bytes", 9)):
        table.add_column(name, justify="right", no_wrap=True, width=width)

    return table


def _total(groups: Iterable[Group]) -> str:
    return format_bytes(sum(group.size_bytes for group in groups))
