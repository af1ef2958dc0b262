"""What is said of memory that a step holds beside the call of a planned module."""

from __future__ import annotations

from torch import nn

from remat.core.budget import describe_bytes
from remat.core.errors import BudgetError

_FUNCTION = "step = remat.checkpoint(lambda x, y: criterion(model(x), y), budget=...)"


def outside_is_over(module: nn.Module, excess: int, beside: int, num_calls: int) -> str:
    """The warning where the step that a module is part of held more than the budget."""
    calls = f"{num_calls} calls of the module before the backward" if num_calls > 1 else "its loss"
    return (
        f"the budget is for the whole step, which held {describe_bytes(excess)} more: beside the "
        f"planned call of {type(module).__name__} it holds {describe_bytes(beside)} (such as "
        f"{calls}), for which the next plan leaves room. A function that returns the loss is "
        f"planned as a whole, at less cost: {_FUNCTION}"
    )


def nothing_fits_beside(
    module: nn.Module, budget_bytes: int, excess: int, beside: int
) -> BudgetError:
    """The error where the step is over its budget with the plan that holds the least, too."""
    needed = budget_bytes + excess
    return BudgetError(
        f"the plan of {type(module).__name__} that holds the least was run, and the whole step "
        f"held {describe_bytes(needed)}, above the budget of {describe_bytes(budget_bytes)}: "
        f"{describe_bytes(beside)} of it are beside the planned call (its loss, or other calls "
        "before the backward). Raise the budget to at least that, take a smaller batch, or plan "
        f"all of it by a function that returns the loss: {_FUNCTION}",
        budget_bytes=budget_bytes,
        minimum_bytes=needed,
        is_proved=False,
    )
