"""`remat doctor`: checks the installation, or whether a model's step fits on a device."""

from __future__ import annotations

import textwrap
from typing import Annotated, Any

import typer

from remat.cli.arguments import Refused, dtype_of, refused
from remat.cli.factories import FACTORY_HELP, made_by, own_step
from remat.cli.options import (
    EXIT_CODES,
    AutocastOption,
    ExecutorOption,
    Format,
    FormatOption,
    TimeLimitOption,
)
from remat.core.budget import check_budget, parse_budget

_MARK = {True: "[green]ok  [/]", False: "[red]BAD [/]", None: "    "}
_FINDING = 17  # columns before the detail of a finding


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
            help="The device to fit on, such as H100; by default this machine's.",
        ),
    ] = "",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory that may be used; by default the device's, a sixteenth kept free.",
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
    accumulate: Annotated[
        bool, typer.Option("--accumulate", help="Gradients of earlier micro-batches are held too.")
    ] = False,
    autocast: AutocastOption = None,
    most_overhead: Annotated[
        float | None,
        typer.Option(metavar="PERCENT", help="Exit with 1 if the plan's overhead is larger."),
    ] = None,
    time_limit: TimeLimitOption = 20.0,
    executor: ExecutorOption = "eager",
    format_: FormatOption = Format.TABLE,
) -> None:
    """Check this installation, or whether a model's training step fits on a device.

    Without a model: checks versions, devices, solvers and the cache, and solves
    a small problem. Exit status 0 if all is well, 1 if something has to be repaired.

    With a model: nothing is allocated and no device is needed. Exit status
    0 it fits, 1 it fits but the overhead is above --most-overhead,
    2 bad input, 3 proved not to fit, 4 no plan was found.

    Example:  remat doctor my_project.model:make --device H100 --optimizer adamw
    """
    if factory is None:
        if device or budget or reserve or accumulate or autocast or most_overhead is not None:
            raise Refused(f"these options are for a model, and none was given: {FACTORY_HELP}")
        raise typer.Exit(0 if _is_well() else 1)

    if budget is not None:
        with refused("--budget"):
            check_budget(budget)
    with refused("--reserve"):
        reserve_bytes = parse_budget(reserve) if reserve else 0

    fit = _fit(
        factory,
        device=device,
        budget=budget,
        reserve_bytes=reserve_bytes,
        optimizer=optimizer,
        is_accumulating=accumulate,
        autocast=dtype_of(autocast),
        time_limit_s=time_limit,
        executor=executor,
    )
    _write(fit, format_)
    raise typer.Exit(_exit_status(fit, most_overhead))


def _is_well() -> bool:
    """Writes the findings of `examine`; returns whether nothing has to be repaired."""
    from rich.console import Console

    from remat.fit.doctor import examine

    console, is_well = Console(), True
    for finding in examine():
        console.print(f"{_MARK[finding.is_ok]} [bold]{finding.name:<11}[/]", end="")
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
    return is_well


def _fit(factory: str, **options: Any) -> Any:
    from remat.look.tables import progress

    with progress(f"tracing and planning {factory}"):
        made = made_by(factory)
        from remat.face.step_function import as_step
        from remat.fit.question import Question

        with own_step(factory):
            question = Question.of(as_step(made.model, made.args, made.kwargs), **options)
            return question.answer(question.trace(made.args, made.kwargs))


def _write(fit: Any, format_: Format) -> None:
    from remat.look.tables import write_json

    if format_ is Format.JSON:
        write_json(fit.record())
    else:
        typer.echo(str(fit))


def _exit_status(fit: Any, most_overhead: float | None) -> int:
    is_over = most_overhead is not None and bool(fit) and 100 * fit.overhead > most_overhead
    return 1 if is_over else EXIT_CODES[fit.status]
