"""A planned module in a larger step: the rest is measured, given room, and reported."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.face.outside_room import OutsideRoom, _arriving_bytes
from remat.run.measure import FirstStepMeter
from remat.run.whole_step import await_backward
from tests.support.allocator import Allocator
from tests.support.outside_memory import (
    ANOTHER,
    Step,
    batch,
    half_checkpointed,
    loss_of_any_size,
    loss_outside,
    net,
    planned,
    run_step,
    several_calls,
    whole_of,
    whole_peak,
)
from tests.support.planned import call_of

pytestmark = pytest.mark.usefixtures("fresh_torch", "torch_is_left_as_it_was")


def another_module(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = ANOTHER(model(x)).square().mean()
    return loss


class Doubled(torch.autograd.Function):
    """Keeps a tensor as an attribute, as some functions do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = x.clone()
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient: torch.Tensor = gradients[0] * 2 + ctx.kept.mul(0)
        return gradient


def function_in_python(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = Doubled.apply(model(x))  # type: ignore[no-untyped-call]
    return out.softmax(1).square().mean() + out.exp().mean()


OUTSIDE = [loss_outside, another_module, function_in_python, half_checkpointed]


def loss_inside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x) / 3
    return loss


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.body(x).square().mean()
        return loss


def run_steps(step: Step, model: nn.Module, x: torch.Tensor) -> None:
    for _ in range(5):
        run_step(step, model, x)


