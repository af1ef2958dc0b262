"""What torch's compiler can't run is refused in one sentence; model errors pass unchanged."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import remat
from remat.torch_border.autograd import saved_tensors

pytestmark = pytest.mark.usefixtures("fresh_torch")

checkpoint = partial(
    remat.checkpoint, budget="100%", costs="flops", time_limit_s=1.0, plan_cache=False
)


class Net(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).sin()
        torch._dynamo.graph_break()
        loss: torch.Tensor = self.second(self.between(hidden)).pow(2).sum()
        return loss

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Runs between the pieces."""
        return hidden


class Jacobian(Net):
    """Asks for the gradients of a piece in one batch, which AOTAutograd's wrappers can't do."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        each = torch.eye(4).unsqueeze(1).expand(4, *hidden.shape)
        (found,) = torch.autograd.grad(
            hidden, self.first.weight, each, create_graph=True, is_grads_batched=True
        )
        return hidden + found.sum()


def test_a_call_that_aotautograd_cant_do_is_refused_with_its_line() -> None:
    Jacobian()(torch.randn(3, 4)).backward()  # plain PyTorch can

    model = Jacobian()
    checkpoint(model)
    with pytest.raises(remat.TraceError) as said:
        model(torch.randn(3, 4))

    if "create_graph=True" not in str(said.value):  # torch 2.11 gets as far as the backward
        assert "whole and in pieces: RuntimeError: vmap" in str(said.value)
        assert "(test_compilers_failures.py:" in str(said.value)
        assert "@torch.compiler.disable" in str(said.value)


def test_an_error_inside_dynamo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.pgo import FrameStateSizeEntry

    monkeypatch.setattr(FrameStateSizeEntry, "is_size_dynamic", None)
    model = Net()
    checkpoint(model)
    with pytest.raises(remat.TraceError, match=r"in pieces: .*'NoneType' object"):
        model(torch.randn(3, 4))


class Raises(Net):
    """Code between the pieces fails."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such layer")


class Looks(nn.Module):
    """An operator of a piece fails on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(5, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table(x)
        torch._dynamo.graph_break()
        loss: torch.Tensor = self.last(rows).sum()
        return loss


class Multiplies(Net):
    """A function of torch, called between the pieces, fails for the shapes it is given."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, torch.ones(3, 3))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Raises(), torch.randn(3, 4)),
        (Looks(), torch.tensor([1, 7])),
        (Multiplies(), torch.randn(3, 4)),
    ],
    ids=["between", "data", "shapes"],
)
def test_an_error_of_the_model_is_that_of_plain_pytorch(model: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises(Exception, match=r".") as plain:
        model(x)
    checkpoint(model)
    with pytest.raises(plain.type, match=re.escape(str(plain.value))):
        model(x)


class Penalized(Net):
    """Returns, beside the loss, a tensor whose graph an inner gradient has freed."""

    def forward(self, x: torch.Tensor) -> Any:
        torch._dynamo.graph_break()
        scores = self.scored(x)
        (slope,) = torch.autograd.grad(scores.sum(), self.first.weight)
        return super().forward(x) + slope.sum(), scores

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def scored(self, x: torch.Tensor) -> torch.Tensor:
        """Runs as plain PyTorch."""
        scores: torch.Tensor = self.first(x).exp()
        return scores


def test_a_graph_freed_during_the_forward_holds_nothing() -> None:
    x = torch.randn(3, 4)
    model = Penalized()
    model(x)[0].backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()

    checkpoint(model)
    model(x)[0].backward()
    for ours, theirs in zip([p.grad for p in model.parameters()], plain, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


def test_unreadable_saved_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(node: Any) -> NoReturn:
        del node
        raise RuntimeError("Output 0 of Slice is a view that was changed in place. It is forbidden")

    monkeypatch.setattr("remat.pieces.eager_backward.saved_tensors", refused)
    model = Net()
    checkpoint(model)
    with pytest.raises(remat.TraceError, match="cut into pieces: Output 0 of Slice is a view"):
        model(torch.randn(3, 4))


def test_saved_tensors_are_gone_after_the_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    y = x.exp()
    assert [t.shape for t in saved_tensors(y.grad_fn)] == [(3,)]
    y.sum().backward()
    assert saved_tensors(y.grad_fn) == []
