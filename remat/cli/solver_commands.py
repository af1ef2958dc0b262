"""The commands that solve graphs: `remat solve`, `frontier`, `bench` and `sweep`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from remat.cli.arguments import (
    Refused,
    bench_graphs,
    budget_bytes,
    check_output,
    free_order_solver,
    solver_named,
)
from remat.cli.options import (
    EXIT_CODES,
    MOST_POINTS,
    BudgetOption,
    Format,
    FormatOption,
    GapOption,
    InstanceArgument,
    SolverOption,
    TimeLimitOption,
    WithoutOption,
)
from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.instance import read_instance
from remat.core.outline import outline
from remat.core.schedule import keep_all_peak
from remat.core.solution import Solution
from remat.solvers import SOLVER_NAMES


def solve(
    instance: InstanceArgument,
    budget: BudgetOption,
    solver: SolverOption = "auto",
    time_limit: TimeLimitOption = 60.0,
    gap: GapOption = 0.005,
    free_order: Annotated[
        bool,
        typer.Option("--free-order", help="Let first computations leave the order of the file."),
    ] = False,
    without: WithoutOption = [],  # noqa: B006  # typer reads it; nothing changes it
    output: Annotated[Path | None, typer.Option(help="Save the solution here.")] = None,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Find the schedule that fits a budget at the least extra compute.

    Exit status 0 solved, 2 bad input, 3 proved infeasible, 4 stopped before
    anything was found.

    Example:  remat solve graph.json --budget 8GiB

    Example:  remat solve graph.json --budget 60% --solver chen-sqrt --format json
    """
    from remat.look.tables import show_solution, solution_record, write_json

    if free_order:
        solver = free_order_solver(solver)
    if without and solver != "auto":
        raise Refused(f"--without: only the solver 'auto' has techniques, and {solver!r} was given")
    if output is not None:
        check_output(output)

    graph = read_instance(instance)
    solution = _solve(
        graph,
        budget_bytes(budget, graph),
        solver,
        f"{instance.stem} within {budget}",
        time_limit_s=time_limit,
        gap=gap,
        **({"without": tuple(without)} if without else {}),
    )

    if output is not None:
        replace(solution, outline=outline(graph)).save(output)
    if format_ is Format.JSON:
        write_json(solution_record(solution))
    else:
        show_solution(graph, solution)
    raise typer.Exit(EXIT_CODES[solution.status])


def frontier(
    instance: InstanceArgument,
    points: Annotated[
        int, typer.Option(min=2, max=MOST_POINTS, help="How many budgets to solve for.")
    ] = 10,
    solver: SolverOption = "auto",
    time_limit: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="Seconds for each budget.")
    ] = 10.0,
    gap: GapOption = 0.005,
    output: Annotated[
        Path | None, typer.Option(help="Save the solutions here; `remat plot` reads them.")
    ] = None,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Solve for several budgets: the least extra compute for each size of memory.

    Example:  remat frontier graph.json --points 12 --output frontier.json

    Example:  remat plot graph.json frontier.json --picture tradeoff --output frontier.png
    """
    from remat.core import serialize
    from remat.look.tables import progress, show_solutions, solution_record, write_json

    if output is not None:
        check_output(output)

    graph = read_instance(instance)
    method = solver_named(solver, time_limit_s=time_limit, gap=gap)
    with progress(f"{solver}, {instance.stem} for {points} budgets"):
        from remat.solvers.auto.frontier import frontier_solutions

        solutions = frontier_solutions(graph, points, method)

    if output is not None:
        serialize.save(solutions, output)
    if format_ is Format.JSON:
        write_json([{"budget": s.budget_bytes, **solution_record(s)} for s in solutions])
    else:
        keep_all = keep_all_peak(graph)
        show_solutions(graph, [(f"{s.budget_bytes / max(1, keep_all):.0%}", s) for s in solutions])


def bench(
    instances: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[INSTANCE.json]...", help="By default a small transformer."),
    ] = None,
    budget: BudgetOption = "75%",
    solver: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="May be repeated; by default every solver runs."),
    ] = None,
    time_limit: TimeLimitOption = 10.0,
    gap: GapOption = 0.005,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Compare solvers on the same graphs and budget.

    Example:  remat bench graph.json --budget 70% --solver auto --solver chen-sqrt --solver milp
    """
    from remat.look.tables import show_solutions, solution_record, write_json

    graphs, names = bench_graphs(instances or []), list(solver or SOLVER_NAMES)
    for method in names:
        solver_named(method)

    records = []
    for name, graph in graphs:
        answers = list(
            _answers(
                graph, budget_bytes(budget, graph), names, name, time_limit_s=time_limit, gap=gap
            )
        )
        records += [{"instance": name, "name": label, **solution_record(s)} for label, s in answers]
        if format_ is Format.TABLE:
            show_solutions(graph, answers, title=f"{name}, budget {budget}")

    if format_ is Format.JSON:
        write_json(records)


def sweep(
    instances: Annotated[
        list[Path],
        typer.Argument(
            metavar="INSTANCE.json...", help="Saved graphs, or objects with cost, size and edges."
        ),
    ],
    budget: Annotated[
        list[str],
        typer.Option(
            metavar="SIZE",
            help="May be repeated; a percentage is of each graph's peak of keeping everything.",
        ),
    ],
    solver: SolverOption = "auto",
    time_limit: TimeLimitOption = 60.0,
    gap: GapOption = 0.005,
    jobs: Annotated[int, typer.Option(help="Parallel solves; -1 for one per core.")] = -1,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Solve several graphs for several budgets in parallel.

    Example:  remat sweep a.json b.json --budget 80% --budget 60% --jobs 4
    """
    from remat.face.sweep import sweep as run_sweep
    from remat.look.tables import progress, show_solutions, solution_record, write_json

    if jobs == 0:
        raise Refused("--jobs 0: give the number of parallel solves, or -1 for one per core")

    graphs, method = bench_graphs(instances), solver_named(solver, time_limit_s=time_limit, gap=gap)
    for _, graph in graphs:
        for size in budget:
            budget_bytes(size, graph)
    with progress(f"{solver}, {len(graphs)} graphs for {len(budget)} budgets"):
        rows = run_sweep([graph for _, graph in graphs], budget, solver=method, n_jobs=jobs)
    answers = [list(zip(budget, row, strict=True)) for row in rows]

    if format_ is Format.TABLE:
        for (name, graph), row in zip(graphs, answers, strict=True):
            show_solutions(graph, row, title=name)
        return

    records = [
        {"instance": name, "budget": size, **solution_record(s)}
        for (name, _), row in zip(graphs, answers, strict=True)
        for size, s in row
    ]
    write_json(records)


def _solve(graph: Graph, size_bytes: int, solver: str, text: str, **options: Any) -> Solution:
    from remat.look.tables import progress

    with progress(f"{solver}, {text}", graph.cost_s) as show:
        return solver_named(solver, progress=show, **options).solve(graph, budget_bytes=size_bytes)


def _answers(
    graph: Graph, size_bytes: int, solvers: list[str], text: str, **options: float
) -> Iterator[tuple[str, Solution]]:
    for solver in solvers:
        try:
            yield solver, _solve(graph, size_bytes, solver, text, **options)
        # a solver may refuse this graph; the others still run
        except SolverError as reason:
            typer.echo(f"remat: {solver}: {reason}", err=True)
