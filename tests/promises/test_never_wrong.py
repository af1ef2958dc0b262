"""What existing tools get silently wrong, one test each; `test_computed_again.py` has more.

The planned step is right, and without our protection it is not.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.inductor import backend
from remat.run import capture
from remat.run import executor as eager_executor
from remat.tracers import cleaning
from tests.support.planned import (
    COMPILES,
    UNLIMITED,
    assert_same,
    call_of,
    keep_all,
    on_both_executors,
    planned,
)
from tests.support.protections import assert_only_naive_is_wrong, same_as_plain

pytestmark = pytest.mark.usefixtures("fresh_torch")


class Item(nn.Module):
    """Scales by a number that Python reads off a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.linear(x).sin(), 0.5)
        return (hidden.sin() * hidden.detach().max().item()).sin().sum()


@pytest.mark.parametrize(
    ("executor", "dtype"),
    [
        ("eager", torch.float32),
        ("eager", torch.bfloat16),
        pytest.param("inductor", torch.float32, marks=COMPILES),
    ],
    ids=str,
)
def test_a_number_read_off_a_tensor_is_that_of_each_step(executor: str, dtype: torch.dtype) -> None:
    """Naive: `item` is traced as the number that it was in the first step.

    The second step, with another seed, shows it.
    """
    x = torch.randn(4, 8, dtype=dtype)
    same_as_plain(lambda: Item().to(dtype), x, executor=executor, draws=True)()


def test_the_step_stays_within_the_simulated_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: values live as long as their Python names.

    So they do in a module's `forward`, and in `fx.Interpreter` by default.
    """

    def check() -> None:
        torch.manual_seed(0)
        model, x = (
            nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]),
            torch.randn(64, 64),
        )
        planned(model, differentiate="all")
        model(x).sum().backward()

        piece = call_of(model).pieces[0]
        assert (piece.meter.peak_bytes or UNLIMITED) <= piece.solution.peak_bytes

    assert_only_naive_is_wrong(
        check, monkeypatch, (eager_executor._Source, "_delete", lambda *_: None)
    )


class Aliases(nn.Module):
    """Returns its input, a view of it, and copies that change nothing; its layers are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = x.sin() @ self.token.weight.t()
        loss = (hidden @ self.head.weight).sin().sum()
        return {
            "loss": loss,
            "input": x,
            "view": x[:2],
            "copy": x.clone(),
            "hidden": hidden.detach(),
            "same": hidden.detach().clone(),
        }


@on_both_executors
def test_outputs_share_memory_where_plain_ones_do(
    monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """Naive: a copy that changes nothing is dropped wherever it is.

    Writing into one output then changes the other.
    """

    def check() -> None:
        torch.manual_seed(0)
        model, x = Aliases(), torch.randn(4, 8)
        plain = copy.deepcopy(model)
        planned(model, executor=executor)

        ends = []
        for each in (model, plain):
            out = each(given := x.clone())
            out["loss"].backward()
            out["copy"].zero_()
            out["same"].zero_()

            ends.append(
                (
                    out,
                    given,
                    each.head.weight.grad,
                    out["input"] is given,
                    out["view"].data_ptr() == given.data_ptr(),
                )
            )

        assert_same(*ends, executor=executor)

    assert_only_naive_is_wrong(
        check, monkeypatch, (cleaning, "_separates_a_result", lambda *_: False)
    )


class Sines(nn.Module):
    """Its backward overwrites what it saved with the cosine of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.linear(self.linear(x).sin()).sin().sum()
        return loss


@on_both_executors
def test_a_second_backward_is_refused(monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    """Naive: the backward runs as often as it is asked to.

    Autograd then blames the user for values that the first run overwrote.
    """

    def check() -> None:
        torch.manual_seed(0)
        model, x = Sines(), torch.randn(4, 8)
        plain = copy.deepcopy(model)
        planned(model, keep_all, executor=executor)

        ends = []
        for each in (model, plain):
            loss = each(x)
            try:
                loss.backward(retain_graph=True)
                loss.backward()
            except remat.TraceError as error:
                assert "retain_graph" in str(error)  # noqa: PT017  # refused is as good as right
                return
            ends.append([p.grad for p in each.parameters()])

        assert_same(*ends)

    owner = {"eager": capture, "inductor": backend}[executor]
    error = {"eager": RuntimeError, "inductor": AssertionError}[executor]
    assert_only_naive_is_wrong(
        check, monkeypatch, (owner, "runs_once", lambda backward, *_: backward), error=error
    )


class TwoLosses(nn.Module):
    """Two losses with a shared body and one head each."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x).tanh()
        return self.first(hidden).square().mean(), self.second(hidden).square().mean()


@on_both_executors
def test_the_head_of_the_other_loss_has_no_gradient(
    monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """Naive: autograd fills in zeros for the other loss, and its head gets gradients of zeros.

    An optimizer's weight decay would then change the head.
    """

    def check() -> None:
        plain = TwoLosses()
        model = planned(copy.deepcopy(plain), executor=executor)
        for which in (0, 1, 0):
            for each in (model, plain):
                each.zero_grad()
                each(torch.ones(4, 8))[which].backward()

            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None)
                assert_same(mine.grad, theirs.grad, executor=executor)

    assert_only_naive_is_wrong(
        check, monkeypatch, (capture, "keep_missing_gradients", lambda _: None)
    )
