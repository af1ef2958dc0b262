"""Error messages about graph breaks.

They say where `torch.compile` cuts a step, and why no piece of it could be planned.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from remat.core.errors import BudgetError
from remat.torch_border.modules import has_backward_hook

OUT_OF_THE_PIECES = (
    "Run the code at that place as plain PyTorch, between the pieces: put it into a function under "
    "@torch.compiler.disable."
)
NOT_COMPILED = (
    "torch.compile ran none of the pieces of this planned step, so the step ran as plain PyTorch, "
    "and held as much memory. Either torch.compile is switched off (torch.compiler.set_stance, "
    "TORCHDYNAMO_DISABLE), or another thread was running a function compiled with "
    "fullgraph=True; until that returns, dynamo compiles nothing new in any thread (torch 2.13): "
    "run the two one after the other"
)


def nothing_compiled(module: nn.Module, breaks: Iterable[str]) -> str:
    """Returns the message for a step in which `torch.compile` finds no piece."""
    places = ", ".join(breaks)
    found = f"torch.compile finds no piece of {type(module).__name__} to plan"
    hooked = [name or "itself" for name, part in module.named_modules() if has_backward_hook(part)]

    if hooked:
        return (
            f"{found}: it captures nothing around a module with a backward hook, and "
            f"{', '.join(hooked)} has one ({places}). Remove the hook, or hook the parameters "
            "(parameter.register_hook), or move the code to plan into modules beside it"
        )

    if "sparse Tensor" in places:
        return (
            f"{found}: it captures nothing that reads a sparse tensor ({places}). Move the lines "
            "that read it into a function or module of their own, so that the rest is planned"
        )

    return (
        f"{found}: after a graph break inside of a loop or a `with` it leaves the whole function "
        "to plain Python. Move the loop's body into a function or module of its own, or the line "
        f"of the graph break out of the loop: {places}"
    )


def naming_breaks(error: BudgetError, breaks: Iterable[str]) -> BudgetError:
    """Returns the error with the places where the step is cut.

    What runs between the pieces is not planned, and may be the reason why nothing fits.
    """
    places = ", ".join(breaks)
    if not places:
        return error

    message = (
        f"{error} torch.compile cuts this step, and what runs between its pieces is not planned; "
        f"it cuts at: {places}"
    )
    return BudgetError(
        message,
        budget_bytes=error.budget_bytes,
        minimum_bytes=error.minimum_bytes,
        is_proved=error.is_proved,
    )


def break_text(reason: Any) -> str:
    """Returns why dynamo cut the graph, and at which line."""
    place = reason.user_stack[-1] if reason.user_stack else None
    where = f" ({place.filename.rsplit('/', 1)[-1]}:{place.lineno})" if place else ""
    return str(reason.reason.strip().split("\n")[0]) + where


def is_by_data(reason: Any) -> bool:
    """True where data decides which path the step takes after the cut."""
    return any(word in reason.reason.lower() for word in _DATA_WORDS)


# words in the reasons of graph breaks at which data decides the path
_DATA_WORDS = ("data-dependent", "dynamic shape", "generic_jump", "item()")
