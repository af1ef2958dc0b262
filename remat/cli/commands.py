"""The command line: `python -m remat`, and the script `remat`.

Exit status: 0 done, 2 bad input, 3 proved infeasible, 4 stopped with nothing found.
Commands import what they need when they run, so that `solve` starts without torch.
"""

from __future__ import annotations

import errno
import importlib.metadata
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from remat.cli.arguments import (
    Refused,
    bench_graphs,
    budget_bytes,
    check_output,
    free_order_solver,
    keep_all_bytes,
    solver_named,
)
from remat.cli.factories import FACTORY_HELP, FactoryFailed, made_by, own_step
from remat.cli.options import (
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
from remat.cli.picture_commands import export, plot, report
from remat.core.budget import parse_budget
from remat.core.errors import BudgetError, RematError, SolverError
from remat.core.graph import Graph
from remat.core.instance import read_instance
from remat.core.solution import Solution, Status
from remat.solvers import SOLVER_NAMES

_FINDING = 17  # columns before what `doctor` says of a thing
EXIT_CODES = {Status.OPTIMAL: 0, Status.FEASIBLE: 0, Status.INFEASIBLE: 3, Status.NO_SOLUTION: 4}


class _OneLineErrors(TyperGroup):
    """Turns errors that the user can correct into one line on stderr and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno == errno.EPIPE:  # nobody reads on: click ends quietly
                raise
            text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            typer.echo(f"remat: {text}", err=True)
            raise typer.Exit(2) from None
        except RematError as error:
            text = str(error)
            if not isinstance(error, FactoryFailed):  # which is somebody's own, with its line
                text = " ".join(text.split())
            typer.echo(f"remat: {text}", err=True)
            is_proved = isinstance(error, BudgetError) and error.is_proved
            raise typer.Exit(
                3 if is_proved else 4 if isinstance(error, BudgetError) else 2
            ) from None


app = typer.Typer(
    cls=_OneLineErrors, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"remat {importlib.metadata.version('remat')}")
        raise typer.Exit


@app.callback()
def _remat(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and stop.", is_eager=True, callback=_show_version
        ),
    ] = False,
) -> None:
    """Train PyTorch models inside a memory budget, at provably near-minimal extra compute.

    [bold]Try it:[/]  remat demo

    [bold]Plan for a model:[/]  remat trace my_project.model:make --output graph.json
    remat solve graph.json --budget 60% --output plan.json
    remat plot graph.json plan.json --output plan.png

    [bold]Exit status:[/]  0 done, 2 bad input (also where the code of a factory fails), 3 proved
    that nothing fits, 4 stopped with nothing found; of doctor 1, where something needs repair or
    more overhead is needed than was asked for.
    """


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the pictures and numbers.")] = Path(
        "demo"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Training steps to run each way.")] = 20,
) -> None:
    """Train a small model with and without a budget; compare memory, time and gradients.

    Example:  remat demo --output /tmp/demo
    """
    from remat.cli.demo import run_demo

    run_demo(output, steps)


@app.command()
def trace(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="FACTORY",
            help=FACTORY_HELP,
        ),
    ],
    output: Annotated[Path, typer.Option(help="Where the graph is saved.")] = Path("graph.json"),
    costs: Annotated[
        str, typer.Option(help="Cost model: flops, profile, roofline, or roofline:DEVICE.")
    ] = "roofline",
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Record it as a device would run it, such as H100, there or not."
        ),
    ] = "",
) -> None:
    """Record the training step of a model as a graph of operators and values.

    Nothing is allocated and the model does not change. Exit status 0 done, 2 bad input: no such
    factory, or it failed, or its step can't be traced.

    Example:  remat trace my_project.model:make --output graph.json

    Example:  remat trace train.py:make --output graph.json
    """
    from remat.look.tables import progress, show_graph

    check_output(output)
    with progress(f"tracing {factory}"):
        made = made_by(factory)
        from remat.face.api import trace as trace_model

        with own_step(factory):
            graph = trace_model(made.model, made.args, made.kwargs, costs=costs, device=device)
    graph.save(output)
    show_graph(graph)
    typer.echo(f"saved to {output}")


@app.command()
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
    without: WithoutOption = [],  # noqa: B006  # typer reads it, and nothing changes it
    output: Annotated[Path | None, typer.Option(help="Save the solution here.")] = None,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Find the schedule that fits a budget at the least extra compute.

    Exit status 0 solved, 3 proved infeasible, 4 stopped with nothing found, 2 bad input.

    Example:  remat solve graph.json --budget 8GiB

    Example:  remat solve graph.json --budget 60% --solver chen-sqrt --format json
    """
    from remat.look.tables import show_solution, solution_record, write_json

    if free_order:
        solver = free_order_solver(solver)
    if without and solver != "auto":
        raise Refused(f"--without: techniques are those of auto, and the solver is {solver!r}")
    if output is not None:
        check_output(output)
    graph = read_instance(instance)
    solution = _solve(
        graph,
        budget_bytes(budget, graph),
        solver,
        f"{instance.stem} in {budget}",
        time_limit_s=time_limit,
        gap=gap,
        without=tuple(without),
    )
    if output is not None:
        solution.save(output)
    if format_ is Format.JSON:
        write_json(solution_record(solution))
    else:
        show_solution(graph, solution)
    raise typer.Exit(EXIT_CODES[solution.status])


@app.command()
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
    """Solve for many budgets: what each size of memory costs in compute.

    Example:  remat frontier graph.json --points 12 --output frontier.json

    Example:  remat plot graph.json frontier.json --picture tradeoff --output frontier.png
    """
    from remat.core import serialize
    from remat.look.tables import progress, show_solutions, solution_record, write_json

    if output is not None:
        check_output(output)
    graph = read_instance(instance)
    method = solver_named(solver, time_limit_s=time_limit, gap=gap)
    with progress(f"{solver}, {instance.stem} in {points} budgets"):
        from remat.solvers.auto.frontier import frontier_solutions

        solutions = frontier_solutions(graph, points, method)
    if output is not None:
        serialize.save(solutions, output)
    if format_ is Format.JSON:
        write_json([{"budget": s.budget_bytes, **solution_record(s)} for s in solutions])
    else:
        keep_all = keep_all_bytes(graph)
        show_solutions(graph, [(f"{s.budget_bytes / max(1, keep_all):.0%}", s) for s in solutions])


for _command in (plot, report, export):
    app.command()(_command)


@app.command()
def bench(
    instances: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[INSTANCE.json]...", help="Without any, a small transformer."),
    ] = None,
    budget: BudgetOption = "75%",
    solver: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Repeat it; without it, every solver runs."),
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


@app.command()
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
            help="Repeat it; a percentage is one of keeping everything in each graph.",
        ),
    ],
    solver: SolverOption = "auto",
    time_limit: TimeLimitOption = 60.0,
    gap: GapOption = 0.005,
    jobs: Annotated[int, typer.Option(help="Solves at the same time; -1 for one a core.")] = -1,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Solve many graphs for many budgets, side by side.

    Example:  remat sweep a.json b.json --budget 80% --budget 60% --jobs 4
    """
    from remat.face.sweep import sweep as run_sweep
    from remat.look.tables import progress, show_solutions, solution_record, write_json

    if jobs == 0:
        raise Refused("--jobs 0: give the number of solves at the same time, or -1 for one a core")
    graphs, method = bench_graphs(instances), solver_named(solver, time_limit_s=time_limit, gap=gap)
    for _, graph in graphs:
        for size in budget:
            budget_bytes(size, graph)
    with progress(f"{solver}, {len(graphs)} graphs in {len(budget)} budgets"):
        rows = run_sweep([graph for _, graph in graphs], budget, solver=method, n_jobs=jobs)
    if format_ is Format.JSON:
        records = [
            (name, zip(budget, row, strict=True))
            for (name, _), row in zip(graphs, rows, strict=True)
        ]
        write_json(
            [
                {"instance": name, "budget": size, **solution_record(s)}
                for name, pairs in records
                for size, s in pairs
            ]
        )
        return
    for (name, graph), row in zip(graphs, rows, strict=True):
        show_solutions(graph, zip(budget, row, strict=True), title=name)


@app.command()
def doctor(
    factory: Annotated[
        str | None,
        typer.Argument(
            metavar="[FACTORY]",
            help=f"{FACTORY_HELP} It may be on the meta device.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The device to fit on, such as H100; by default the one of this machine.",
        ),
    ] = "",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="What the step may hold; all of the device's memory by default."
        ),
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="adamw, sgd, momentum, adafactor, adamw-8bit, ..., none."
        ),
    ] = "adamw",
    reserve: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Kept free, for communication buffers and other libraries."
        ),
    ] = None,
    most_overhead: Annotated[
        float | None,
        typer.Option(metavar="PERCENT", help="Fail where the plan costs more extra compute."),
    ] = None,
    time_limit: TimeLimitOption = 20.0,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Look at this installation; or say whether a model's training step fits a device.

    Without a model: versions, devices, solvers, the cache, and a tiny problem solved. Exit status 0
    where all is well, 1 where something needs repair.

    With a model: nothing is allocated and no device is needed. Exit status 0 it fits, 1 it fits
    with more overhead than asked for, 3 proved not to fit, 4 no plan found, 2 bad input.

    Example:  remat doctor my_project.model:make --device H100 --optimizer adamw
    """
    from remat.look.tables import write_json

    if factory is not None:
        fit = _fit(
            factory,
            reserve,
            device=device,
            budget=budget,
            optimizer=optimizer,
            time_limit_s=time_limit,
        )
        if format_ is Format.JSON:
            write_json(fit.record())
        else:
            typer.echo(str(fit))
        is_dear = most_overhead is not None and bool(fit) and 100 * fit.overhead > most_overhead
        raise typer.Exit(1 if is_dear else EXIT_CODES[fit.status])
    from rich.console import Console

    from remat.fit.doctor import examine

    console, is_well = Console(), True
    for finding in examine():
        mark = {True: "[green]ok  [/]", False: "[red]BAD [/]", None: "    "}[finding.is_ok]
        console.print(f"{mark} [bold]{finding.name:<11}[/]", end="")
        lines = textwrap.wrap(
            finding.detail,
            max(40, console.width - _FINDING),
            break_long_words=False,
            break_on_hyphens=False,
        )
        console.print(
            f"\n{' ' * _FINDING}".join(lines), markup=False, highlight=False, soft_wrap=True
        )
        is_well = is_well and finding.is_ok is not False
    raise typer.Exit(0 if is_well else 1)


def main() -> None:
    """Runs the command line."""
    app(prog_name="remat")


def _fit(factory: str, reserve: str | None, **options: Any) -> Any:
    from remat.look.tables import progress

    with progress(f"tracing and planning {factory}"):
        made = made_by(factory)
        from remat.fit.question import Question

        with own_step(factory):
            question = Question.of(
                made.model, reserve_bytes=parse_budget(reserve) if reserve else 0, **options
            )
            return question.answer(question.trace(made.args, made.kwargs))


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
        # a graph outside one method's class is no answer of the others
        except SolverError as reason:
            typer.echo(f"remat: {solver}: {reason}", err=True)
