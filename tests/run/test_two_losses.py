"""Two losses of one step, each with a backward of its own: refused, or as in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import remat
from tests.support.planned import Steps, assert_same, keep_all, keep_nothing, planned
from tests.support.second_backwards import MARKS, left_by, plain_where_needed

pytestmark = MARKS


class TwoLosses(nn.Module):
    """Two losses whose graphs share nothing but the input, or a first layer as well."""

    def __init__(self, *, is_shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8) if is_shared else nn.Identity()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x).sin()
        return self.a(hidden).tanh().sum(), self.b(hidden).sigmoid().sum()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("steps_of", [keep_all, keep_nothing])
def test_two_backwards_are_refused(is_shared: bool, steps_of: Steps) -> None:
    """Naive: autograd's own error advises retain_graph=True, which is refused as well."""
    model = planned(TwoLosses(is_shared=is_shared), steps_of)
    for _ in range(2):
        first, second = model(torch.randn(4, 8))
        first.backward()
        with pytest.raises(remat.TraceError, match="add its losses up"):
            second.backward()


def test_two_backwards_through_pieces_are_refused() -> None:
    class Broken(TwoLosses):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.first(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    model = planned(Broken(is_shared=True))
    for _ in range(2):
        first, second = model(torch.randn(4, 8))
        first.backward()
        with pytest.raises(remat.TraceError, match="add its losses up"):
            second.backward()


def two_backwards(model: nn.Module, x: torch.Tensor) -> Any:
    first, second = model(x)
    first.backward()
    between = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    second.backward()
    return between


def test_two_losses_with_graphs_of_their_own_have_the_plain_gradients() -> None:
    """A parameter that the first loss does not reach has no gradient, rather than zeros."""
    model = TwoLosses()
    plain = copy.deepcopy(model)
    plain_where_needed(model)

    for seed in range(3):
        x = torch.randn(4, 8)
        got = left_by(model, two_backwards, x, seed)
        assert_same(got, left_by(plain, two_backwards, x, seed))
        assert None in got[0]


def test_two_losses_with_a_shared_graph_have_the_gradients_of_retain_graph() -> None:
    """Plain PyTorch refuses without retain_graph=True; these are the gradients it has with it."""
    model = TwoLosses(is_shared=True)
    plain = copy.deepcopy(model)
    plain_where_needed(model)
    x = torch.randn(4, 8)

    with pytest.raises(RuntimeError, match="second time"):
        two_backwards(plain, x)
    plain.zero_grad()
    first, second = plain(x)
    first.backward(retain_graph=True)
    second.backward()

    left_by(model, two_backwards, x, 0)
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_an_optimizer_may_step_between_losses_with_graphs_of_their_own() -> None:
    """Naive: a parameter that the second loss does not read is treated as changed."""
    model = TwoLosses()
    plain = copy.deepcopy(model)
    plain_where_needed(model)

    def run(model: nn.Module, x: torch.Tensor) -> None:
        first, second = model(x)
        first.backward()
        with torch.no_grad():
            for parameter in model.get_submodule("a").parameters():
                parameter.sub_(0.1)
        second.backward()

    for seed in range(2):
        x = torch.randn(4, 8)
        assert_same(left_by(model, run, x, seed), left_by(plain, run, x, seed))
