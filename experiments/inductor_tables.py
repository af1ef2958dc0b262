"""The rows that `experiments.inductor` measures, and the tables made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SHARES = (1.0, 0.8, 0.6, 0.4)  # of the peak of `torch.compile`
COMPILE, PYTORCH, INDUCTOR, EAGER = (
    "torch.compile",
    "activation_memory_budget",
    "remat",
    "eager",
)
WAYS = (COMPILE, PYTORCH, INDUCTOR, EAGER)


@dataclass(frozen=True)
class Row:
    """One way to run the step.

    Attributes:
        way: what decided which values are kept: `torch.compile`, `activation_memory_budget`,
            `remat` through Inductor, or `eager` for remat's own executor.
        asked: the budget that it was given.
        budget_bytes: the same in bytes, if it has one.
        predicted_bytes: the peak predicted before the first step.
        first_bytes: peak of that first step, measured by remat itself.
        peak_bytes: everything that a later step holds, measured from outside.
        seconds: median time of a step, forward and backward.
        compile_s: time until the first step was done; 0 where it was not measured.
        search_s: time of that in which the plan that runs was searched for.
        overhead: predicted extra compute of a plan.
        loss_difference: relative difference from the loss of `torch.compile` alone.
        gradient_difference: largest difference of a gradient, relative to its largest entry;
            None if random numbers differ.
        outcome: empty, or why there is no number.
        minimum_bytes: a budget known to suffice, if this one could not be met.
    """

    way: str
    asked: str
    budget_bytes: int = 0
    predicted_bytes: int = 0
    first_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    compile_s: float = 0.0
    overhead: float = 0.0
    loss_difference: float = 0.0
    gradient_difference: float | None = 0.0
    outcome: str = ""
    minimum_bytes: int = 0
    search_s: float = 0.0


def pages(models: dict[str, list[dict[str, Any]]]) -> str:
    """Returns three Markdown tables: plans, PyTorch's own budget beside them, and all rows."""
    rows = {name: [Row(**row) for row in kept] for name, kept in models.items()}
    return "\n\n".join(
        (
            "Step times and peaks of plans through Inductor, relative to `torch.compile`, with the "
            "predicted overhead in brackets; the least budget beside the eager executor's:",
            _of_plans(rows),
            "Steps within `activation_memory_budget`, plans whose budget is the peak measured "
            "there, and the largest error of the former's gradients:",
            _of_knapsack(rows),
            "All rows:",
            table(rows),
        )
    )


def _of_plans(models: dict[str, list[Row]]) -> str:
    asked = [*(f"{share:.0%}" for share in SHARES), "least"]
    lines = [f"| model | {' | '.join(asked)} | least, eager |", f"|---|{'---:|' * 6}"]
    for name, rows in models.items():
        plans, eager = (
            {row.asked: row for row in reversed(rows) if row.way == way and not row.outcome}
            for way in (INDUCTOR, EAGER)
        )
        cells = [_beside(plans.get(each), rows[0]) for each in asked]
        least, other = plans.get("least"), eager.get("least")
        share = f"{least.predicted_bytes / other.predicted_bytes:.2f} x" if least and other else ""
        lines.append(f"| {name} | {' | '.join(cells)} | {share} |")
    return "\n".join(lines)


def _beside(row: Row | None, first: Row) -> str:
    if row is None:
        return ""
    return (
        f"{row.seconds / first.seconds:.2f} x in {row.peak_bytes / first.peak_bytes:.0%} "
        f"({100 * row.overhead:.1f} %)"
    )


def _of_knapsack(models: dict[str, list[Row]]) -> str:
    lines = [
        "| model | share | peak | its step | a plan's step | error of its gradients |",
        f"|---|{'---:|' * 5}",
    ]
    for name, rows in models.items():
        first = rows[0]
        for row in rows:
            if row.way != PYTORCH:
                continue
            plan = next(
                each
                for each in rows
                if each.way == INDUCTOR and each.budget_bytes == row.peak_bytes
            )
            planned_step = plan.outcome or f"{plan.seconds / first.seconds:.2f} x"
            lines.append(
                f"| {name} | {row.asked} | {row.peak_bytes / first.peak_bytes:.0%} | "
                f"{row.seconds / first.seconds:.2f} x | {planned_step} | "
                f"{row.gradient_difference:.0e} |"
            )
    return "\n".join(lines)


def table(models: dict[str, list[Row]]) -> str:
    """Returns the rows as Markdown."""
    titles = (
        "model",
        "decided by",
        "asked",
        "predicted",
        "first step",
        "measured peak",
        "step",
        "predicted overhead",
        "until the first step",
        "search",
        "loss",
        "gradient",
    )

    lines = [f"| {' | '.join(titles)} |", "|---|---|---|" + "---:|" * 9]
    for name, rows in models.items():
        lines += [f"| {name} | {' | '.join(_cells(row, rows[0]))} |" for row in rows]

    return "\n".join(lines)


def _cells(row: Row, first: Row) -> list[str]:
    if row.outcome:
        return [row.way, row.asked, row.outcome, *[""] * 8]

    gradient = row.gradient_difference
    return [
        row.way,
        row.asked,
        f"{row.predicted_bytes:,} B" if row.predicted_bytes else "",
        f"{row.first_bytes:,} B" if row.first_bytes else "",
        f"{row.peak_bytes / 2**20:.1f} MiB, {row.peak_bytes / first.peak_bytes:.0%}",
        f"{row.seconds / first.seconds:.2f} x" if first.seconds else "",
        f"{100 * row.overhead:.1f} %",
        f"{row.compile_s / first.compile_s:.2f} x" if row.compile_s else "",
        f"{row.search_s / first.compile_s:.2f} x" if row.search_s else "",
        f"{row.loss_difference:.0e}",
        "" if gradient is None else f"{gradient:.0e}",
    ]
