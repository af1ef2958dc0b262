"""Training loops within a budget, through Inductor: they end where torch.compile's do.

More of them, without a budget, are in `promises/test_training_loops.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from tests.support.planned import COMPILES, batches

pytestmark = [pytest.mark.usefixtures("fresh_torch"), *COMPILES]

Loop = Callable[[nn.Module, Callable[..., Any]], list[torch.Tensor]]


class Net(nn.Module):
    """Dropout, batch norm, two layers with one weight; returns its loss and its result."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.last = nn.Linear(width, width, bias=False)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.3)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.dropout(self.norm(self.first(x)).sin())
        hidden = hidden + self.dropout(F.gelu(self.second(hidden)))
        result = self.last(hidden)
        return result.pow(2).mean(), result


def trained(model: nn.Module, step: Callable[..., Any], inputs: list[torch.Tensor]) -> list[Any]:
    """Losses of steps with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x in inputs:
        optimizer.zero_grad()
        loss, _ = step(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def accumulated(model: nn.Module, step: Callable[..., Any]) -> list[torch.Tensor]:
    """Gradients of two micro-steps are added, clipped and applied."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for index, x in enumerate(batches(4, 64, 16)):
        loss, _ = step(x)
        loss.backward()
        losses.append(loss.detach())

        if index % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def other_sizes(model: nn.Module, step: Callable[..., Any]) -> list[torch.Tensor]:
    """The last batch is smaller."""
    return trained(model, step, [*batches(2, 64, 16), *batches(1, 48, 16)])


def in_bfloat16(model: nn.Module, step: Callable[..., Any]) -> list[torch.Tensor]:
    """Products in bfloat16."""

    def cast(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return step(x)

    return trained(model, cast, batches(2, 64, 16))


@pytest.mark.parametrize("loop", [accumulated, other_sizes, in_bfloat16])
def test_a_loop_ends_as_with_torch_compile(loop: Loop) -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    step = remat.checkpoint(
        model, "90%", executor="inductor", costs="roofline", time_limit_s=1.0, plan_cache=False
    )

    ends = []
    for one, call in ((plain, torch.compile(plain)), (model, step)):
        torch.manual_seed(3)
        losses = loop(one, call)
        gradients = [p.grad for p in one.parameters() if p.grad is not None]
        ends.append([*losses, *one.state_dict().values(), *gradients, torch.rand(4)])

    loose = loop is in_bfloat16
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=2e-2 if loose else 1e-4, atol=2e-3 if loose else 1e-6
        )

    report = remat.report(model)
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.budget_bytes