@pytest.mark.parametrize("step", [*OUTSIDE, several_calls])
def test_the_whole_peak_is_the_true_one_and_within_its_budget(
    step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    """A profiler around the step sees the same peak.

    Naive: what autograd saved outside counts as held to the end. Or the plan and its measurement
    cover one call, and the rest is never seen.
    """
    model, x = planned(net(), 1 << 30), batch()
    run_step(step, model, x)
    whole_bytes = whole_of(model)
    assert whole_bytes is not None
    assert whole_bytes == pytest.approx(whole_peak(step, model, x), abs=600)
    run_step(step, model, x)
    assert remat.report(model).outside_bytes == 0

    budget = int(0.93 * whole_bytes)
    planned(remat.unwrap(model), budget)

    with caplog.at_level(logging.WARNING, logger="remat"):
        run_step(step, model, x)
        assert (whole_of(model) or 0) > budget
        run_steps(step, model, x)
    warnings = [r.getMessage() for r in caplog.records if "whole step" in r.getMessage()]
    assert len(warnings) == 1 and "lambda x, y: criterion(model(x), y)" in warnings[0]

    report = remat.report(model)
    assert report.outside_bytes > 0 and "outside of the module" in str(report)
    assert report.whole_peak_bytes is not None and report.whole_peak_bytes <= budget
    assert whole_peak(step, model, x) <= budget


def test_the_plan_knows_when_the_loss_is_computed() -> None:
    """One new plan, whose prediction is what the whole step holds, to the byte.

    Naive: bytes held outside come off the budget at all times, which costs recomputations.
    """
    model, x = planned(net(), 1 << 30), batch()
    run_step(loss_outside, model, x)
    kept_whole = whole_of(model)
    assert kept_whole is not None

    planned(remat.unwrap(model), kept_whole - 80_000)
    run_step(loss_outside, model, x)
    run_step(loss_outside, model, x)

    report = remat.report(model)
    assert report.solution.peak_bytes == pytest.approx(report.whole_peak_bytes, abs=16)
    assert report.keep_all.peak_bytes == pytest.approx(kept_whole, abs=16)
    assert report.solution.overhead < 0.1


@pytest.mark.parametrize("step", [loss_outside, several_calls])
def test_the_error_names_a_budget_that_suffices(step: Step) -> None:
    model, x = net(), batch()
    least = remat.minimum(remat.trace(model, (x,), costs="flops"), time_limit_s=1.0).peak_bytes
    planned(model, least + 1000)
    with pytest.raises(remat.BudgetError, match="whole step") as found:
        run_steps(step, model, x)
    needed_bytes = found.value.minimum_bytes
    assert needed_bytes > least + 1000

    planned(remat.unwrap(model), needed_bytes)
    run_steps(step, model, x)
    assert whole_peak(step, model, x) <= needed_bytes + 512


def test_smaller_batches_go_on_after_the_error() -> None:
    model, x = planned(net(), 900_000), batch()
    with pytest.raises(remat.BudgetError, match="whole step"):
        run_steps(loss_of_any_size, model, x)
    run_steps(loss_of_any_size, model, x[:16])
    assert (whole_of(model) or 1 << 30) <= 900_000


def test_other_shapes_get_room_in_proportion(caplog: pytest.LogCaptureFixture) -> None:
    """Naive: each new length exceeds the budget once, and all lengths are planned again."""
    model, x = planned(net(), 1 << 30), batch()
    run_step(loss_of_any_size, model, x)
    budget = int(0.95 * (whole_of(model) or 0))
    planned(remat.unwrap(model), budget)

    run_steps(loss_of_any_size, model, x[:124])
    assert remat.report(model).outside_bytes > 0
    run_step(loss_of_any_size, model, x)
    assert (whole_of(model) or 1 << 30) <= budget


def test_a_loss_inside_needs_no_room(caplog: pytest.LogCaptureFixture) -> None:
    """At the least budget, which the plan uses to the last byte."""
    model, x = WithLoss(), batch()
    graph = remat.trace(model, (x,), costs="flops")
    planned(model, remat.minimum(graph, time_limit_s=2.0).peak_bytes, gap=0.5)
    with caplog.at_level(logging.WARNING, logger="remat"):
        run_steps(loss_inside, model, x)

    report = remat.report(model)
    assert report.outside_bytes == 0 and "outside" not in str(report)
    assert not [r for r in caplog.records if "whole step" in r.getMessage()]
    assert report.whole_peak_bytes == pytest.approx(report.solution.peak_bytes, abs=64)


def test_a_step_function_has_nothing_outside(caplog: pytest.LogCaptureFixture) -> None:
    model, x = net(), batch()
    step = remat.checkpoint(
        lambda x: loss_outside(model, x), "80%", costs="flops", time_limit_s=2.0, plan_cache=False
    )

    with caplog.at_level(logging.WARNING, logger="remat"):
        for _ in range(3):
            step(x).backward()  # type: ignore[no-untyped-call]
            model.zero_grad()

    report = remat.report(step)
    assert report.whole_peak_bytes == pytest.approx(report.measured_peak_bytes, abs=64)
    assert report.outside_bytes == 0
    assert not [r for r in caplog.records if "whole step" in r.getMessage()]


def test_a_percentage_includes_what_is_held_outside() -> None:
    """Naive: keeping everything exceeds 100 %, and is planned again with less."""
    model, x = planned(net(), "100%"), batch()
    run_steps(loss_outside, model, x)
    report = remat.report(model)
    assert report.solution.overhead == 0
    assert whole_peak(loss_outside, model, x) <= report.budget_bytes


def test_values_and_gradients_stay_the_same() -> None:
    model, x = net(), batch()

    def values() -> list[torch.Tensor]:
        loss = loss_outside(model, x)
        loss.backward()
        found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        return found

    want = values()
    planned(model, 1 << 30)
    values()
    planned(remat.unwrap(model), int(0.95 * (whole_peak(loss_outside, model, x))))
    for _ in range(4):
        torch.testing.assert_close(values(), want, rtol=0, atol=0)
    assert remat.report(model).outside_bytes > 0


def test_accumulated_gradients_are_not_outside() -> None:
    """Naive: gradients of earlier micro-steps count as held outside."""
    model, x = planned(net(), 1 << 30, is_accumulating=True), batch()
    for _ in range(3):
        loss_outside(model, x).backward()

    first, second = call_of(model).pieces
    assert first.meter.whole is not None and second.meter.whole is not None
    assert second.meter.whole.peak_bytes <= first.meter.whole.peak_bytes


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_inductor_runs_a_plan_that_leaves_room() -> None:
    model, x = planned(net(), 1 << 30, executor="inductor"), batch()
    run_step(loss_outside, model, x)
    budget = int(0.95 * (whole_of(model) or 0))
    planned(remat.unwrap(model), budget, executor="inductor")
    run_steps(loss_outside, model, x)
    assert remat.report(model).outside_bytes > 0
    assert whole_peak(loss_outside, model, x) <= budget


def test_a_given_plan_is_warned_about_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    model, x = net(), batch()
    graph = remat.trace(model, (x,), costs="flops")
    remat.wrap(model, remat.solve(graph, "100%", time_limit_s=1.0), costs="flops")
    with caplog.at_level(logging.WARNING, logger="remat"):
        run_steps(lambda model, x: model(x).softmax(1).exp().log().mean(), model, x)
    warnings = [r.getMessage() for r in caplog.records if "whole step" in r.getMessage()]
    assert len(warnings) == 1 and "This plan was given" in warnings[0]


def on_cuda(allocator: Allocator) -> tuple[FirstStepMeter, Callable[[], torch.Tensor]]:
    """A step whose forward saves 100 bytes, and whose backward holds 300 more.

    The allocator's blocks are 28 bytes larger in each half; a plan need not predict that.
    """
    meter = FirstStepMeter("cuda", 40, 1)
    saved = torch.empty(100, dtype=torch.uint8)

    def forward(args: list[Any]) -> list[torch.Tensor]:
        allocator.change(requested=100, allocated=128)
        return [args[0] * 2, saved]

    def backward(args: list[Any]) -> list[torch.Tensor]:
        allocator.change(requested=300, allocated=328)
        allocator.change(requested=-400, allocated=-456)
        return [args[0] * 2]

    class Compiled(torch.autograd.Function):
        compiled_fw = None

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return meter.forward(forward)([x])[0]  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return meter.backward(backward)([*gradients, saved])[0]  # type: ignore[no-any-return]

    def call() -> torch.Tensor:
        result: torch.Tensor = Compiled.apply(torch.ones(3, requires_grad=True))  # type: ignore[no-untyped-call]
        await_backward([meter], [result], [], allocator)
        return result

    return meter, call


@pytest.mark.parametrize("loss_bytes", [0, 500])
def test_on_cuda_the_allocator_is_asked(loss_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 bytes are held before."""
    allocator = Allocator(requested=1000, allocated=1024).install(monkeypatch)
    meter, call = on_cuda(allocator)
    call()  # without a backward
    result = call()

    allocator.change(requested=loss_bytes, allocated=loss_bytes)
    allocator.change(requested=-loss_bytes, allocated=-loss_bytes)
    result.sum().backward()

    assert meter.whole is not None and meter.whole.num_calls == 1
    # without the 1000 bytes, and without what the first forward left
    assert meter.whole.peak_bytes == 40 + 100 + max(300, loss_bytes)
    # the planned halves alone, with the gradient that arrived
    assert (meter.tensor_bytes, meter.peak_bytes) == (40 + 100 + 4 + 300, 40 + 128 + 4 + 328)
    if loss_bytes:
        assert meter.whole.outside_bytes == 40 + loss_bytes


@pytest.mark.parametrize("is_known", [False, True], ids=["its first step", "later"])
def test_on_cuda_another_plan_in_between_is_not_outside(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a planned teacher's forward, which has a budget of its own.

    Naive: the GPU's peak is this plan's, which is made again with a smaller budget in each step.
    """
    allocator = Allocator(requested=1000, allocated=1024).install(monkeypatch)
    (meter, call), teacher = on_cuda(allocator), FirstStepMeter("cuda", 0, 1)
    teacher.peak_bytes = 9 if is_known else None

    def forward(args: list[Any]) -> list[torch.Tensor]:
        allocator.change(requested=5000, allocated=5000)
        allocator.change(requested=-2000, allocated=-2000)
        return args

    result = call()
    teacher.forward(forward)([torch.ones(2)])
    result.sum().backward()

    assert meter.whole is None
    assert (meter.tensor_bytes, meter.peak_bytes) == (40 + 100 + 4 + 300, 40 + 128 + 4 + 328)


def test_room_for_a_loss_stays_while_other_plans_are_tried() -> None:
    """Naive: the first refusal forgets it, and the next plan is made without the loss."""
    graph = remat.trace(net(), (batch(),), costs="flops", differentiate="all")

    def refuse(step: Any, room_bytes: int) -> Any:
        raise remat.BudgetError("", budget_bytes=1, minimum_bytes=2, is_proved=False)

    arriving_bytes = _arriving_bytes(graph)
    room = OutsideRoom(net(), is_fixed=False, loss_bytes=500, _measured_at=arriving_bytes)
    step = SimpleNamespace(graph=graph)
    for _ in range(2):
        with pytest.raises(remat.BudgetError, match="500 bytes"):
            room.plan(step, refuse)
    assert room.loss_bytes == 500
    room.forget_refused()
    assert room.loss_bytes == 0
