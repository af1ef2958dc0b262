"""Training loops as people write them, through Inductor: they end where torch.compile's do."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat

pytestmark = [
    pytest.mark.usefixtures("fresh_torch"),
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++"
    ),
    # torch 2.13's, where `torch.compile` imports Inductor
    pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning"),
]

Loop = Callable[[nn.Module, Callable[..., Any]], list[torch.Tensor]]


class Net(nn.Module):
    """Dropout, batch norm, two layers with one weight; returns its loss and what it is of."""

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


def batches(count: int, size: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(size, 16, generator=generator) for _ in range(count)]


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
    for index, x in enumerate(batches(4)):
        loss, _ = step(x)
        loss.backward()
        losses.append(loss.detach())
        if index % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def evaluated(model: nn.Module, step: Callable[..., Any]) -> list[torch.Tensor]:
    """Runs without gradients in between."""
    losses = trained(model, step, batches(2))
    model.eval()
    with torch.no_grad():
        losses.append(step(batches(1)[0])[0])
    model.train()
    return losses + trained(model, step, batches(2))


def other_sizes(model: nn.Module, step: Callable[..., Any]) -> list[torch.Tensor]:
    """The last batch is smaller."""
    return trained(model, step, [*batches(2), *batches(1, size=48)])


def frozen(model: nn.Module, step: Callable[..., Any]) -> list[torch.Tensor]:
    """A layer is frozen for some steps."""
    losses = trained(model, step, batches(1))
    second: Any = model.second
    second.requires_grad_(False)
    losses += trained(model, step, batches(1))
    second.requires_grad_(True)
    return losses + trained(model, step, batches(1))


def in_bfloat16(model: nn.Module, step: Callable[..., Any]) -> list[torch.Tensor]:
    """Products in bfloat16."""

    def cast(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return step(x)

    return trained(model, cast, batches(2))


def two_calls(model: nn.Module, step: Callable[..., Any]) -> list[torch.Tensor]:
    """Two forwards before a backward."""
    (loss, _), (other, _) = map(step, batches(2))
    (loss + 2 * other).backward()
    return [loss.detach(), other.detach()]


@pytest.mark.parametrize(
    "loop", [accumulated, evaluated, other_sizes, frozen, in_bfloat16, two_calls]
)
def test_a_loop_ends_where_that_of_torch_compile_does(loop: Loop) -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    step = remat.checkpoint(
        model, "90%", executor="inductor", costs="roofline", time_limit_s=2.0, plan_cache=False
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
