"""A backward that runs twice or is differentiated runs plain, and equals plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import remat
from tests.support.planned import Steps, assert_same, call_of, keep_all, keep_nothing
from tests.support.second_backwards import (
    MARKS,
    Changes,
    Sum,
    Tied,
    hessian_product,
    left_by,
    penalized,
    plain_where_needed,
    planned_step,
    retained,
)

pytestmark = MARKS


def penalized_within(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The penalty at an input that is itself computed."""
    given = x.clone().requires_grad_()
    mixed = given.sin()
    (slope,) = torch.autograd.grad(model(mixed), mixed, create_graph=True)
    ((slope.norm(2) - 1).square() + model(x)).backward()
    assert given.grad is not None
    return given.grad


def of_inputs(model: nn.Module, x: torch.Tensor) -> Any:
    """Gradients of the input alone, then of everything."""
    given = x.clone().requires_grad_()
    loss = model(given)
    found = torch.autograd.grad(loss, given, retain_graph=True)
    loss.backward()
    return found, given.grad


def squared_gradient(model: nn.Module, x: torch.Tensor) -> None:
    """The graph goes on into the gradients of the parameters themselves."""
    model(x).backward(create_graph=True)
    sizes = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None  # otherwise the second backward would add to gradients of the first
    torch.stack(sizes).sum().backward()


ASKED = [
    retained,
    penalized,
    penalized_within,
    hessian_product,
    of_inputs,
    squared_gradient,
]


# where what was asked for ends with the backward of the plan, two plans are tried
@pytest.mark.parametrize(
    ("run", "steps_of"),
    [*((run, keep_nothing) for run in ASKED), (retained, keep_all), (of_inputs, keep_all)],
)
@pytest.mark.parametrize("make", [Changes, Tied])
def test_unsupported_steps_equal_those_of_plain_pytorch(
    make: Callable[[], nn.Module], run: Callable[..., Any], steps_of: Steps
) -> None:
    """Planned steps run in between, and are captured once."""
    model = make()
    plain = copy.deepcopy(model)
    plain_where_needed(model, steps_of)

    num_pieces = []
    for seed, step in enumerate([run, planned_step] * 3):
        x = torch.randn(4, 8)
        assert_same(left_by(model, step, x, seed), left_by(plain, step, x, seed))
        num_pieces.append(len(call_of(model).pieces))
    assert num_pieces[3] == num_pieces[-1]


class Checkpointed(Changes):
    """A region recomputed in the backward draws there what it drew before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch_checkpoint(self._hidden, x, use_reentrant=False)
        loss: torch.Tensor = self.leave(hidden).square().sum()
        return loss

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.drop(self.enter(x)).tanh()
        return hidden


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[None]
        found, _ = self.attention(x, x, x, need_weights=False)
        loss: torch.Tensor = self.norm(found).square().sum()
        return loss


class InLowPrecision(Tied):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Draws(Tied):
    """Draws noise, and hard samples by Gumbel softmax."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x) * torch.rand(8)
        chosen = F.gumbel_softmax(self.linear(x), hard=True)
        return super().forward(x + noise) + chosen.square().sum()


def spectral() -> nn.Module:
    """The critic of SN-GAN: buffers that the forward changes, and reads."""
    enter, leave = spectral_norm(nn.Linear(8, 8)), spectral_norm(nn.Linear(8, 1))
    return nn.Sequential(enter, nn.LeakyReLU(0.2, inplace=True), leave, Sum())


@pytest.mark.parametrize("make", [Checkpointed, Attends, InLowPrecision, Draws, spectral])
def test_other_models_equal_those_of_plain_pytorch(make: Callable[[], nn.Module]) -> None:
    model = make()
    plain = copy.deepcopy(model)
    plain_where_needed(model)
    for seed, run in enumerate([retained, planned_step, penalized, planned_step]):
        x = torch.randn(4, 8)
        assert_same(left_by(model, run, x, seed), left_by(plain, run, x, seed))


