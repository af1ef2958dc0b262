"""Steps that cannot run plain, and options that do not go together: refused with the reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import remat
from tests.support.planned import UNLIMITED, assert_same
from tests.support.second_backwards import (
    MARKS,
    Changes,
    Tied,
    left_by,
    plain_where_needed,
    planned_step,
    retained,
)

pytestmark = MARKS


def test_one_loss_has_one_backward_as_in_plain_pytorch() -> None:
    model = plain_where_needed(Changes())
    loss = model(torch.randn(4, 8))
    loss.backward()
    with pytest.raises(remat.TraceError, match="retain_graph=True"):
        loss.backward()
    planned_step(model, torch.randn(4, 8))


def test_unknown_values_are_refused() -> None:
    solution = remat.solve(remat.trace(Tied(), (torch.randn(4, 8),), costs="flops"), "100%")
    options: Any = {"budget": UNLIMITED, "on_unsupported": "plane"}
    compiled = torch.compile(Tied(), backend="remat", options=options)
    unknown: Any = "plane"
    known = r'neither "error".* nor "plain"'

    with pytest.raises(ValueError, match=known):
        remat.checkpoint(Tied(), UNLIMITED, on_unsupported=unknown)
    with pytest.raises(ValueError, match=known):
        remat.wrap(Tied(), solution, on_unsupported=unknown)
    with pytest.raises(Exception, match=known):
        compiled(torch.randn(4, 8))


def test_blocks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="leave one of them out"):
        remat.checkpoint(model, UNLIMITED, blocks=[model[0]], on_unsupported="plain")


def test_a_plan_from_a_file_without_room_for_copies_is_refused() -> None:
    x = torch.randn(4, 8)
    graph = remat.trace(Changes(), (x,), costs="flops")
    solution = remat.solve(graph, remat.solve(graph, "100%").peak_bytes)
    model = remat.wrap(Changes(), solution, costs="flops", on_unsupported="plain")
    with pytest.raises(remat.BudgetError, match="buffers that the step changes"):
        model(x)


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.linear(x.mul_(2).sin()).sum()
        return loss


class ReturnsViews(ChangesItsInput):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.linear(x).sin()
        return hidden, hidden[0]


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = x**3
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        x, result = ctx.saved_tensors
        gradient: torch.Tensor = gradients[0] * 3 * result / x
        return gradient


_cubed: Any = Cubed.apply


class Custom(ChangesItsInput):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = _cubed(self.linear(x)).sum()
        return loss


def test_steps_that_cannot_run_plain_say_why() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    changing = plain_where_needed(ChangesItsInput())
    with pytest.raises(remat.TraceError, match="changes an input that needs a gradient"):
        changing(x * 1).backward(retain_graph=True)

    views = plain_where_needed(ReturnsViews(), differentiate="all")
    with pytest.raises(remat.TraceError, match="tensors that share memory"):
        views(x)[0].sum().backward(retain_graph=True)

    custom = plain_where_needed(Custom())
    with pytest.raises(remat.TraceError, match=r"custom torch\.autograd\.Function"):
        torch.autograd.grad(custom(x), x, create_graph=True)

    planned_step(changing, x * 1)
    views(x)[0].sum().backward()


def test_a_custom_function_runs_twice_where_nothing_is_differentiated_twice() -> None:
    model = Custom()
    plain = copy.deepcopy(model)
    plain_where_needed(model)
    x = torch.randn(4, 8)
    assert_same(left_by(model, retained, x, 0), left_by(plain, retained, x, 0))


def test_steps_in_pieces_are_refused_and_say_why() -> None:
    class Broken(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    model = plain_where_needed(Broken())
    for _ in range(2):
        with pytest.raises(remat.TraceError, match="runs in pieces"):
            model(torch.randn(4, 8)).backward(retain_graph=True)
