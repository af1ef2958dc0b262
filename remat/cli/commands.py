"""The command line (`python -m remat` or `remat`), and its commands `demo` and `trace`.

Exit status: 0 done, 2 bad input, 3 proved infeasible, 4 stopped before anything was found.
Commands import what they need when they run, so that `solve` starts without torch.
"""

from __future__ import annotations

import errno
import importlib.metadata
import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from remat.cli.arguments import check_output, dtype_of
from remat.cli.doctor_command import doctor
from remat.cli.factories import FACTORY_HELP, FactoryFailed, made_by, own_step
from remat.cli.options import AutocastOption, ExecutorOption
from remat.cli.picture_commands import export, plot, report
from remat.cli.solver_commands import bench, frontier, solve, sweep
from remat.core.errors import BudgetError, RematError


class _OneLineErrors(TyperGroup):
    """Turns errors that the user can correct into one line on stderr and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of a pipe has ended: click exits quietly
                raise

            text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            typer.echo(f"remat: {text}", err=True)
            raise typer.Exit(2) from None
        except RematError as error:
            text = str(error)
            if not isinstance(error, FactoryFailed):  # its message has several lines
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

    [bold]Exit status:[/]  0 done, 2 bad input or a factory whose code fails,
    3 proved that nothing fits, 4 stopped before anything was found. Doctor also
    exits with 1 if something has to be repaired, or if the overhead is above
    --most-overhead.
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
            metavar="NAME", help="Trace for this device, such as H100; it need not be present."
        ),
    ] = "",
    autocast: AutocastOption = None,
    executor: ExecutorOption = "eager",
) -> None:
    """Record the training step of a model as a graph of operators and values.

    Nothing is allocated and the model does not change. Exit status 0 done;
    2 bad input: there is no such factory, it failed, or its step can't be traced.

    Example:  remat trace my_project.model:make --output graph.json

    Example:  remat trace train.py:make --output graph.json
    """
    from remat.look.tables import progress, show_graph

    check_output(output)
    with progress(f"tracing {factory}"):
        made = made_by(factory)
        from remat.face.api import trace as trace_model

        with own_step(factory):
            graph = trace_model(
                made.model,
                made.args,
                made.kwargs,
                costs=costs,
                device=device,
                autocast=dtype_of(autocast),
                executor=executor,
            )

    graph.save(output)
    show_graph(graph)
    typer.echo(f"saved to {output}")


for _command in (solve, frontier, plot, report, export, bench, sweep, doctor):
    app.command()(_command)


def main() -> None:
    """Runs the command line; on a terminal without Unicode, `?` stands for other characters."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="remat")
