"""The report as a self-contained HTML file: trade-off, memory, schedule, all values."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined

from remat.analysis.composition import Category, Composition
from remat.analysis.decisions import Decision, decide
from remat.core.files import write_whole
from remat.core.graph import Graph
from remat.core.solution import Solution
from remat.core.units import Units
from remat.look.html_memory import memory_chart
from remat.look.html_schedule import schedule_chart
from remat.look.html_style import COLOUR_OF, step_range
from remat.look.html_table import value_table
from remat.look.html_tradeoff import tradeoff_chart
from remat.look.labels import bound_source, shape_text, short_target
from remat.look.report import Group, Report

_LARGEST = 12  # values at the peak that are listed one by one
_GROUPS = 25  # rows of the tables of saved and recomputed values
_TOP = "(top)"  # stands for the outermost module, whose path is empty


class Figure(NamedTuple):
    """One number at the top of the page."""

    name: str
    text: str
    note: str


class PeakRow(NamedTuple):
    """One of the largest values at the peak."""

    colour: str
    category: str
    name: str
    module: str
    shape: str
    size: str
    source: str
    reason: str


def write_html(
    report: Report, path: str | Path, *, curve: Sequence[Solution] = (), title: str = ""
) -> None:
    """Writes a report as one self-contained HTML file.

    Args:
        report: a planned step.
        path: where to write it.
        curve: solutions of the same graph for other budgets, from `remat.frontier`; they form the
            trade-off curve.
        title: title of the page; the file's name if empty.
    """
    page = render_html(report, curve=curve, title=title or Path(path).stem)
    write_whole(path, page.encode("utf-8", "replace"))


def render_html(report: Report, *, curve: Sequence[Solution] = (), title: str = "") -> str:
    """Returns the page that `write_html` writes; about 2 MB, most of it Bokeh's script."""
    graph, schedule = report.graph, report.schedule
    parts, decisions = Composition.of(graph, schedule), decide(graph, schedule)
    script, divisions = components(_charts(report, parts, decisions, curve))

    resources = Resources(mode="inline", components=["bokeh", "bokeh-widgets", "bokeh-tables"])
    environment = Environment(
        loader=PackageLoader("remat.look"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    return environment.get_template("report.html.jinja").render(
        title=title,
        resources=resources.render(),
        script=script,
        charts=divisions,
        figures=_figures(report),
        lead=_lead(report),
        peak=_peak(report, parts, decisions),
        has_curve=bool(curve),
        bound_source=bound_source([*curve, report.solution]),
        saved=[_group_row(graph, group) for group in report.saved_groups()[:_GROUPS]],
        recomputed=[_group_row(graph, group) for group in report.recomputed_groups()[:_GROUPS]],
        pinned=sorted(report.pinned.items(), key=lambda item: -item[1]),
        facts=_facts(report),
    )


def _charts(
    report: Report,
    parts: Composition,
    decisions: Sequence[Decision],
    curve: Sequence[Solution],
) -> dict[str, Any]:
    schedule, plan, steps = report.schedule, report.solution, step_range(report.schedule)
    return {
        "tradeoff": tradeoff_chart(
            [*curve, plan],
            plan,
            keep_all_bytes=report.keep_all.peak_bytes,
            units=Units.of(report.graph),
        ),
        "memory": memory_chart(parts, schedule, steps, budget_bytes=plan.budget_bytes),
        "schedule": schedule_chart(parts, schedule, decisions, steps),
        "values": value_table(report.graph, decisions),
    }


def _figures(report: Report) -> list[Figure]:
    solution, units, keep_all = report.solution, Units.of(report.graph), report.keep_all.peak_bytes
    num_operators = report.graph.num_operators
    share = f"the plan needs {solution.peak_bytes / keep_all:.0%} of it" if keep_all else ""

    figures = [
        Figure(
            "predicted peak",
            units.size_text(solution.peak_bytes),
            _budget_text(report),
        ),
        Figure("keeping everything", units.size_text(keep_all), share),
        Figure(
            "extra compute",
            f"{100 * solution.overhead:.2f} %",
            f"at least {100 * solution.overhead_bound:.2f} %: {solution.bound_source}",
        ),
        Figure(
            "recomputations",
            f"{report.schedule.num_recomputations:,}",
            f"{len(report.recomputed):,} of {num_operators:,} operators are recomputed",
        ),
    ]

    # a plan that counts a loss outside of the module predicts the peak of the whole step
    measured = report.whole_peak_bytes if report.outside_bytes else report.measured_peak_bytes
    if measured:
        off = measured - solution.peak_bytes
        figures.insert(
            1,
            Figure(
                "measured peak",
                units.size_text(measured),
                f"{off:+,} bytes from the prediction",
            ),
        )

    return figures


def _budget_text(report: Report) -> str:
    units, left = Units.of(report.graph), report.solution.budget_bytes
    if report.budget_bytes == left:
        return f"budget {units.size_text(left)}"
    return (
        f"the plan may use {units.size_text(left)} of the budget of "
        f"{units.size_text(report.budget_bytes)}"
    )


def _lead(report: Report) -> str:
    solution, units, keep_all = report.solution, Units.of(report.graph), report.keep_all.peak_bytes
    if not report.recomputed:
        return (
            f"Everything fits: the step needs {units.size_text(keep_all)}, and nothing is "
            "recomputed."
        )

    return (
        f"This training step needs {units.size_text(keep_all)} if everything is kept. The plan "
        f"runs it in {units.size_text(solution.peak_bytes)} and computes "
        f"{100 * solution.overhead:.2f} % more. In this order of operators, every schedule within "
        f"{units.size_text(solution.budget_bytes)} computes at least "
        f"{100 * solution.overhead_bound:.2f} % more ({solution.bound_source})."
    )


def _peak(report: Report, parts: Composition, decisions: Sequence[Decision]) -> dict[str, Any]:
    graph, schedule, units = report.graph, report.schedule, Units.of(report.graph)
    step = int(parts.bytes_of.sum(0).argmax()) if len(schedule.steps) else -1
    if step < 0:
        return {}

    op = graph.operators[schedule.steps[step]]
    total = int(parts.bytes_of[:, step].sum())
    shares = [
        (COLOUR_OF[category], str(category), units.size_text(size), f"{size / max(1, total):.1%}")
        for category, size in parts.at(step).items()
        if size
    ]

    held = [h for h in parts.held_at(step) if graph.values[h.value].size_bytes]
    reason_of = {d.value: d.reason for d in decisions}
    rows = [_peak_row(graph, h.value, h.category, reason_of[h.value]) for h in held[:_LARGEST]]
    rest = held[_LARGEST:]

    return {
        "step": step,
        "num_steps": len(schedule.steps),
        "half": "forward" if step < schedule.num_forward_steps else "backward",
        "operator": short_target(op.target) or op.name,
        "module": op.module,
        "source": op.source,
        "total": units.size_text(total),
        "shares": shares,
        "rows": rows,
        "num_rest": len(rest),
        "rest": units.size_text(sum(graph.values[h.value].size_bytes for h in rest)),
    }


def _peak_row(graph: Graph, value: int, category: Category, reason: str) -> PeakRow:
    held, op = graph.values[value], graph.operators[graph.producer[value]]
    shape, size = shape_text(held.dtype, held.shape), Units.of(graph).size_text(held.size_bytes)

    return PeakRow(
        COLOUR_OF[category],
        str(category),
        held.name,
        op.module or _TOP,
        shape,
        size,
        op.source,
        reason,
    )


def _group_row(graph: Graph, group: Group) -> tuple[str, ...]:
    units = Units.of(graph)
    shape = shape_text(group.dtype, group.shape)
    cost = units.cost_text(group.cost_s) if group.cost_s else ""
    return (
        group.module or _TOP,
        short_target(group.target),
        shape,
        group.source,
        f"{group.count:,}",
        units.size_text(group.size_bytes),
        cost,
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    solution, graph = report.solution, report.graph

    return [
        ("solver", f"{solution.solver}, {solution.wall_s:.2f} s, {solution.status}"),
        *((("cut short", solution.cut_short),) if solution.cut_short else ()),
        *((("techniques", solution.techniques),) if solution.techniques else ()),
        ("gap", f"{100 * solution.gap:.2f} %: how far the cost can be above the optimum"),
        ("costs", graph.costs or "as given"),
        (
            "graph",
            f"{graph.num_operators:,} operators, {len(graph.values):,} values, fingerprint "
            f"{graph.fingerprint}",
        ),
        *(("cut by torch.compile", place) for place in report.breaks),
        (
            "written",
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by remat "
            f"{importlib.metadata.version('remat')}",
        ),
    ]
