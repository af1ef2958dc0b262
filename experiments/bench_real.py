"""Traced training steps of real size, roofline costs of an H100, bf16.

Our overhead and bound from 90 % to the least budget.

Every baseline of the field runs on the same graph at the same budgets. Each is compared at *its own
simulated peak*: our solver runs again with that peak as the budget, so that no method is charged
for memory that it did not use. In the first table the time limit holds for graphs of up to 2,000
operators, and grows in proportion for larger ones. Baselines, and our solver at their peaks, have
20 s at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.bench_rows import (
    CONSOLE,
    Row,
    Rows,
    facts,
    geometric_mean,
    mean_row,
    mean_seconds,
    new_table,
    overrun_text,
    percent,
    solve,
)
from experiments.peers import PEERS, solve_as_peer
from experiments.real_graphs import BENCHMARKED, cached_graph
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.solvers.auto.minimum import Minimum, minimum
from remat.solvers.auto.reuse import Shared
from remat.solvers.auto.solver import Auto

TIME_LIMIT_S, GAP = 60.0, 0.001
_SHARES = (90, 80, 70, 60, 50, 40, 30)  # % of the peak of keeping everything
LEAST = "least"
_MINIMUM_LIMIT_S = 120.0
_MEET_GAP = 1e-4  # a baseline may be optimal
_MEET_LIMIT_S = 20.0  # limit of a baseline, and of our solver at its peak: there are hundreds
_USUAL_OPERATORS = 2_000  # larger graphs get more time


@dataclass(frozen=True)
class _Case:
    """One graph, and how it is solved."""

    name: str
    graph: Graph
    plans: Path
    time_limit_s: float
    gap: float

    @property
    def meet_limit_s(self) -> float:
        return min(self.time_limit_s, _MEET_LIMIT_S)

    def plan_path(self, label: str) -> Path:
        return self.plans / f"{self.name}-{label.rstrip('%')}-{self.time_limit_s:g}s.json"

    def known_plans(self) -> list[Solution]:
        """Returns the plans that earlier rows found for this graph."""
        paths = [self.plan_path(label) for label in (*(f"{share}%" for share in _SHARES), LEAST)]
        found = [Solution.load(path) for path in paths if path.is_file()]
        return [plan for plan in found if plan.fingerprint == self.graph.fingerprint]


def run(rows: Rows, *, folder: Path, time_limit_s: float, gap: float, names: Sequence[str]) -> None:
    """Solves every graph at every budget that can be met, then at every baseline's peak."""
    plans = folder / "plans"
    plans.mkdir(parents=True, exist_ok=True)

    for name in names or BENCHMARKED:
        case = _Case(name, cached_graph(name, folder), plans, time_limit_s, gap)
        budgets = budgets_of(rows, name, case.graph)

        for label, size in budgets.items():
            key = {"graph": name, "kind": "auto", "budget": label}
            rows.row(key, lambda case=case, label=label, size=size: _own(case, label, size))  # type: ignore[misc]

        for peer in PEERS:
            for label, size in budgets.items():
                key = {"graph": name, "kind": "peer", "peer": peer, "budget": label}
                found = rows.row(
                    key,
                    lambda case=case, peer=peer, size=size: _peer(case, peer, size),  # type: ignore[misc]
                )

                if found["cost"] is not None:
                    key = {
                        "graph": name,
                        "kind": "auto at a peer's peak",
                        "budget_bytes": found["peak_bytes"],
                    }
                    rows.row(key, lambda case=case, size=found["peak_bytes"]: _meet(case, size))  # type: ignore[misc]


