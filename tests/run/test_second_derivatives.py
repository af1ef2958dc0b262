"""Derivatives of derivatives: of fields, in inner loops, and in the penalty of a GAN."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import remat
from tests.support.planned import assert_same, planned
from tests.support.second_backwards import MARKS, Changes, Field, left_by, plain_where_needed

pytestmark = MARKS


def third_derivatives(model: nn.Module, x: torch.Tensor) -> Any:
    points = x.clone().requires_grad_()
    values = model(points)
    for along in range(3):
        (slope,) = torch.autograd.grad(values.sum(), points, create_graph=True)
        values = slope[:, along]
    values.square().mean().backward()
    return points.grad


def learned_to_learn(model: nn.Module, x: torch.Tensor) -> None:
    """The inner loop of MAML: parameters that are made of parameters."""
    adapted: dict[str, torch.Tensor] = dict(model.named_parameters())
    for _ in range(2):
        loss = functional_call(model, adapted, (x,)).square().mean()
        slopes = torch.autograd.grad(loss, list(adapted.values()), create_graph=True)
        pairs = zip(adapted.items(), slopes, strict=True)
        adapted = {name: value - 0.1 * slope for (name, value), slope in pairs}
    functional_call(model, adapted, (x.flip(0),)).square().mean().backward()


def jacobians(model: nn.Module, x: torch.Tensor) -> Any:
    def total(x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = model(x).sum()
        return values

    return [
        torch.autograd.functional.jacobian(model, x),
        torch.autograd.functional.jacobian(model, x, vectorize=True),
        torch.autograd.functional.hessian(total, x),
        torch.autograd.functional.hessian(total, x, vectorize=True),
    ]


@pytest.mark.parametrize("run", [third_derivatives, jacobians])
def test_other_derivatives_equal_those_of_plain_pytorch(run: Callable[..., Any]) -> None:
    model = Field()
    plain = copy.deepcopy(model)
    plain_where_needed(model)
    for seed in range(2):
        x = torch.randn(4, 8)
        assert_same(left_by(model, run, x, seed), left_by(plain, run, x, seed))


def test_second_derivatives_agree_with_finite_differences() -> None:
    model = plain_where_needed(Field().double())
    x = torch.randn(2, 8, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(model, x)
    assert torch.autograd.gradgradcheck(model, x)


def with_its_slope(model: nn.Module, x: torch.Tensor) -> None:
    points = x.clone().requires_grad_()
    values = model(points)
    (slope,) = torch.autograd.grad(values.sum(), points, create_graph=True)
    (slope.square().sum() + F.softplus(values).sum()).backward()


@pytest.mark.parametrize("run", [with_its_slope, learned_to_learn])
def test_losses_of_a_result_and_its_gradient_agree_up_to_rounding(
    run: Callable[..., Any],
) -> None:
    """Plain PyTorch sums both gradients on the way; here they are summed at the parameters."""
    model = Field()
    plain = copy.deepcopy(model)
    plain_where_needed(model)
    for seed in range(2):
        x = torch.randn(4, 8)
        got, want = left_by(model, run, x, seed), left_by(plain, run, x, seed)
        torch.testing.assert_close(got, want)


def test_many_gradients_at_once_are_refused() -> None:
    """Naive: an error of torch's about the memory of a batched tensor."""
    model = planned(Field())
    with pytest.raises(remat.TraceError, match="is_grads_batched=True"):
        torch.autograd.functional.jacobian(model, torch.randn(4, 8), vectorize=True)


def gan_losses(critic: nn.Module, generator: nn.Module) -> list[float]:
    """WGAN-GP, with the critic's loss kept while the generator's step runs through it as well."""
    rates: Any = {"lr": 0.01, "betas": (0.5, 0.9)}
    for_critic = torch.optim.Adam(critic.parameters(), **rates)
    for_generator = torch.optim.Adam(generator.parameters(), **rates)

    torch.manual_seed(0)
    found = []
    for _ in range(4):
        real, made = torch.randn(4, 8), generator(torch.randn(4, 8))
        mixed = torch.lerp(real, made.detach(), torch.rand(4, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed), mixed, create_graph=True)
        loss = critic(made.detach()) - critic(real) + (slope.norm(2, 1) - 1).square().mean()

        for_critic.zero_grad()
        loss.backward()
        for_critic.step()

        loss_of_made = -critic(made)
        for_generator.zero_grad()
        loss_of_made.backward()
        for_generator.step()
        found += [loss.item(), loss_of_made.item()]
    return found


def test_a_gan_trains_as_in_plain_pytorch() -> None:
    critic, generator = Changes(), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    plain = copy.deepcopy(critic)
    plain_where_needed(critic)
    losses = gan_losses(critic, copy.deepcopy(generator))
    assert losses == gan_losses(plain, generator)
    assert_same([*critic.parameters()], [*plain.parameters()])
