"""Peaks on CUDA: requested, allocated, reserved. The allocator's answers are made up here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.core.cuda_peaks import CudaPeaks
from remat.look.report import Report
from remat.pieces.step_meter import StepMeter
from remat.run.cuda_mark import CudaMark
from remat.run.measure import FirstStepMeter
from remat.torch_border.cuda_allocator import turn_of
from remat.tracers.replay import _workspace_cuda
from tests.support.allocator import Allocator

MIB = 1 << 20


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """Holds 100 MiB of other things, and had a peak of 900 before."""
    allocator = Allocator(requested=99 * MIB, allocated=100 * MIB, reserved=120 * MIB)
    allocator.peaks = {"requested": 900 * MIB, "allocated": 900 * MIB, "reserved": 900 * MIB}
    return allocator.install(monkeypatch)


def test_measure_gives_three_peaks_of_the_callable_alone(allocator: Allocator) -> None:
    def fn() -> None:
        allocator.change(requested=9 * MIB, allocated=10 * MIB, reserved=40 * MIB)
        allocator.change(requested=-9 * MIB, allocated=-10 * MIB)

    measured = remat.measure(fn, device="cuda")

    assert measured.peak_bytes == 10 * MIB
    assert measured.cuda_peaks == CudaPeaks(9 * MIB, 10 * MIB, 60 * MIB)  # 20 were free before
    assert allocator.calls.index("empty_cache") < len(allocator.calls) - 1
    assert remat.measure(lambda: None, device="cpu").cuda_peaks is None


def test_a_first_step_inside_of_a_measurement_does_not_hide_its_peak(allocator: Allocator) -> None:
    """Naive: the step resets the GPU's peaks before its backward, and its forward held more."""

    def fn() -> None:
        allocator.change(requested=9 * MIB, allocated=9 * MIB)
        allocator.change(requested=-8 * MIB, allocated=-8 * MIB)
        CudaMark.now()

    assert remat.measure(fn, device="cuda").peak_bytes == 9 * MIB


@pytest.mark.parametrize("is_users", [False, True])
def test_a_users_memory_history_goes_on(is_users: bool, allocator: Allocator) -> None:
    """Naive: it ends, and what it recorded before is part of the timeline."""

    def fn() -> None:
        allocator.change(requested=9 * MIB, allocated=10 * MIB)
        allocator.change(requested=-6 * MIB, allocated=-7 * MIB)

    if is_users:
        allocator.record()
        allocator.change(requested=50 * MIB, allocated=50 * MIB)

    measured = remat.measure(fn, device="cuda")
    assert measured.bytes_held == (9 * MIB, 3 * MIB)
    assert (measured.peak_bytes, measured.end_bytes) == (10 * MIB, 3 * MIB)
    assert allocator.is_recording == is_users
    assert len(allocator.history) == 3 * is_users


def test_the_peak_of_a_step_leaves_out_what_others_hold(allocator: Allocator) -> None:
    """The device's own peak, 115 MiB, includes the optimizer's state and other models."""
    meter = FirstStepMeter("cuda", resident_bytes=7 * MIB, num_results=1)
    saved = torch.ones(3)

    def forward(args: list[Any]) -> list[torch.Tensor]:
        allocator.change(requested=4 * MIB, allocated=5 * MIB, reserved=20 * MIB)
        return [saved.sum(), saved]

    def backward(args: list[Any]) -> list[torch.Tensor]:
        allocator.change(requested=8 * MIB, allocated=10 * MIB)
        return []

    meter.forward(forward)([torch.ones(2)])
    before = meter.peak_bytes
    meter.backward(backward)([saved])

    assert (before, meter.peak_bytes) == (None, 22 * MIB)
    assert meter.cuda_peaks == CudaPeaks(19 * MIB, 22 * MIB, 47 * MIB)


def step_in_pieces(allocator: Allocator) -> tuple[StepMeter, torch.Tensor]:
    """A step that holds 4 MiB, in blocks of 5, after its forward."""
    meter = StepMeter("cuda", resident_bytes=7 * MIB)
    layer, token = nn.Linear(2, 2), torch.ones(1)

    def forward() -> torch.Tensor:
        meter.saved(token, ())
        allocator.change(requested=4 * MIB, allocated=5 * MIB)
        return layer(torch.ones(2)).sum()  # type: ignore[no-any-return]

    loss = meter.forward(forward, ())
    loss.register_hook(lambda arrived: meter.backward(lambda args: args, [arrived], 1, token)[0])
    return meter, loss


def test_the_peak_in_pieces_leaves_out_the_rest_too(allocator: Allocator) -> None:
    meter, loss = step_in_pieces(allocator)
    loss.backward()
    assert meter.cuda_peaks == CudaPeaks(11 * MIB, 12 * MIB, 27 * MIB)
    assert meter.peak_bytes == 12 * MIB


def test_steps_that_tune_kernels_are_not_measured(allocator: Allocator) -> None:
    """Naive: what the tuning holds is the step's peak."""
    meter = StepMeter("cuda", 0, num_unmeasured=1)
    meter.forward(lambda: None, ())
    assert not allocator.calls
    meter.forward(lambda: None, ())
    assert allocator.calls