def budgets_of(rows: Rows, name: str, graph: Graph) -> dict[str, int]:
    """Returns the budgets that can be met, in bytes.

    They are shares of the peak of keeping everything; the least budget comes last.
    """
    row = rows.row({"graph": name, "kind": "least"}, lambda: _least(graph))
    budgets = {f"{share}%": row["keep_all_bytes"] * share // 100 for share in _SHARES}
    return {label: size for label, size in budgets.items() if size >= row["peak_bytes"]} | {
        LEAST: row["peak_bytes"]
    }


def _least(graph: Graph) -> Row:
    found = minimum(graph, time_limit_s=_MINIMUM_LIMIT_S)
    keep_all_bytes = simulate(graph, Schedule.keep_all(graph)).peak_bytes

    return {
        "operators": graph.num_operators,
        "keep_all_bytes": keep_all_bytes,
        "resident_bytes": graph.resident_bytes,
        "peak_bytes": found.peak_bytes,
        "peak_bound_bytes": found.lower_bound_bytes,
    }


def _own(case: _Case, label: str, budget_bytes: int) -> Row:
    limit_s = case.time_limit_s * max(1.0, case.graph.num_operators / _USUAL_OPERATORS)
    solution, row = solve(case.graph, budget_bytes, time_limit_s=limit_s, gap=case.gap)
    if solution.is_solved:
        solution.save(case.plan_path(label))
    return row | {"time_limit_s": limit_s}


def _peer(case: _Case, peer: str, budget_bytes: int) -> Row:
    found, seconds, reason = solve_as_peer(
        peer, case.graph, budget_bytes, time_limit_s=case.meet_limit_s
    )

    numbers = (
        facts(found)
        if found
        else {"status": "no_solution", "cost": None, "budget_bytes": budget_bytes, "reason": reason}
    )

    return numbers | {"seconds": round(seconds, 3)}


def _meet(case: _Case, budget_bytes: int) -> Row:
    """Solves at a baseline's peak.

    It starts from the schedules found for other budgets, as when a user solves again.
    """
    known = case.known_plans()
    steps = [
        plan.schedule.steps
        for plan in known
        if plan.schedule is not None and plan.peak_bytes <= budget_bytes
    ]

    bound_s = max(
        (plan.lower_bound_s for plan in known if plan.budget_bytes >= budget_bytes), default=0.0
    )

    least = min(
        (plan for plan in known if plan.schedule is not None),
        key=lambda plan: plan.peak_bytes,
        default=None,
    )

    floor = (
        Minimum(least.peak_bytes, 0, least.schedule.steps)
        if least is not None and least.schedule is not None
        else None
    )

    solver, shared = (
        Auto(gap=min(case.gap, _MEET_GAP), time_limit_s=case.meet_limit_s),
        Shared(case.graph, floor),
    )

    solution = solver.improve(
        case.graph,
        budget_bytes=budget_bytes,
        known_steps=steps,
        known_bound_s=bound_s,
        shared=shared,
    )

    return facts(solution) | {"seconds": round(solution.wall_s, 3)}


def show(rows: Sequence[Row], time_limit_s: float) -> None:
    """Prints our results by graph and budget, then those of the baselines at equal peaks."""
    least = {row["graph"]: row for row in rows if row["kind"] == "least"}
    own = [row for row in rows if row["kind"] == "auto"]

    table = new_table(
        f"Traced training steps, {time_limit_s:g} s for {_USUAL_OPERATORS:,} operators: % "
        "over keeping everything, peak in % of the budget",
        ("graph", "operators", "budget", "GiB", "overhead", "bound", "gap %", "s", "peak %"),
    )

    latest = ""
    for row in own:
        name = row["graph"]
        head = (name, f"{least[name]['operators']:,}") if name != latest else ("", "")
        latest = name
        table.add_row(*head, *_own_cells(row, least[name]["keep_all_bytes"]))

    kinds = {
        "operators": "",
        "budget": "",
        "GiB": "",
        "overhead": "overhead",
        "bound": "bound",
        "gap": "gap",
        "s": "seconds",
    }
    mean_row(table, own, f"mean of {len(own)}", kinds)

    CONSOLE.print(table)
    CONSOLE.print(f"{overrun_text(own, time_limit_s)}\n")
    _show_peers(rows, least)


def _own_cells(row: Row, keep_all_bytes: int) -> Iterator[str]:
    """Yields the cells of one of our results, from its budget to its peak."""
    is_least = row["budget"] == LEAST
    yield f"least {100 * row['budget_bytes'] / keep_all_bytes:.1f}%" if is_least else row["budget"]
    yield f"{row['budget_bytes'] / 2**30:.2f}"

    yield percent(row["overhead_percent"])
    yield percent(row["bound_percent"])
    yield percent(row["gap_percent"], is_signed=False)

    yield f"{row['seconds']:.1f}"
    peak_bytes = row["peak_bytes"]
    yield f"{100 * peak_bytes / row['budget_bytes']:.1f}" if peak_bytes else row["status"]


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Returns each result of a baseline with ours at the same peak.

    A baseline's results with equal peaks count once.
    """
    ours = {
        (row["graph"], row["budget_bytes"]): row
        for row in rows
        if row["kind"] == "auto at a peer's peak"
    }

    pairs: dict[tuple[str, str, int], tuple[Row, Row]] = {}
    for row in rows:
        if (
            row["kind"] == "peer"
            and row["cost"] is not None
            and (row["graph"], row["peak_bytes"]) in ours
        ):
            pairs[row["graph"], row["peer"], row["peak_bytes"]] = (
                row,
                ours[row["graph"], row["peak_bytes"]],
            )

    return list(pairs.values())


def _show_peers(rows: Sequence[Row], least: dict[str, Row]) -> None:
    table = new_table(
        "Baselines at their own simulated peaks: % over keeping everything, geometric means",
        (
            "graph",
            "baseline",
            "points",
            "theirs",
            "ours",
            "theirs/ours",
            "ours above",
            "least peak",
            "s",
        ),
        num_left=2,
    )

    pairs = _pairs(rows)
    for name in least:
        for peer in PEERS:
            mine = [pair for pair in pairs if pair[0]["graph"] == name and pair[0]["peer"] == peer]
            tried = [
                row
                for row in rows
                if row["kind"] == "peer" and row["graph"] == name and row["peer"] == peer
            ]

            if cells := _peer_cells(mine, tried, least[name]["keep_all_bytes"]):
                table.add_row(name, peer, *cells)

    table.add_section()
    for peer in PEERS:
        if mine := [pair for pair in pairs if pair[0]["peer"] == peer]:
            table.add_row("all", peer, *_comparison(mine), "", "", style="bold")

    CONSOLE.print(table)
    CONSOLE.print()


def _peer_cells(
    pairs: Sequence[tuple[Row, Row]], tried: Sequence[Row], keep_all_bytes: int
) -> tuple[str, ...]:
    """Returns the cells of a baseline on a graph; none where there is nothing to say.

    `pairs` has its results beside ours, and `tried` all of its rows.
    """
    if pairs:
        lowest = min(theirs["peak_bytes"] for theirs, _ in pairs) / keep_all_bytes
        return (*_comparison(pairs), f"{100 * lowest:.1f} %", f"{mean_seconds(tried):.1f}")
    if tried and tried[0]["cost"] is None:
        reason = _reason_text(tried[0]["reason"])
        return ("0", "-", "-", "-", "-", reason, f"{mean_seconds(tried):.1f}")
    return ()


def _reason_text(reason: str) -> str:
    """Says in few words why a baseline has no schedule."""
    if "MILP" in reason:
        return "too large"
    return "no blocks" if "block" in reason else "none fits"


def _comparison(pairs: Sequence[tuple[Row, Row]]) -> tuple[str, str, str, str, str]:
    """Returns points, overheads (theirs, ours), cost ratio, and how often ours is above."""
    both = [(theirs, ours) for theirs, ours in pairs if ours["cost"] is not None]
    theirs_percent, ours_percent = (
        100 * (geometric_mean(1 + pair[side]["overhead_percent"] / 100 for pair in both) - 1)
        if both
        else None
        for side in (0, 1)
    )

    ratio = geometric_mean(theirs["cost"] / ours["cost"] for theirs, ours in both)
    above = (
        len(pairs)
        - len(both)
        + sum(ours["cost"] > theirs["cost"] * (1 + 1e-9) for theirs, ours in both)
    )

    return (
        str(len(pairs)),
        percent(theirs_percent),
        percent(ours_percent),
        f"{ratio:.4f}",
        str(above),
    )
