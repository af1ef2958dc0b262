"""Steps that dynamo or a joint graph would compute differently from eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.torch_border import dynamo_rewrites
from tests.support.planned import SCHEDULES, assert_same, call_of, planned, state_after

pytestmark = pytest.mark.usefixtures("fresh_torch")

WIDTH = 8


class Step(nn.Module):
    """Two layers, a buffer, and a function of them that returns what the step returns."""

    buffer: torch.Tensor

    def __init__(self, compute: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("buffer", torch.ones(WIDTH))
        self.compute = compute

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(self, x)


def first_of(result: Any) -> torch.Tensor:
    loss: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return loss


def assert_as_eager(compute: Callable[[Any, torch.Tensor], Any], schedule: str) -> nn.Module:
    """Two steps leave what the plain ones leave, NumPy's random state included."""
    torch.manual_seed(0)
    model = Step(compute)
    plain, x = copy.deepcopy(model), torch.randn(6, WIDTH)
    planned(model, SCHEDULES[schedule], differentiate="all")

    states = []
    for one in (model, plain):
        np.random.seed(0)  # noqa: NPY002
        for seed in (1, 2):
            states.append([*state_after(one, x.clone(), seed=seed, loss_of=first_of)])
            states[-1].append(np.random.get_state(legacy=False)["state"]["key"].tolist())  # noqa: NPY002
    assert_same(states[:2], states[2:])
    return model


def mean_over_nothing(step: Any, x: torch.Tensor) -> Any:
    hidden, mask = step.second(step.first(x).tanh()), torch.zeros_like(x)
    return hidden.square().mean(), (hidden * mask).sum() / mask.sum()


def overflowing_metric(step: Any, x: torch.Tensor) -> Any:
    loss = step.second(step.first(x).tanh()).square().sum() * 1e3
    return loss, loss.exp()


def root_of_zero(step: Any, x: torch.Tensor) -> Any:
    hidden = step.first(x)
    return hidden.square().mean(), (hidden * 0).sum().sqrt(), step.second(hidden).sum()


def unused_part(step: Any, x: torch.Tensor) -> Any:
    used, unused = step.second(step.first(x)).chunk(2, dim=1)
    return used.sin().sum(), (unused * 0).norm()


def unused_after_a_break(step: Any, x: torch.Tensor) -> Any:
    hidden = step.first(x).tanh()
    torch._dynamo.graph_break()
    return step.second(hidden).square().mean(), (hidden * 0).sum().sqrt()


UNUSED = [mean_over_nothing, overflowing_metric, root_of_zero, unused_part]
# a piece may not be computed again within another one
IN_PIECES = [name for name in SCHEDULES if name != "anything again"]


@pytest.mark.parametrize(
    ("compute", "schedule"),
    [
        *((compute, schedule) for compute in UNUSED for schedule in SCHEDULES),
        *((unused_after_a_break, schedule) for schedule in IN_PIECES),
    ],
)
def test_a_result_that_no_loss_uses_changes_no_gradient(
    compute: Callable[[Any, torch.Tensor], Any], schedule: str
) -> None:
    """Naive: its gradient is 0, and 0 times infinity is NaN in all parameters behind it."""
    model = assert_as_eager(compute, schedule)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)


def test_losses_may_take_turns() -> None:
    """Each set of losses has a backward of its own, which runs only what it needs."""
    torch.manual_seed(0)
    model = Step(lambda step, x: (step.first(x).sum(), step.second(step.first(x)).sin().sum()))
    plain, x = copy.deepcopy(model), torch.randn(6, WIDTH)
    planned(model)
    for used in ((0,), (1,), (0, 1), (0,)):
        for one in (model, plain):
            one.zero_grad()
            losses = one(x)
            sum(losses[place] for place in used).backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert len(call_of(model).pieces) == 1


def second_moment(step: Any, x: torch.Tensor) -> Any:
    hidden = step.first(x)
    with torch.no_grad():
        step.buffer.mul_(0.9).addcmul_(hidden[0], hidden[1], value=0.1)
    return (hidden * step.buffer).sum()


def ratio(step: Any, x: torch.Tensor) -> Any:
    return torch.addcdiv(step.first(x), x, x.abs() + 1, value=0.3).square().mean()