class WithLogits(Tied):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.linear(x)


def test_logits_beside_the_loss_are_passed_on() -> None:
    """They are unchanged, and have no gradient unless that is asked for."""

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss, logits = model(x)
        loss.backward(retain_graph=True)
        loss.backward()
        found: torch.Tensor = logits.detach()
        return found

    def with_logits(model: nn.Module, x: torch.Tensor) -> None:
        loss, logits = model(x)
        (loss + logits.sum()).backward(retain_graph=True)
        logits.sum().backward()

    x = torch.randn(4, 8)
    for runs, differentiate in (([run], "scalars"), ([run, with_logits], "all")):
        model = WithLogits()
        plain = copy.deepcopy(model)
        plain_where_needed(model, differentiate=differentiate)
        for each in runs:
            assert_same(left_by(model, each, x, 0), left_by(plain, each, x, 0))


def penalized_once(model: nn.Module, x: torch.Tensor) -> Any:
    given = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(given), given, create_graph=True)
    slope.square().sum().backward()
    return given.grad


def test_autocast_is_as_it_was_in_the_forward() -> None:
    """Naive: the forward runs again in float32.

    Or it casts the weight for each reader, and rounds differently.
    """
    model = Tied()
    plain = copy.deepcopy(model)
    plain_where_needed(model)

    def run(model: nn.Module, x: torch.Tensor) -> Any:
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(given)
        (slope,) = torch.autograd.grad(loss, given, create_graph=True)
        slope.square().sum().backward(retain_graph=True)
        loss.backward()
        return given.grad

    for seed in range(2):
        x = torch.randn(4, 8)
        assert_same(left_by(model, run, x, seed), left_by(plain, run, x, seed))


def test_outputs_need_not_be_scalars() -> None:
    """An output may be changed in place, and its gradient need not be an expanded scalar."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    plain_where_needed(model)

    def run(model: nn.Module, x: torch.Tensor) -> None:
        loss = model(x).mul_(2).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    for seed in range(2):
        x = torch.randn(4, 8)
        assert_same(left_by(model, run, x, seed), left_by(plain, run, x, seed))


def test_hooks_of_parameters_run_once() -> None:
    """Naive: a leaf that is differentiated in the node's backward runs its hooks there too."""
    model = Tied()
    plain = copy.deepcopy(model)
    plain_where_needed(model)
    for each in (model, plain):
        each.linear.weight.register_hook(lambda gradient: gradient * 2)

    x = torch.randn(4, 8)
    for run in (retained, penalized_once, hessian_product, planned_step):
        got, want = left_by(model, run, x, 0), left_by(plain, run, x, 0)
        torch.testing.assert_close(got, want)  # a leaf's gradients are summed before its hooks run


def test_an_input_may_be_made_with_a_parameter_of_the_model() -> None:
    """Naive: the weight's gradient counts twice, once through the graph of the input."""
    model = Tied()
    plain = copy.deepcopy(model)
    plain_where_needed(model)

    def run(model: nn.Module, x: torch.Tensor) -> Any:
        given = model.linear(x)  # type: ignore[operator]
        (slope,) = torch.autograd.grad(model(given), given, create_graph=True)
        slope.square().sum().backward()

    x = torch.randn(4, 8)
    for seed in range(2):
        got, want = left_by(model, run, x, seed), left_by(plain, run, x, seed)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)  # sums in another order


@pytest.mark.parametrize("run", [retained, penalized_once])
def test_a_tensor_changed_in_between_is_noticed(run: Callable[..., Any]) -> None:
    """As in plain PyTorch, and also where the plan saved a copy."""
    model = plain_where_needed(Changes())

    def changing(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)
        with torch.no_grad():
            model.get_parameter("enter.weight").mul_(2)
        return loss

    with pytest.raises(remat.TraceError, match="modified by an inplace operation"):
        run(changing, torch.randn(4, 8))
