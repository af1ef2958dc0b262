"""A first step is measured whatever runs beside it, and leaves torch as it was."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.torch_border.allocator import is_profiling
from tests.support.outside_memory import (
    CLASSES,
    WIDTH,
    Step,
    batch,
    is_watched,
    loss_of_any_size,
    loss_outside,
    net,
    planned,
    run_step,
    several_calls,
    whole_of,
    whole_peak,
)

pytestmark = pytest.mark.usefixtures("fresh_torch", "torch_is_left_as_it_was")


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.12
def test_torch_is_as_it_was_after_the_first_step() -> None:
    model, x = planned(net(), 1 << 30), batch()
    loss = loss_outside(model, x)
    assert is_watched()
    loss.backward()
    assert not is_watched()

    model.zero_grad()
    loss = loss_outside(model, x)
    assert not is_watched()
    with torch.profiler.profile():
        loss.backward()


def test_a_forward_without_backward_leaves_nothing() -> None:
    """An evaluation that forgot `no_grad`, then training."""
    model, x = planned(net(), 1 << 30), batch()
    for _ in range(3):
        model(x)
        assert not is_watched() and not is_profiling()
    run_step(loss_outside, model, x)
    assert whole_of(model) == pytest.approx(whole_peak(loss_outside, model, x), abs=600)


def test_earlier_forwards_that_are_kept_do_not_count() -> None:
    model, x = planned(net(), 1 << 30), batch()
    kept = [model(x), model(x)]
    run_step(loss_outside, model, x)
    assert not is_watched()
    assert whole_of(model) == pytest.approx(whole_peak(loss_outside, model, x), abs=600)
    del kept


def test_an_error_before_the_backward_leaves_nothing() -> None:
    model, x = planned(net(), 1 << 30), batch()

    def fails() -> None:
        loss_outside(model, x)
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fails()
        gc.collect()
        assert not is_watched() and not is_profiling()

    run_step(loss_outside, model, x)
    assert whole_of(model) == pytest.approx(whole_peak(loss_outside, model, x), abs=600)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no gradient")


def test_an_error_in_the_backward_leaves_nothing() -> None:
    """Errors from outside of the module, and from remat itself."""
    model, x = planned(net(), 1 << 30), batch()
    with pytest.raises(RuntimeError, match="no gradient"):
        Fails.apply(model(x)).exp().mean().backward()  # type: ignore[no-untyped-call]
    assert not is_watched() and not is_profiling()

    loss = loss_outside(model, x)
    with pytest.raises(remat.TraceError, match="runs its backward once"):
        loss.backward(retain_graph=True)
    assert not is_watched() and not is_profiling()

    run_step(loss_outside, model, x)
    assert whole_of(model) == pytest.approx(whole_peak(loss_outside, model, x), abs=600)


def test_a_step_that_runs_plain_has_no_whole_peak() -> None:
    """Naive: what plain PyTorch held counts as held outside the plan."""
    model, x = planned(net(), 1 << 30, on_unsupported="plain"), batch()
    loss = loss_outside(model, x)
    loss.backward(retain_graph=True)
    assert not is_watched() and whole_of(model) is None
    loss.backward()
    del loss
    model.zero_grad()

    run_step(loss_outside, model, x)
    assert whole_of(model) == pytest.approx(whole_peak(loss_outside, model, x), abs=600)


def test_a_deleted_model_leaves_nothing() -> None:
    model, x = planned(net(), 1 << 30), batch()
    loss = loss_outside(model, x)
    del model
    assert is_watched()
    del loss
    assert not is_watched()


def test_other_backwards_run_as_before() -> None:
    """Backwards of another model: in threads, by `grad`, and a hundred while a loss is kept."""
    model, x, other = planned(net(), 1 << 30), batch(), nn.Linear(WIDTH, 1)
    loss = loss_outside(model, x)

    threads = [threading.Thread(target=lambda: other(x).sum().backward()) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    (gradient,) = torch.autograd.grad(other(x).sum(), [other.weight])
    assert other.weight.grad is not None
    assert torch.equal(other.weight.grad, 2 * gradient) and is_watched()

    loss.backward()
    assert whole_of(model) is not None and not is_watched()

    kept = loss_of_any_size(model, x[:5])
    for _ in range(100):
        other(x).sum().backward()
    assert not is_watched()
    kept.backward()


def test_a_backward_in_another_thread_is_measured() -> None:
    model, x = planned(net(), 1 << 30), batch()
    loss = loss_outside(model, x)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()

    del loss
    model.zero_grad()
    assert whole_of(model) == pytest.approx(whole_peak(loss_outside, model, x), abs=600)


def test_a_step_by_autograd_grad_is_measured() -> None:
    model, x = planned(net(), 1 << 30), batch()
    torch.autograd.grad(loss_outside(model, x), list(model.parameters()))
    assert whole_of(model) == pytest.approx(whole_peak(loss_outside, model, x), abs=600)


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_step_of_two_plans_has_no_whole_peak(is_broken: bool) -> None:
    """Each plan has its own budget. Naive: each counts the other's memory as outside."""

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(CLASSES, 8), nn.GELU(), nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if is_broken:
                torch._dynamo.graph_break()
            out: torch.Tensor = self.layers(x)
            return out

    model, second, x = planned(net(), 1 << 30), planned(Second(), 1 << 30), batch()
    for _ in range(3):
        second(model(x)).square().mean().backward()
    assert whole_of(model) is None
    assert remat.report(second).whole_peak_bytes is None


def test_a_users_profiler_is_left_alone() -> None:
    model, x = planned(net(), 1 << 30), batch()
    with torch.profiler.profile() as profiler:
        run_step(loss_outside, model, x)
    assert any("Backward" in event.key for event in profiler.key_averages())
    assert whole_of(model) is None

    run_step(loss_outside, model, x)
    assert whole_of(model) == pytest.approx(whole_peak(loss_outside, model, x), abs=600)


@pytest.mark.parametrize("step", [loss_outside, several_calls])
def test_a_first_step_inside_a_measurement_is_measured(step: Step) -> None:
    """Naive: a profiler runs already, so the report has no measured peak."""
    model, x = planned(net(), 1 << 30), batch()
    run_step(step, model, x)
    want = remat.report(model).measured_peak_bytes
    planned(remat.unwrap(model), 1 << 30)
    remat.measure(lambda: run_step(step, model, x), device="cpu")
    assert remat.report(model).measured_peak_bytes == want
