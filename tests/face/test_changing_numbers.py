"""Numbers that change at every step cost one more plan in all; results stay exact.

A user's report: a schedule inside a forward, `scale=1 - 0.01 * step`, made `checkpoint` capture and
plan every step again, forever and without a warning.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.face.step_function import planned_step
from tests.support.planned import (
    Steps,
    assert_same,
    call_of,
    keep_nothing,
    planned,
    repeat_anything,
    state_after,
)

pytestmark = pytest.mark.usefixtures("fresh_torch", "quick_first_step")

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
STEPS = 5


@dataclass
class Settings:
    scale: float = 1.0


@dataclass
class Global:
    scale: float = 1.0


GLOBAL = Global()


class Net(nn.Module):
    """Has numbers in attributes, lists and dictionaries, including a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.beta, self.calls = 1.0, 0
        self.options: dict[str, Any] = {"t": 1.0, "list": [2.0, 3]}


def loss_of(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.sigmoid().square().mean()


class Argument(Net):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return self.scaled(x, 1 - 0.013 * step)

    def scaled(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return loss_of(self.body(x) * scale + scale**2)


class Attribute(Net):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.beta *= 0.99
        return loss_of(self.body(x) * self.beta - (1 - self.beta))


class Counter(Net):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.calls += 1
        return loss_of(self.body(x) / self.calls * min(1.0, self.calls / 3))


class OwnOptions(Net):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.options["t"] *= 0.9
        self.options["list"][1] += 1
        return loss_of(self.body(x) * self.options["t"] + self.options["list"][1])


class OfGlobal(Net):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return loss_of(self.body(x) * GLOBAL.scale)


class Mathematics(Net):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.calls += 1
        warmth = max(0.1, math.cos(self.calls / 10)) * math.sqrt(self.calls) + self.calls % 3
        return loss_of(torch.where(x > 0, self.body(x), warmth).clamp(-warmth, warmth))


class Scalars(Net):
    """Numbers in scalar arguments of operators, such as `alpha`."""

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.beta *= 0.7
        hidden = torch.add(self.body(x), x, alpha=self.beta)
        hidden = nn.functional.leaky_relu(hidden, self.beta).masked_fill(x > 1, self.beta)
        return loss_of(hidden / self.beta) - self.beta


class HalfPrecision(Net):
    """In bfloat16, where a number turned into a tensor would be rounded before it is used."""

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.beta *= 0.913
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.body(x) * self.beta + self.beta**2
        return loss_of(hidden.float())


class RandomAndCut(Net):
    """Python's own random numbers cut the graph."""

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.body[0](x) * random.random()
        return loss_of(self.body[2](self.body[1](hidden)))


class CutAndCounting(Net):
    """A float and an int on both sides of a cut."""

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.calls += 1
        self.beta *= 0.9
        hidden = self.body[0](x) * self.beta / self.calls
        torch._dynamo.graph_break()
        return loss_of(self.body[2](self.body[1](hidden * self.calls)) * self.beta)


class Wrapped(Net):
    """Reads its changing numbers from containers that the caller passes."""

    def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        scale, settings = options["scales"][1], options["settings"]
        return loss_of(self.body(x) * scale * settings.scale + options["count"])


def plans_of(model: nn.Module) -> int:
    call = call_of(model)
    return len(call.piecewise.plans) if call.piecewise else len(call.pieces)


def numbers_of(model: Net) -> tuple[Any, ...]:
    return model.beta, model.calls, model.options


def step_of(model: Net, step: int) -> list[Any]:
    random.seed(step)
    GLOBAL.scale = 1 + step / 7
    return [state_after(model, X, step, seed=step), numbers_of(model)]


MODELS: list[type[Net]] = [
    Argument, Attribute, Counter, OwnOptions, OfGlobal, Mathematics, Scalars, HalfPrecision,
]  # fmt: skip
IN_PIECES: list[type[Net]] = [RandomAndCut, CutAndCounting]


@pytest.mark.parametrize(
    ("make", "steps_of"),
    [
        *((make, repeat_anything(3)) for make in MODELS),
        *((make, keep_nothing) for make in IN_PIECES),
    ],
)
def test_a_changing_number_costs_one_more_plan(make: type[Net], steps_of: Steps) -> None:
    plain = make()
    model = planned(copy.deepcopy(plain), steps_of)
    assert isinstance(model, Net)

    counts = []
    for step in range(STEPS):
        assert_same(step_of(model, step), step_of(plain, step))
        counts.append(plans_of(model))

    assert counts[-1] == counts[1] <= 2, counts


def test_numbers_in_containers_cost_one_more_plan() -> None:
    plain = Wrapped()
    model = planned(copy.deepcopy(plain))

    for step in range(STEPS):
        options = {"scales": [1.0, 0.1 + step], "settings": Settings(2.0 + step), "count": step}
        assert_same(state_after(model, X, options), state_after(plain, X, options))

    assert plans_of(model) == 2


def test_a_number_that_becomes_an_input_keeps_the_schedule() -> None:
    model = planned(Argument())

    for step in range(3):
        state_after(model, X, step)

    first, second = call_of(model).pieces
    assert first.solution is second.solution


def test_a_plan_for_accumulation_knows_which_number_changed() -> None:
    plain = Argument()
    model = remat.checkpoint(copy.deepcopy(plain), "200%", costs="flops", plan_cache=False)

    for step in range(6):
        for module in (plain, model):
            if step % 2 == 0:
                module.zero_grad(set_to_none=True)
            module(X, step).backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])

    assert plans_of(model) <= 3  # first step, number as an input, gradients held


