"""The commands that show a plan: `remat plot`, `remat report` and `remat export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remat.cli.arguments import Refused, check_output, installed_extra, load_solutions, solver_named
from remat.cli.options import MOST_POINTS, InstanceArgument, Picture
from remat.core.instance import read_instance


def plot(
    instance: InstanceArgument,
    solutions: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PLAN.json]...", help="Solutions saved by solve or frontier."),
    ] = None,
    picture: Annotated[Picture, typer.Option(help="What to draw.")] = Picture.MEMORY,
    output: Annotated[Path, typer.Option(help="A .png, .svg or .pdf file.")] = Path("remat.png"),
) -> None:
    """Draw memory over time, a schedule, or the trade-off of memory against compute.

    Example:  remat plot graph.json plan.json --output memory.png

    Example:  remat plot graph.json plan.json --picture schedule --output schedule.svg
    """
    from remat.look.plot import PLOT_SUFFIXES, draw

    check_output(output)
    if output.suffix.lower() not in PLOT_SUFFIXES:
        raise Refused(f"--output {output}: a picture ends in {', '.join(PLOT_SUFFIXES)}")

    graph = read_instance(instance)
    loaded = [
        (path.stem, solution)
        for path in solutions or []
        for solution in load_solutions(path, graph)
    ]
    if picture is Picture.TRADEOFF and len(loaded) < 2:
        raise Refused(
            "--picture tradeoff needs at least two solutions; `remat frontier --output` saves them"
        )

    draw(graph, loaded, str(picture), output)
    typer.echo(f"saved to {output}")


def report(
    instance: InstanceArgument,
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A solution saved by solve.")],
    curve: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CURVE.json]",
            help="Solutions saved by frontier; without them, --points budgets are solved.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="The HTML file.")] = Path("report.html"),
    points: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_POINTS,
            help="Budgets to solve for the trade-off curve; below 2, there is none.",
        ),
    ] = 8,
    time_limit: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="Seconds for each budget of --points.")
    ] = 3.0,
    title: Annotated[str, typer.Option(help="Page title; by default the graph file's name.")] = "",
) -> None:
    """Write one HTML file that explains a plan, and needs no network.

    It shows costs, memory over time, the schedule, and why each value is saved
    or recomputed.

    Example:  remat report graph.json plan.json --output report.html

    Example:  remat report graph.json plan.json frontier.json
    """
    from remat.look.report import Report
    from remat.look.tables import progress

    check_output(output)
    graph = read_instance(instance)
    chosen = [solution for solution in load_solutions(plan, graph) if solution.is_solved]
    if not chosen:
        raise Refused(f"{plan} has no schedule to report on; `remat solve --output` saves one")

    solutions = load_solutions(curve, graph) if curve else []
    if not solutions and points > 1:
        with progress(f"auto, {instance.stem} for {points} budgets"):
            from remat.solvers.auto.frontier import frontier_solutions

            method = solver_named("auto", time_limit_s=time_limit)
            solutions = frontier_solutions(graph, points, method)

    with installed_extra():
        Report(graph, chosen[0]).save(output, curve=solutions, title=title or instance.stem)
    typer.echo(f"saved to {output}")


def export(
    instance: InstanceArgument,
    plan: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PLAN.json]", help="A solution saved by solve; by default everything is kept."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(help=".pickle for pytorch.org/memory_viz, .json for ui.perfetto.dev.")
    ] = Path("snapshot.pickle"),
) -> None:
    """Export the predicted step as a memory snapshot for PyTorch, or as a Chrome trace.

    Example:  remat export graph.json plan.json --output snapshot.pickle

    Example:  remat export graph.json plan.json --output trace.json
    """
    from remat.core.schedule import Schedule
    from remat.look.export import EXPORT_SUFFIXES, save

    check_output(output)
    if output.suffix not in EXPORT_SUFFIXES:
        raise Refused(f"--output {output}: an export ends in {' or '.join(EXPORT_SUFFIXES)}")

    graph = read_instance(instance)
    schedules = (
        [s.schedule for s in load_solutions(plan, graph) if s.schedule is not None]
        if plan
        else [Schedule.keep_all(graph)]
    )
    if not schedules:
        raise Refused(f"{plan} has no schedule to export; `remat solve --output` saves one")

    save(graph, schedules[0], output)
    typer.echo(f"saved to {output}")