def profiled(allocator: Allocator) -> None:
    """A plan that is made measures its operators."""
    allocator.change(allocated=500 * MIB)
    allocator.change(allocated=-500 * MIB)
    _workspace_cuda(lambda: None)


def another_step(allocator: Allocator) -> None:
    """A step of another plan, which was measured before."""
    other = FirstStepMeter("cuda", 0, 1, peak_bytes=1)

    def forward(args: list[Any]) -> list[Any]:
        allocator.change(requested=500 * MIB, allocated=500 * MIB)
        allocator.change(requested=-400 * MIB, allocated=-400 * MIB)
        return args

    other.forward(forward)([])


def another_measured_step(allocator: Allocator) -> None:
    other = FirstStepMeter("cuda", 0, 1)
    other.forward(lambda args: args)([])
    another_step(allocator)


@pytest.mark.parametrize("is_expandable", [False, True])
def test_a_setting_made_at_run_time_is_known(is_expandable: bool, allocator: Allocator) -> None:
    """Naive: only the environment is read, and the setting is advised though it is made."""
    allocator.is_expandable = is_expandable
    meter, loss = step_in_pieces(allocator)
    loss.backward()
    whole, saved = FirstStepMeter("cuda", 0, 1), torch.ones(3)
    whole.forward(lambda args: [saved.sum(), saved])([])
    whole.backward(lambda args: [])([saved])
    for peaks in (meter.cuda_peaks, whole.cuda_peaks):
        assert peaks is not None and peaks.is_expandable == is_expandable


OTHERS = [profiled, another_step, another_measured_step]


@pytest.mark.parametrize("other", OTHERS)
def test_what_other_plans_hold_in_between_is_not_the_steps(
    other: Callable[[Allocator], None], allocator: Allocator
) -> None:
    """A GAN or a teacher.

    Naive: the peak of the GPU since the forward is the step's.
    """
    meter = FirstStepMeter("cuda", resident_bytes=7 * MIB, num_results=1)
    saved = torch.ones(3)

    def forward(args: list[Any]) -> list[torch.Tensor]:
        allocator.change(requested=30 * MIB, allocated=32 * MIB)
        allocator.change(requested=-26 * MIB, allocated=-27 * MIB)
        return [saved.sum(), saved]

    def backward(args: list[Any]) -> list[torch.Tensor]:
        allocator.change(requested=8 * MIB, allocated=10 * MIB)
        return []

    results = meter.forward(forward)([torch.ones(2)])
    other(allocator)
    meter.backward(backward)(results[1:])
    assert meter.cuda_peaks is not None
    assert meter.cuda_peaks.requested_bytes == meter.tensor_bytes == 37 * MIB
    assert meter.peak_bytes == meter.cuda_peaks.allocated_bytes == 39 * MIB


def test_gradients_that_arrive_are_part_of_the_step(allocator: Allocator) -> None:
    """They are allocated between the halves, and the backward frees them.

    Naive: the backward seems to hold less than before it.
    """
    meter = FirstStepMeter("cuda", 0, 1)
    saved, arrived = torch.ones(3), torch.ones(2 * MIB, dtype=torch.uint8)

    def backward(args: list[Any]) -> list[torch.Tensor]:
        allocator.change(requested=-2 * MIB, allocated=-2 * MIB)
        allocator.change(requested=MIB, allocated=MIB)
        return []

    meter.forward(lambda args: [saved.sum(), saved])([torch.ones(2)])
    allocator.change(requested=2 * MIB, allocated=2 * MIB)
    meter.backward(backward)([saved, arrived])
    assert meter.tensor_bytes == meter.peak_bytes == 2 * MIB


@pytest.mark.parametrize("other", OTHERS)
def test_a_step_in_pieces_with_another_plan_in_between_has_no_peak(
    other: Callable[[Allocator], None], allocator: Allocator
) -> None:
    """Naive: it is planned again with a smaller budget, in each step, until no plan fits."""
    meter, loss = step_in_pieces(allocator)
    other(allocator)
    turn_of(meter.owner)
    loss.backward()
    assert (meter.peak_bytes, meter.cuda_peaks, meter.tensor_bytes) == (None, None, 0)

    num_calls = len(allocator.calls)
    meter.forward(lambda: None, ())  # no step is measured from now on
    assert len(allocator.calls) == num_calls


@pytest.mark.parametrize(
    ("reserved", "is_expandable", "is_told"),
    [(104 * MIB, False, False), (117 * MIB, False, True), (117 * MIB, True, False)],
)
def test_another_setting_is_advised_if_much_reserved_memory_is_unused(
    reserved: int, is_expandable: bool, is_told: bool
) -> None:
    graph = remat.trace(nn.Linear(4, 4), (torch.randn(2, 4),), costs="flops")
    peaks = CudaPeaks(99 * MIB, 100 * MIB, reserved, is_expandable)

    text = str(Report(graph, remat.solve(graph, "100%"), 100 * MIB, cuda_peaks=peaks))

    assert ("expandable_segments:True" in text) == is_told
    assert "requested 99 MiB, allocated 100 MiB, reserved" in text
