"""The peak of a step in pieces is the same, measured from inside and from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.torch_border.allocator import is_profiling
from remat.torch_border.cuda_allocator import turn_of
from tests.support.broken_steps import (
    WIDTH,
    Base,
    Broken,
    batch,
    peak_of_a_step,
    runner_of,
)
from tests.support.planned import keep_nothing, loss_of, planned

pytestmark = pytest.mark.usefixtures("fresh_torch", "quick_first_step")


class Gap(Base):
    """Eager operators between two pieces; their backward holds more than the rest of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.blocks[1](torch.compiler.disable(self.between)(self.blocks[0](x))))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([x] * 8, 1).exp() * self.scale
        return (wide * wide.sin()).view(len(x), 8, WIDTH).mean(1)


class Output:
    """An object such as some libraries return, whose tensors torch's pytrees do not find."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss

    def backward(self) -> None:
        self.loss.backward()


class ReturnsAnObject(Gap):
    def forward(self, x: torch.Tensor) -> Any:
        return Output(super().forward(x))


@pytest.mark.parametrize("make", [Gap, ReturnsAnObject])
def test_the_measured_peak_is_that_of_a_step(make: Callable[[], Base]) -> None:
    """Other steps are measured in `test_graph_breaks.py`, where they are captured anyway.

    Naive: what eager nodes hold only within the backward is not seen. Or gradients that were freed
    stay counted.
    """
    model, x = make(), batch(0).requires_grad_()
    planned(model, keep_nothing)
    for _ in range(3):
        model.zero_grad()
        loss_of(model(x)).backward()
    assert remat.report(model).measured_peak_bytes == peak_of_a_step(model, x)


class Widens(Base):
    """Eager code holds much for a moment in its forward, which autograd does not know of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.blocks[1](torch.compiler.disable(self.between)(self.blocks[0](x))))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.stack([x.detach()] * 40).mean(0)


class ReturnsLogits(Base):
    """The caller computes the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[1](x)  # type: ignore[no-any-return]


def wide_loss(x: torch.Tensor) -> torch.Tensor:
    wide = torch.cat([x] * 8, 1)
    return (wide.exp() * wide.sin()).mean()


UNKNOWN = {"a forward's moment": (Widens, loss_of), "a loss outside": (ReturnsLogits, wide_loss)}


@pytest.mark.parametrize(("make", "loss"), UNKNOWN.values(), ids=UNKNOWN)
def test_plans_leave_room_for_what_is_only_measured(
    make: Callable[[], Base], loss: Callable[[Any], torch.Tensor]
) -> None:
    """Naive: the step holds twice its budget, and nobody sees it."""
    model, x = make(), batch(0).requires_grad_()
    peak_bytes = peak_of_a_step(model, x, loss)
    budget_bytes = int(0.97 * peak_bytes)
    remat.checkpoint(model, budget_bytes, costs="flops", time_limit_s=1.0)

    for _ in range(4):
        model.zero_grad()
        loss(model(x)).backward()

    report = remat.report(model)
    assert report.unplanned_bytes > 0
    assert report.measured_peak_bytes == peak_of_a_step(model, x, loss) <= budget_bytes


@pytest.mark.parametrize("make", [Gap, Widens])
def test_a_percentage_includes_what_gaps_hold(make: Callable[[], Base]) -> None:
    """Keeping everything is 100 %.

    Naive: 100 % is the peak of the graph alone, which leaves out what gaps hold.
    """
    model, x = make(), batch(0).requires_grad_()
    remat.checkpoint(model, "100%", costs="flops", time_limit_s=1.0)
    for _ in range(4):
        model.zero_grad()
        loss_of(model(x)).backward()

    report = remat.report(model)
    assert (report.unplanned_bytes > 0) == (make is Widens)
    assert report.solution.overhead == 0
    assert peak_of_a_step(model, x) == report.solution.budget_bytes + report.unplanned_bytes


def test_gradients_of_earlier_steps_do_not_count() -> None:
    """The plan leaves room for them separately.

    Naive: `.grad` of an earlier step counts as one that this backward made.
    """
    model, x = Gap(), batch(0).requires_grad_()
    planned(model, keep_nothing)
    for _ in range(2):
        loss_of(model(x)).backward()
    loss_of(model(x)).backward()

    measured = remat.report(model).measured_peak_bytes
    assert measured is not None
    held = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers(), x))
    assert (
        measured
        == held + remat.measure(lambda: loss_of(model(x)).backward(), device="cpu").peak_bytes
    )


def test_what_made_an_input_is_not_part_of_the_step() -> None:
    """Naive: autograd's graph continues beyond the input, and all of it is measured.

    What another model keeps for its backward then counts as this step's.
    """
    maker, peaks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), []
    for x in (maker(batch(0)), maker(batch(0)).detach().requires_grad_()):
        model = planned(Gap(), keep_nothing)
        loss_of(model(x)).backward()
        plan = runner_of(model).plan
        assert plan is not None
        peaks.append(plan.solution.peak_bytes)
    assert peaks[0] == peaks[1]


def test_both_halves_in_pieces_end_the_turn_of_another_plan() -> None:
    """So does a first step, which has no plan yet, and no meter."""
    model, x = Gap(), batch(0)
    planned(model, keep_nothing)
    loss_of(model(x)).backward()
    runner_of(model).device_type = "cuda"

    turn = turn_of(object())
    loss = loss_of(model(x))
    assert turn.is_over
    turn = turn_of(object())
    loss.backward()
    assert turn.is_over


class Fails(torch.autograd.Function):
    """Fails in its backward while `is_failing`."""

    is_failing = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        if Fails.is_failing:
            raise RuntimeError("no gradient")
        return gradients[0]


class FailsBetween(Gap):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Fails.apply(super().between(x))  # type: ignore[no-untyped-call]
        return out


def test_a_backward_that_fails_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler ends with the node that failed, and the next step is measured.

    Naive: the profiler runs on, and the next one can't start.
    """
    model, x = FailsBetween(), batch(0).requires_grad_()
    planned(model, keep_nothing)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no gradient"):
            loss_of(model(x)).backward()
        assert not is_profiling()
    assert remat.report(model).measured_peak_bytes is None

    monkeypatch.setattr(Fails, "is_failing", False)
    model.zero_grad()
    x.grad = None
    loss_of(model(x)).backward()
    assert remat.report(model).measured_peak_bytes == peak_of_a_step(model, x)


def test_a_backward_after_another_forward_is_not_mistaken_for_its_own() -> None:
    """Of two forwards, the last is measured.

    Naive: the backward of the first is measured, with what the second holds.
    """
    model, x = Broken(), batch(0).requires_grad_()
    planned(model, keep_nothing)
    loss_of(model(x)).backward()
    first, second = loss_of(model(x)), loss_of(model(x))
    first.backward()
    second.backward()
    assert remat.report(model).measured_peak_bytes is None

    model.zero_grad()
    x.grad = None
    loss_of(model(x)).backward()
    assert remat.report(model).measured_peak_bytes == peak_of_a_step(model, x)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11
def test_a_users_profiler_is_left_alone() -> None:
    model, x = Gap(), batch(0)
    planned(model, keep_nothing)
    loss_of(model(x)).backward()

    loss = loss_of(model(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loss.backward()
    assert any("Backward" in event.key for event in profiler.key_averages())
    assert not is_profiling()
