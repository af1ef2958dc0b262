"""Backwards, steps and budgets that are refused, and what the error says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import remat
from tests.support.planned import planned
from tests.support.small_models import MLP, MODELS, SCHEDULES, assert_same_steps

pytestmark = pytest.mark.usefixtures("fresh_torch")


@pytest.mark.parametrize("schedule", ["keep all", "keep nothing"])
def test_a_graph_that_is_kept_is_refused(schedule: str) -> None:
    """The first backward may overwrite what is saved.

    A second one that reads it must never go unnoticed.
    """
    model, x = MODELS["mlp"]()
    loss = planned(model, SCHEDULES[schedule])(x)
    with pytest.raises(remat.TraceError, match="retain_graph"):
        loss.backward(retain_graph=True)

    model(x).backward()
    loss = model(x)
    loss.backward()
    with pytest.raises(remat.TraceError, match="second backward runs through one planned step"):
        loss.backward()


def test_a_gradient_of_a_gradient_is_refused() -> None:
    model, x = MODELS["mlp"]()
    planned(model)
    x.requires_grad_()
    loss = model(x)
    with pytest.raises(remat.TraceError, match="create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_parameter_changed_between_forward_and_backward_is_noticed() -> None:
    model, x = MODELS["mlp"]()
    loss = planned(model)(x)
    with torch.no_grad():
        model.get_parameter("up.weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_with_nothing_to_differentiate_is_refused() -> None:
    model, x = MODELS["mlp"]()
    model.requires_grad_(False)
    with pytest.raises(remat.TraceError, match="nothing to differentiate"):
        planned(model)(x)
    with pytest.raises(remat.TraceError, match="nothing to differentiate"):
        remat.trace(model, (x,))


class Argmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best: torch.Tensor = self.linear(x).argmax(-1)
        return best


def test_a_step_whose_outputs_have_no_gradient_is_refused() -> None:
    with pytest.raises(remat.TraceError, match="nothing to differentiate"):
        planned(Argmax())(torch.randn(4, 8))


def test_a_budget_that_cant_be_met_says_what_can() -> None:
    model, x = MODELS["mlp"]()
    plain = copy.deepcopy(model)
    with pytest.raises(remat.BudgetError) as caught:
        remat.checkpoint(model, 1000, time_limit_s=5.0)(x)

    minimum = caught.value.minimum_bytes
    assert minimum > 1000
    assert_same_steps(remat.checkpoint(model, minimum, time_limit_s=5.0), plain, x)
    assert remat.report(model).solution.peak_bytes <= minimum


@pytest.mark.parametrize("budget", ["8 bananas", "-1GiB", "0%", -3, 1.5])
def test_a_malformed_budget_is_refused_at_once(budget: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="budget"):
        remat.checkpoint(MLP(), budget)


@pytest.mark.parametrize("solver", [None, 3, remat.make_solver])
def test_what_is_no_solver_is_refused_at_once(solver: Any) -> None:
    with pytest.raises(TypeError, match="give a name from remat"):
        remat.checkpoint(MLP(), "1GiB", solver=solver)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("auto", {"threads": 0}),
        ("auto", {"rounds": 0}),
        ("auto", {"gap": -1.0}),
        ("auto", {"time_limit_s": 0.0}),
        ("free-order", {"time_limit_s": 0.0}),
        ("free-order", {"gap": -0.1}),
        ("milp", {"time_limit_s": 0.0}),
        ("milp", {"gap": float("nan")}),
        ("milp", {"threads": -1}),
        ("milp-pulp", {"gap": -1.0}),
        ("exhaustive", {"most_states": 0}),
        ("lp-rounding", {"num_samples": 0}),
        ("revolve", {"num_slots": 0}),
        ("pytorch-knapsack", {"method": "DP"}),
    ],
)
def test_options_out_of_range_are_refused_at_once(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.* was given; give"):
        remat.make_solver(name, **options)


def test_costs_measured_here_are_not_those_of_a_given_device() -> None:
    for executor in ("eager", "inductor"):
        with pytest.raises(ValueError, match='costs="profile" times operators on this machine'):
            remat.trace(
                MLP(), (torch.randn(2, 8),), device="cpu", costs="profile", executor=executor
            )


def test_only_modules_and_functions_are_planned() -> None:
    number: Any = 3
    with pytest.raises(TypeError, match="Module or a function is needed, and int was given"):
        remat.checkpoint(number, "1GiB")
    with pytest.raises(TypeError, match="Module or a function"):
        remat.trace(number, (torch.randn(2),))