def average(step: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        torch._foreach_lerp_([step.buffer], [step.first.weight[0]], 0.3)
    return (step.first(x) * step.buffer).sum()


def in_bfloat16(step: Any, x: torch.Tensor) -> Any:
    hidden = step.first(x).bfloat16()
    return hidden.clone().addcmul_(hidden, hidden.sin(), value=0.7).float().mean()


def whole_number(step: Any, x: torch.Tensor) -> Any:
    counts = torch.full((WIDTH,), torch.tensor(3))  # type: ignore[call-overload]
    assert counts.dtype is torch.int64
    return (step.first(x) * counts).sum()


@pytest.mark.parametrize("compute", [second_moment, ratio, average, in_bfloat16, whole_number])
def test_operators_are_those_of_eager(compute: Callable[[Any, torch.Tensor], Any]) -> None:
    """Naive: dynamo replaces them by several operators, which round differently."""
    assert_as_eager(compute, "nothing kept")


def larger_loss(step: Any, x: torch.Tensor) -> Any:
    return max(step.first(x).square().mean(), step.second(x).square().mean() + 1)


def smallest_loss(step: Any, x: torch.Tensor) -> Any:
    return min([step.first(x).square().mean(), step.second(x).square().mean() + 1])


def hinge(step: Any, x: torch.Tensor) -> Any:
    return max(step.first(x).mean() - step.first(x).mean(), 0.0) + step.second(x).mean()


@pytest.mark.parametrize("compute", [larger_loss, smallest_loss, hinge])
def test_pythons_max_is_one_of_its_arguments(compute: Callable[[Any, torch.Tensor], Any]) -> None:
    """Naive: it is `torch.maximum`, and the layer behind the other one gets gradients of 0."""
    assert_as_eager(compute, "nothing kept")


def test_max_of_numbers_breaks_no_graph() -> None:
    model = Step(lambda step, x: step.first(x).sum() * max(len(x), 0.5))
    planned(model)
    model(torch.randn(6, WIDTH)).backward()
    assert remat.report(model).num_pieces == 1


def noisy(step: Any, x: torch.Tensor) -> Any:
    noise = torch.from_numpy(np.random.randn(*x.shape).astype(np.float32))  # noqa: NPY002
    return step.second(F.dropout(step.first(x) + noise, 0.3)).square().mean()


@pytest.mark.parametrize("schedule", IN_PIECES)
def test_numpy_draws_from_its_own_generator(schedule: str) -> None:
    """Naive: dynamo draws from torch's generator, and NumPy's state stays as it was."""
    assert_as_eager(noisy, schedule)


def cast_twice(step: Any, x: torch.Tensor) -> Any:
    half = torch.bfloat16
    hidden = F.linear(x.to(half), step.first.weight.to(half)).sin()
    return F.linear(hidden, step.first.weight.to(half)).float().square().mean()


def cast_in_a_region_without_autocast(step: Any, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        inside = step.second(step.second(x)).float()
        with torch.autocast("cpu", enabled=False):
            return cast_twice(step, x) + inside.mean()


@pytest.mark.parametrize("compute", [cast_twice, cast_in_a_region_without_autocast])
def test_casts_are_cached_by_autocast_alone(compute: Callable[[Any, torch.Tensor], Any]) -> None:
    """Naive: the user's own casts are merged, and gradients are added in bfloat16."""
    assert_as_eager(compute, "nothing kept")


def branch_on_a_changed_buffer(step: Any, x: torch.Tensor) -> Any:
    before, hidden = step.buffer.clone(), step.first(x)
    step.buffer.mul_(3)
    return torch.cond(
        hidden.sum() > -1e9,
        lambda h, scale: (h * scale).sin(),
        lambda h, scale: (h * scale).cos(),
        (hidden, before),
    ).sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_branch_reads_a_buffer_as_it_was(schedule: str) -> None:
    """Naive: its backward reads the buffer itself, which has changed."""
    assert_as_eager(branch_on_a_changed_buffer, schedule)


def test_other_compiles_keep_dynamos_operators() -> None:
    """Outside of a capture, dynamo does what it did: one graph, with `torch.maximum`."""
    model = Step(larger_loss)
    planned(model)
    model(torch.randn(6, WIDTH)).backward()
    assert not dynamo_rewrites._is_capturing()
    compiled = torch.compile(Step(larger_loss), backend="eager", fullgraph=True)
    compiled(torch.randn(6, WIDTH)).backward()
