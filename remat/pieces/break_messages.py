"""What errors say of graph breaks.

Where `torch.compile` cuts a step, and why nothing of it is left to plan.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from remat.core.errors import BudgetError
from remat.torch_border.modules import has_backward_hook

NOT_COMPILED = (
    "torch.compile ran none of the pieces of this planned step, which so was plain, and held "
    "what plain PyTorch holds: it is switched off "
    "(torch.compiler.set_stance, TORCHDYNAMO_DISABLE), or another thread was inside of a "
    "function compiled with fullgraph=True, below "
    "which dynamo compiles nothing, in any thread (torch 2.13); run the two in turn"
)


def nothing_compiled(module: nn.Module, breaks: Iterable[str]) -> str:
    """The message for a step of which `torch.compile` finds no piece."""
    places = ", ".join(breaks)
    found = f"torch.compile finds no piece of {type(module).__name__} to plan"
    hooked = [name or "itself" for name, part in module.named_modules() if has_backward_hook(part)]
    if hooked:
        return (
            f"{found}: it captures nothing around a module with a backward hook, and "
            f"{', '.join(hooked)} has one ({places}). Remove the hook, or hook the parameters "
            "(parameter.register_hook), or put what is to be planned into modules beside it"
        )
    if "sparse Tensor" in places:
        return (
            f"{found}: it captures nothing that reads a sparse tensor ({places}). Take the line "
            "that does into a function or module of its own, so that the rest is planned"
        )
    return (
        f"{found}: a graph break inside of a loop or a `with` makes it leave the whole function "
        "around it to plain Python. Take the loop's body into a function or module of its own, or "
        f"the line that breaks out of the loop: {places}"
    )


def naming_breaks(error: BudgetError, breaks: Iterable[str]) -> BudgetError:
    """Returns the error with where the step is cut.

    What runs between its pieces is not planned, and may be what does not fit.
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
