"""Models, and steps whose backward runs twice or is differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from tests.support.planned import UNLIMITED, Given, Steps, keep_nothing

MARKS = [
    pytest.mark.usefixtures("quick_first_step"),
    # torch's own warnings: about what dynamo reads, and how it handles a custom function
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True"),
]
"""Marks of tests that run a backward twice, or differentiate one."""


class Changes(nn.Module):
    """Dropout, batch norm, an activation in place, and a buffer that is changed in place."""

    scale: torch.Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.drop, self.leave = nn.Dropout(0.5), nn.Linear(width, 1)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (self.drop(self.norm(self.enter(x))) + self.scale).sin()
        self.scale.mul_(3)
        loss: torch.Tensor = self.leave(hidden.relu_()).square().sum()
        return loss


class Tied(nn.Module):
    """Reads its weight and its input twice, and scales by a number that changes each time."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear, self.rate = nn.Linear(width, width), 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rate += 0.25
        hidden = (self.linear(x) * self.rate).tanh()
        loss: torch.Tensor = (self.linear(hidden).sin() + x).square().mean()
        return loss


def retained(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The gradient penalty of WGAN-GP, beside a loss that is planned."""
    mixed = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed), mixed, create_graph=True)
    ((slope.norm(2) - 1).square() + model(x)).backward()
    assert mixed.grad is not None
    return mixed.grad


def hessian_product(model: nn.Module, x: torch.Tensor) -> Any:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(x), parameters, create_graph=True)
    along = torch.stack([(each * each.detach().cos()).sum() for each in gradients]).sum()
    return torch.autograd.grad(along, parameters, allow_unused=True)


def left_by(model: nn.Module, run: Callable[..., Any], x: torch.Tensor, seed: int) -> list[Any]:
    """Everything that a step leaves."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    returned = run(model, x)
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [returned, gradients, [b.clone() for b in model.buffers()], torch.get_rng_state()]


def plain_where_needed(model: Any, steps_of: Steps = keep_nothing, **options: Any) -> Any:
    options = {"solver": Given(steps_of), "costs": "flops", **options}
    return remat.checkpoint(model, UNLIMITED, on_unsupported="plain", **options)


def planned_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x)
    loss.backward()
    return loss


class Field(nn.Module):
    """A function of points, as physics-informed networks are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.layers(x)
        return values


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()
