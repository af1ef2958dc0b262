"""A module that is planned alone while its step does more: measured, left room for, and said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat

pytestmark = pytest.mark.usefixtures("fresh_torch")

WIDTH, ROWS, CLASSES = 32, 128, 512
Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def net(last: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, last))


def loss_outside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x)) % CLASSES)


def several_calls(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - model(x + 1)).square().mean()
    return loss


def loss_inside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x) / 3
    return loss


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net(CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()  # type: ignore[no-any-return]


def run_step(step: Step, model: nn.Module, x: torch.Tensor) -> None:
    step(model, x).backward()
    model.zero_grad()


def run_steps(step: Step, model: nn.Module, x: torch.Tensor) -> None:
    for _ in range(4):
        run_step(step, model, x)


def whole_peak(step: Step, model: nn.Module, x: torch.Tensor) -> int:
    """Measured from outside."""
    resident_bytes = x.nbytes + sum(p.nbytes for p in model.parameters())
    return resident_bytes + remat.measure(lambda: run_step(step, model, x), device="cpu").peak_bytes


def planned(model: nn.Module, budget: int, **options: Any) -> nn.Module:
    return remat.checkpoint(
        model, budget, costs="flops", time_limit_s=3.0, plan_cache=False, **options
    )


@pytest.mark.parametrize("step", [loss_outside, several_calls])
def test_the_whole_step_is_within_its_budget(step: Step, caplog: Any) -> None:
    """Naive: the plan and its measurement belong to one call, and nobody sees the rest."""
    model, x = net(CLASSES), torch.randn(ROWS, WIDTH)
    graph = remat.trace(model, (x,), costs="flops")
    alone = remat.simulate(graph, remat.Schedule.keep_all(graph)).peak_bytes
    budget = alone + 20_000 if step is loss_outside else 3 * alone // 2
    planned(model, budget)

    with caplog.at_level(logging.WARNING, logger="remat"):
        run_step(step, model, x)
        before = remat.report(model)
        assert before.whole_peak_bytes is not None and before.whole_peak_bytes > budget
        for _ in range(3):
            run_step(step, model, x)
    warnings = [r.getMessage() for r in caplog.records if "whole step" in r.getMessage()]
    assert len(warnings) == 1 and "lambda x, y: criterion(model(x), y)" in warnings[0]

    report = remat.report(model)
    assert report.outside_bytes > 0 and "room left" in str(report)
    assert report.whole_peak_bytes is not None and report.whole_peak_bytes <= budget
    assert whole_peak(step, model, x) <= budget


@pytest.mark.parametrize("step", [loss_outside, several_calls])
def test_what_would_be_needed_is_said(step: Step) -> None:
    """The plan that holds the least is run before anything is refused."""
    model, x = net(CLASSES), torch.randn(ROWS, WIDTH)
    least = remat.minimum(remat.trace(model, (x,), costs="flops"), time_limit_s=2.0).peak_bytes
    planned(model, least + 1000)
    with pytest.raises(remat.BudgetError, match="the whole step held") as found:
        run_steps(step, model, x)
    assert found.value.minimum_bytes > least + 1000

    remat.unwrap(model)
    planned(model, found.value.minimum_bytes)
    run_steps(step, model, x)
    assert whole_peak(step, model, x) <= found.value.minimum_bytes + 512


def test_what_is_measured_is_what_is_held() -> None:
    """The step as a profiler around it sees it, to the byte."""
    for step, model in ((loss_outside, net(CLASSES)), (several_calls, net(4))):
        x = torch.randn(ROWS, WIDTH)
        planned(model, 1 << 30)
        run_step(step, model, x)
        measured = remat.report(model).whole_peak_bytes
        assert measured is not None
        assert abs(measured - whole_peak(step, model, x)) <= 512 + 8 * ROWS
        torch._dynamo.reset()


def test_a_loss_inside_needs_no_room(caplog: Any) -> None:
    model, x = WithLoss(), torch.randn(ROWS, WIDTH)
    graph = remat.trace(model, (x,), costs="flops")
    least = remat.minimum(graph, time_limit_s=2.0).peak_bytes
    planned(model, least)
    with caplog.at_level(logging.WARNING, logger="remat"):
        for _ in range(3):
            run_step(loss_inside, model, x)
    report = remat.report(model)
    assert report.outside_bytes == 0 and "room left" not in str(report)
    assert not [r for r in caplog.records if "whole step" in r.getMessage()]
    assert report.whole_peak_bytes is not None
    assert abs(report.whole_peak_bytes - report.solution.peak_bytes) <= 64


def test_a_step_without_a_backward_leaves_no_profiler() -> None:
    model, x = WithLoss(), torch.randn(ROWS, WIDTH)
    planned(model, 1 << 30)
    for _ in range(3):
        model(x)
    run_step(loss_inside, model, x)
    assert remat.report(model).whole_peak_bytes is not None
    assert not torch._C._autograd._profiler_enabled()
    with torch.profiler.profile():
        run_step(loss_inside, model, x)
