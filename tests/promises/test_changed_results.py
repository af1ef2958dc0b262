"""Results of a planned step that are changed in place, by the caller or between two pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.run import capture
from tests.support.planned import assert_same, keep_all, keep_nothing, on_both_executors, planned

pytestmark = pytest.mark.usefixtures("fresh_torch")

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda hidden: hidden,  # a view of a matrix product
    "slice": lambda hidden: hidden[:, 0],
    "transposed": lambda hidden: hidden.transpose(0, 1),
}


class TwoLayers(nn.Module):
    """Returns a view of its hidden values, and what it computes from them."""

    def __init__(self, view: str = "all", *, is_cloned: bool = False) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        self.view, self.is_cloned = VIEWS[view], is_cloned

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.enter(x)
        returned = self.view(hidden)
        result: torch.Tensor = self.leave(torch.tanh(hidden))
        return returned.clone() if self.is_cloned else returned, result


def gradients(
    model: nn.Module, x: torch.Tensor, change: Callable[[torch.Tensor], Any]
) -> list[torch.Tensor | None]:
    model.zero_grad()
    first, *others = results if isinstance(results := model(x), tuple) else (results,)
    change(first)
    sum((each.square().sum() for each in others), first.sum()).backward()
    return [parameter.grad for parameter in model.parameters()]


def unchanged(result: torch.Tensor) -> None:
    pass


def halved(result: torch.Tensor) -> None:
    result.mul_(0.5)


@on_both_executors
@pytest.mark.parametrize("view", VIEWS)
def test_a_returned_view_that_was_changed_is_noticed(
    view: str, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: tanh is computed again from the changed values, and no version counter tells."""
    model, x = TwoLayers(view), torch.randn(4, 6, 8)
    plain = copy.deepcopy(model)
    planned(model, keep_nothing, executor=executor)

    want = gradients(plain, x, unchanged)
    assert_same(gradients(model, x, unchanged), want, executor=executor)
    with pytest.raises((remat.TraceError, RuntimeError), match="modified by an inplace operation"):
        gradients(model, x, halved)
    assert_same(gradients(model, x, unchanged), want, executor=executor)

    if view != "transposed":  # its own counter is that of what was saved
        torch._dynamo.reset()
        monkeypatch.setattr(capture, "refuse_changed_results", lambda: None)
        naive = planned(copy.deepcopy(plain), keep_nothing, executor=executor)
        want = gradients(plain, x, halved)
        with pytest.raises(AssertionError):
            assert_same(gradients(naive, x, halved), want, executor=executor)


@on_both_executors
@pytest.mark.parametrize("steps_of", [keep_all, keep_nothing])
def test_a_result_may_be_changed_if_nothing_is_computed_from_it(
    steps_of: Any, executor: str
) -> None:
    """Logits in three dimensions are a view of a matrix product."""
    for model in (nn.Linear(8, 8, bias=False), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))):
        x, plain = torch.randn(4, 6, 8), copy.deepcopy(model)
        planned(model, steps_of, executor=executor)
        for _ in range(2):
            got, want = gradients(model, x, halved), gradients(plain, x, halved)
            assert_same(got, want, executor=executor)


@pytest.mark.parametrize("view", VIEWS)
def test_a_returned_clone_may_be_changed(view: str) -> None:
    """Naive: a copy that changes nothing is removed, as Inductor removes it."""
    model, x = TwoLayers(view, is_cloned=True), torch.randn(4, 6, 8)
    plain = copy.deepcopy(model)
    planned(model, keep_nothing)
    assert_same(gradients(model, x, halved), gradients(plain, x, halved))


class Scored(nn.Module):
    """Returns its loss and the logits, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.linear(x)
        return F.cross_entropy(logits.flatten(0, 1), torch.zeros(24, dtype=torch.long)), logits


@on_both_executors
def test_logits_beside_a_loss_may_be_changed(executor: str) -> None:
    """Naive: they are a view, which the node that refuses their gradient made."""
    model, x = Scored(), torch.randn(4, 6, 8)
    plain = copy.deepcopy(model)
    planned(model, keep_all, executor=executor)
    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            loss, logits = each(x)
            logits /= 2.0
            loss.backward()
        assert_same(model.linear.weight.grad, plain.linear.weight.grad, executor=executor)


class Counts(nn.Module):
    """Divides its loss by a constant, which it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = torch.tensor(float(len(x)))
        return F.cross_entropy(self.linear(x), y, reduction="sum") / count, count


@on_both_executors
def test_a_returned_constant_may_be_changed(executor: str) -> None:
    """Naive: the caller gets the constant itself, and later steps divide by what it became."""
    model, x, y = Counts(), torch.randn(4, 8), torch.randint(0, 8, (4,))
    plain = copy.deepcopy(model)
    planned(model, keep_nothing, executor=executor)

    for _ in range(3):
        (loss, count), (want, _) = model(x, y), plain(x, y)
        loss.backward()
        want.backward()
        count.mul_(10)
        assert_same(loss, want, executor=executor)
        assert_same(
            [p.grad for p in model.parameters()],
            [p.grad for p in plain.parameters()],
            executor=executor,
        )


class Cut(nn.Module):
    """Changes the result of its first piece before the second."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        self.change = torch.compiler.disable(change)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x)
        result = self.leave(torch.tanh(hidden))
        self.change(hidden)
        loss: torch.Tensor = (result + hidden).square().mean()
        return loss


@on_both_executors
def test_a_view_that_is_changed_between_pieces_is_copied(executor: str) -> None:
    """Naive: AOTAutograd returns another tensor over its memory, which no one watches."""
    model, x = Cut(halved), torch.randn(4, 6, 8)
    plain = copy.deepcopy(model)
    planned(model, keep_nothing, executor=executor)
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            each(x).backward()
        assert_same(
            [p.grad for p in model.parameters()],
            [p.grad for p in plain.parameters()],
            executor=executor,
        )
    assert len(remat.report(model).breaks) == 1