class Rows(Net):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return loss_of(self.body(x[: 8 + step]))


class RowsOfFloat(Net):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return loss_of(self.body(x[: int(8.0 + step)]))


class RowsAfterCut(Net):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.body[0](x)
        torch._dynamo.graph_break()
        return loss_of(self.body[2](self.body[1](hidden[: 8 + step])))


class Loop(Net):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for _ in range(step):
            x = self.body(x)
        return loss_of(self.body(x))


class DropoutShare(Net):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return loss_of(nn.functional.dropout(self.body(x), 0.1 + step / 10))


class Exponential(Net):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return loss_of(self.body(x) * math.exp(-step))


@pytest.mark.parametrize("make", [Rows, RowsOfFloat, RowsAfterCut, Loop, DropoutShare, Exponential])
def test_a_number_that_cannot_be_an_input_is_reported_at_the_third_plan(
    make: type[Net], caplog: pytest.LogCaptureFixture
) -> None:
    plain = make()
    model = planned(copy.deepcopy(plain))

    said = []
    with caplog.at_level(logging.WARNING, "remat"):
        for step in range(4):
            assert_same(state_after(model, X, step), state_after(plain, X, step))
            said.append(sum("third plan" in message for message in caplog.messages))

    assert said[1:] == [0, 1, 1]
    message = next(message for message in caplog.messages if "third plan" in message)
    assert make.__name__ in message
    assert re.search(r"(args\[\d\]|step) == 0", message)  # args[1], with torch 2.11 args[2]
    assert "pass it as a tensor" in message


class Branch(Net):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.body(x)
        return loss_of(hidden * step if step % 4 < 2 else hidden.cos() - step)


def test_a_branch_on_a_number_has_a_plan_for_each_side() -> None:
    plain = Branch()
    model = planned(copy.deepcopy(plain))

    for step in range(10):
        assert_same(state_after(model, X, step), state_after(plain, X, step))

    # dynamo before 2.13 captures each value of a number that decides a branch
    assert plans_of(model) <= (4 if torch.__version__ >= "2.13" else 10)


def test_a_third_length_is_reported_with_advice(caplog: pytest.LogCaptureFixture) -> None:
    model = planned(Argument())

    with caplog.at_level(logging.WARNING, "remat"):
        for rows in (32, 31, 30, 29):
            state_after(model, X[:rows], 1)

    (message,) = [message for message in caplog.messages if "third plan" in message]
    assert "expected 32, actual 31" in message
    assert "mark_dynamic" in message


def test_nothing_is_reported_about_a_number_that_becomes_an_input(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = planned(Counter())

    with caplog.at_level(logging.WARNING, "remat"):
        for _ in range(STEPS):
            state_after(model, X, 1)

    assert not caplog.messages


@pytest.mark.parametrize(
    "values", [(math.inf, 0.0, -0.0, 1e100), (math.nan,), (2**30,), (True,)], ids=str
)
def test_nan_infinity_and_other_special_numbers_stay_exact(values: tuple[Any, ...]) -> None:
    plain = Argument()
    plain.forward = plain.scaled  # type: ignore[method-assign, assignment]
    model = planned(_with_forward(Argument(), "scaled", plain))

    for scale in (0.5, 0.25, *(each for value in values for each in (value, 0.125, value))):
        assert_same(state_after(model, X, scale), state_after(plain, X, scale))


def _with_forward(model: Net, name: str, like: Net) -> Net:
    model.load_state_dict(like.state_dict())
    model.forward = getattr(model, name)
    return model


class Unbreakable(Net):
    """Passes its number to code that can be captured with a constant, but not with a symbol."""

    def __init__(self, spoil: Callable[[float], float]) -> None:
        super().__init__()
        self.spoil = spoil

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return loss_of(self.body(x) * self.spoil(0.5 + step))


def test_each_number_is_captured_alone_if_a_symbol_would_cut_the_graph() -> None:
    plain = Unbreakable(lambda scale: float(f"{scale:.3f}"))
    model = planned(copy.deepcopy(plain))

    for step in range(3):
        assert_same(state_after(model, X, step), state_after(plain, X, step))

    assert call_of(model).piecewise is None


def test_a_fixed_plan_takes_any_number() -> None:
    plain = Attribute()
    graph = remat.trace(copy.deepcopy(plain), (X, 1))
    model = remat.wrap(copy.deepcopy(plain), remat.solve(graph, "100%"))

    for step in range(3):
        assert_same(state_after(model, X, step), state_after(plain, X, step))


def test_a_step_function_may_close_over_numbers_that_change() -> None:
    plain, temperature, weight = Net(), 1.0, {"of": 1}
    model = copy.deepcopy(plain)

    def step_of(module: Net) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: loss_of(module.body(x) / temperature) * weight["of"]

    plain_step, step = step_of(plain), remat.checkpoint(step_of(model), "200%", costs="flops")

    for number in range(STEPS):
        temperature, weight["of"] = 1 + number / 3, number
        for module in (plain, model):
            module.zero_grad(set_to_none=True)

        losses = [step(X), plain_step(X)]
        for loss in losses:
            loss.backward()
        assert_same(losses[0], losses[1])
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])

    assert len(call_of(planned_step(step)).pieces) == 2  # type: ignore[arg-type]
