"""Outputs, changed inputs and gradients of a planned module are those of the plain one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from tests.support.planned import assert_same, planned, state_after
from tests.support.small_models import MODELS, SCHEDULES, assert_same_steps

pytestmark = pytest.mark.usefixtures("fresh_torch")


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor | None = None
    labels: torch.Tensor | None = None


class Many(nn.Module):
    """Several outputs.

    Scalars, tensors, an integer tensor, an input, a view of an input, a constant and None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden, other = self.linear(x).tanh().sin() * scale, self.other(x).sin()
        return {
            "hidden": hidden,
            # at most two gradients meet in a tensor: the order of adding three is not defined
            "part": other[0],
            "best": hidden.argmax(-1),
            "input": x,
            "view": x[:, :4],
            "detached": hidden.detach(),
            "nothing": None,
            "number": 3,
            "norm": other.norm(),
        }


@pytest.mark.parametrize("schedule", ["keep all", "repeat"])
def test_several_outputs_are_those_of_the_plain_module(schedule: str) -> None:
    model, x = Many(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    planned(model, SCHEDULES[schedule], differentiate="all")

    got, want = model(x, scale=2.0), plain(x, scale=2.0)
    assert_same(got, want)
    assert list(got) == list(want)
    assert {k: got[k].requires_grad for k in ("hidden", "part", "view", "detached", "best")} == {
        k: want[k].requires_grad for k in ("hidden", "part", "view", "detached", "best")
    }
    assert got["view"].data_ptr() == x.data_ptr()

    def loss(out: dict[str, Any]) -> torch.Tensor:
        return out["hidden"].pow(2).sum() + out["part"].sum() * out["norm"] + out["view"].sum()  # type: ignore[no-any-return]

    assert_same_steps(model, plain, x, loss_of=loss)


class WithLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        logits = self.linear(x).sin().cos()
        loss = logits.pow(2).mean() if labels is None else F.cross_entropy(logits, labels)
        return Output(loss, logits, labels)


def test_keywords_go_in_and_a_dataclass_comes_out() -> None:
    model, x, labels = WithLogits(), torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    plain = copy.deepcopy(model)
    planned(model)
    assert_same_steps(model, plain, x=x, labels=labels, loss_of=lambda out: out.loss)
    assert isinstance(model(x, labels), Output)
    assert_same(model(x, labels=labels).logits, plain(x, labels=labels).logits)


def test_a_gradient_for_the_logits_beside_a_loss_is_refused_with_advice() -> None:
    model, x = planned(WithLogits()), torch.randn(4, 8)
    out = model(x)
    with pytest.raises(remat.TraceError, match='differentiate="all"'):
        (out.loss + out.logits.sum()).backward()
    model = planned(WithLogits(), differentiate="all")
    plain = copy.deepcopy(model)
    assert_same_steps(model, plain, x, loss_of=lambda out: out.loss + out.logits.sum())


def test_logits_beside_a_loss_may_be_read() -> None:
    out = planned(WithLogits())(torch.randn(4, 8))
    assert out.logits.argmax(-1).shape == (4,)
    assert out.logits.detach().sum().item() == pytest.approx(out.logits.sum().item())


def test_frozen_parameters_stay_without_gradient() -> None:
    model, x = MODELS["mlp"]()
    model.get_submodule("middle.0").requires_grad_(False)
    plain = copy.deepcopy(model)
    planned(model)
    assert_same_steps(model, plain, x)
    assert model.get_parameter("middle.0.weight").grad is None


def test_a_parameter_frozen_later_gets_no_gradient() -> None:
    model, x = MODELS["mlp"]()
    planned(model)(x).backward()
    model.get_submodule("middle.0").requires_grad_(False)
    assert_same_steps(model, copy.deepcopy(model), x)
    assert model.get_parameter("middle.0.weight").grad is None


def test_inputs_have_the_plain_gradients() -> None:
    model, x = MODELS["mlp"]()
    plain, inputs = copy.deepcopy(model), [x.clone().requires_grad_(), x.clone().requires_grad_()]
    planned(model)
    assert_same(state_after(model, inputs[0], seed=1), state_after(plain, inputs[1], seed=1))
    assert_same(inputs[0].grad, inputs[1].grad)


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = (self.linear(x.sin()) + x).sin()
        x.mul_(2).add_(1)
        loss: torch.Tensor = (before * x).cos().sum()
        return loss


@pytest.mark.parametrize("schedule", ["keep all", "keep nothing", "repeat"])
def test_an_input_that_the_step_changes_is_changed(schedule: str) -> None:
    model, inputs = ChangesItsInput(), [torch.ones(4, 8), torch.ones(4, 8)]
    plain = copy.deepcopy(model)
    planned(model, SCHEDULES[schedule])

    for seed in (1, 2):
        assert_same(
            state_after(model, inputs[0], seed=seed), state_after(plain, inputs[1], seed=seed)
        )
        assert_same(inputs[0], inputs[1])
