"""The warning and the errors about memory that a step holds outside of the planned call."""

from __future__ import annotations

from torch import nn

from remat.core.budget import describe_bytes
from remat.core.errors import BudgetError

_FUNCTION = "step = remat.checkpoint(lambda x, y: criterion(model(x), y), budget=...)"
_REMEDY = (
    "Raise the budget to at least that, take a smaller batch, or plan the whole step, as a "
    f"function that returns the loss: {_FUNCTION} (docs/step-functions.md)"
)


def outside_is_over(
    module: nn.Module, excess: int, beside_bytes: int, num_calls: int, is_fixed: bool
) -> str:
    """Returns the warning for a step that held more than the budget of the module it calls."""
    calls = f"{num_calls} calls of the module before the backward" if num_calls > 1 else "its loss"
    remedy = (
        "This plan was given and is not changed: solve for a budget smaller by that much."
        if is_fixed
        else "The next plan leaves room for that."
    )

    return (
        f"the whole step held {describe_bytes(excess)} more than the budget: outside of the "
        f"planned call of {type(module).__name__} it holds {describe_bytes(beside_bytes)}, such as "
        f"{calls}. {remedy} A function that returns the loss is planned as a whole, with less "
        f"overhead: {_FUNCTION} (docs/step-functions.md)"
    )


def nothing_fits_beside(
    module: nn.Module, budget_bytes: int, needed_bytes: int, beside_bytes: int
) -> BudgetError:
    """Returns the error for a step that exceeds the budget even with the plan of least peak."""
    return BudgetError(
        f"even with the plan of least peak for {type(module).__name__}, the whole step held "
        f"{describe_bytes(needed_bytes)}, above the budget of {describe_bytes(budget_bytes)}: "
        f"{describe_bytes(beside_bytes)} of it were held outside of the planned call (its loss, or "
        f"other calls before the backward). {_REMEDY}",
        budget_bytes=budget_bytes,
        minimum_bytes=needed_bytes,
        is_proved=False,
    )


def nothing_fits_outside(module: nn.Module, error: BudgetError, loss_bytes: int) -> BudgetError:
    """Returns the error if no plan leaves enough for the loss; `error` is the solver's."""
    return BudgetError(
        f"the whole step does not fit in the budget of {describe_bytes(error.budget_bytes)}: it "
        f"was measured to hold {describe_bytes(loss_bytes)} outside of {type(module).__name__} "
        f"while its loss is computed, and with that, the least budget known to work is "
        f"{describe_bytes(error.minimum_bytes)}. {_REMEDY}",
        budget_bytes=error.budget_bytes,
        minimum_bytes=error.minimum_bytes,
        is_proved=error.is_proved,
    )
