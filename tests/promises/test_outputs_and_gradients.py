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
from tests.support.planned import assert_same, call_of, planned, state_after
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


class Dropped(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.linear, self.p = nn.Linear(64, 64), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = F.dropout(self.linear(x), self.p).square().sum()
        return loss


@pytest.mark.parametrize("p", [0.1, 0.15, 0.42, 0.45, 0.99, 1.0])
@pytest.mark.parametrize("schedule", ["keep all", "repeat"])
def test_dropout_scales_as_in_plain_pytorch(p: float, schedule: str) -> None:
    """torch's fused dropout rounds the scale of some p differently, and draws for p = 1."""
    assert_same_steps(
        planned(model := Dropped(p), SCHEDULES[schedule]), copy.deepcopy(model), torch.randn(8, 64)
    )


class Scaled(nn.Module):
    """A scalar in float32 before a tensor in bfloat16."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64).bfloat16()
        self.register_buffer("scale", torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.scale * self.linear(x)
        loss: torch.Tensor = (self.scale + hidden).float().square().sum()
        return loss


@pytest.mark.parametrize("schedule", ["keep all", "repeat"])
def test_operands_are_not_swapped_where_a_scalar_would_round(schedule: str) -> None:
    model = Scaled()
    x = torch.randn(8, 64).bfloat16()
    assert_same_steps(planned(model, SCHEDULES[schedule]), copy.deepcopy(model), x)


class Squared(torch.autograd.Function):
    """Stores its input on `ctx` itself, which autograd does not check."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return 2 * gradients[0] * ctx.x


class Stored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squared = Squared.apply(self.first(x))  # type: ignore[no-untyped-call]
        loss: torch.Tensor = self.second(squared).sum()
        return loss


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # dynamo does
@pytest.mark.parametrize("schedule", ["keep all", "repeat"])
def test_no_saved_tensor_may_change_beside_one_stored_on_a_context(schedule: str) -> None:
    model, x = planned(Stored(), SCHEDULES[schedule]), torch.randn(4, 8)
    loss = model(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    assert_same_steps(model, copy.deepcopy(model), torch.randn(4, 8))


class ActivatesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.linear = nn.SiLU(inplace=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.linear(self.act(x)).sum()
        return loss


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads it
@pytest.mark.parametrize("schedule", ["keep all", "keep nothing", "repeat"])
def test_an_input_that_needs_a_gradient_may_be_changed(schedule: str) -> None:
    stem, body, x = nn.Linear(8, 8), ActivatesInPlace(), torch.randn(4, 8)
    plain = copy.deepcopy(nn.Sequential(stem, body))
    planned(body, SCHEDULES[schedule])
    model = nn.Sequential(stem, body)
    for seed in range(3):
        assert_same(state_after(model, x, seed=seed), state_after(plain, x, seed=seed))
    assert call_of(body).pieces


class PartOfATable(nn.Module):
    """Reads a row of a buffer that it changes; the row differs from step to step."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(6, 8))

    def forward(self, x: torch.Tensor, row: int) -> torch.Tensor:
        loss: torch.Tensor = (self.linear(x) - self.table[row]).sin().sum()
        self.table.mul_(0.9)
        return loss


@pytest.mark.parametrize("schedule", ["keep all", "keep nothing", "repeat"])
def test_a_changing_row_of_a_changed_buffer_is_read_again(schedule: str) -> None:
    model, x = PartOfATable(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    planned(model, SCHEDULES[schedule])
    for row in (2, 3, 4):
        assert_same(state_after(model, x, row), state_after(plain, x, row))


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


def test_a_result_without_a_gradient_gives_none() -> None:
    """An optimizer would decay parameters whose gradients are zeros."""
    model = planned(nn.Linear(4, 4), differentiate="all")
    result = NoGradient.apply(model(torch.ones(2, 4)))  # type: ignore[no-untyped-call]
    result.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
