"""Plans run by Inductor: results of `torch.compile`, dropout included, within the budget."""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

import remat
from remat.inductor.kernel_order import Loops
from tests.support.fused_models import Net, batch
from tests.support.planned import (
    COMPILES,
    UNLIMITED,
    ChangedBuffer,
    Given,
    call_of,
    keep_all,
    keep_nothing,
)

pytestmark = [pytest.mark.usefixtures("fresh_torch"), *COMPILES]


def state_after(
    model: nn.Module, step: Callable[..., torch.Tensor], seed: int
) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = step(batch())
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]


@pytest.fixture(scope="module")
def expected() -> tuple[Net, list[list[torch.Tensor]]]:
    """A model, and what `torch.compile` alone computes in two steps."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    compiled = torch.compile(plain)
    return model, [state_after(plain, compiled, seed) for seed in (1, 2)]


def bytes_held_by_a_step(model: nn.Module) -> int:
    """Returns the measured peak of a step, with the model and its input."""
    model.zero_grad()
    x = batch()
    held = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers(), x))
    return remat.measure(lambda: model(x).backward(), device="cpu").peak_bytes + held


@pytest.mark.parametrize("budget", ["65%", "keep nothing"])
def test_a_plan_computes_what_torch_compile_does_within_the_budget(
    budget: str, expected: tuple[Net, list[list[torch.Tensor]]]
) -> None:
    """Naive: a mask is drawn again in the backward, and half of the gradient is wrong.

    PyTorch 2.13's own partitioner does so.
    """
    model = copy.deepcopy(expected[0])
    if budget == "keep nothing":
        remat.checkpoint(
            model, UNLIMITED, solver=Given(keep_nothing), executor="inductor", costs="flops"
        )
    else:
        remat.checkpoint(
            model, budget, executor="inductor", costs="roofline", time_limit_s=1.0, plan_cache=False
        )

    for seed, states in zip((1, 2), expected[1], strict=True):
        for ours, theirs in zip(state_after(model, model, seed), states, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)

    report = remat.report(model)
    assert report.measured_peak_bytes == report.kernels_peak_bytes  # known before the first step
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.solution.budget_bytes

    times = Counter(report.schedule.steps)
    drawn = [
        index for index, op in enumerate(report.graph.operators) if "inductor_seeds" in op.target
    ]
    assert drawn
    assert all(times[index] == 1 for index in drawn)

    assert bytes_held_by_a_step(model) <= report.solution.budget_bytes + 16

    if budget == "keep nothing":
        masks = {
            i
            for piece in call_of(model).pieces
            for i, op in enumerate(piece.step.graph.operators)
            if "inductor_random" in op.target
        }

        # masks are made again from their seeds: only seeds and results of the forward are kept
        assert masks
        assert report.solution.overhead > 0.2


def test_the_backward_reads_a_buffer_as_it_was_before_it_changed() -> None:
    """Naive: the backward reads the changed buffer, as with Inductor's own partitioner."""
    model = ChangedBuffer(32)
    plain = copy.deepcopy(model)
    remat.checkpoint(
        model, UNLIMITED, solver=Given(keep_nothing), executor="inductor", costs="flops"
    )

    for seed in (1, 2):
        for ours, theirs in zip(
            state_after(model, model, seed), state_after(plain, plain, seed), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_kernels_of_the_last_round_run(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expected: tuple[Net, list[list[torch.Tensor]]],
) -> None:
    """Naive: the kernels of the round before the last are ordered and run."""
    from torch._inductor import config as inductor_config

    def all_apart(loops: Loops, *_: object) -> dict[int, int]:
        return dict.fromkeys(range(len(loops.loops)), -1)

    monkeypatch.setattr("remat.inductor.kernel_plan._ROUNDS", 1)
    monkeypatch.setattr(Loops, "to_blame", all_apart)
    monkeypatch.setattr(Loops, "bytes_at", lambda *_: [1 << 60])

    model = copy.deepcopy(expected[0])
    remat.checkpoint(model, UNLIMITED, executor="inductor", solver=Given(keep_all), costs="flops")
    # not cached: no other job would compile such kernels
    with caplog.at_level(logging.INFO), inductor_config.patch(fx_graph_cache=False):
        ends = state_after(model, model, 1)

    counts = re.findall(r"(\d+) loops and library operators in (\d+) kernels", caplog.text)
    assert len(counts) == 2
    assert all(parts == kernels for parts, kernels in counts)

    torch.testing.assert_close(ends, expected[1][0], rtol=1e-5, atol=1e-7)
    report = remat.report(model)
    assert report.measured_peak_bytes == report.kernels_peak_bytes


def test_inductors_compiled_kernels_are_reused() -> None:
    """Naive: our passes have no cache key, so Inductor caches nothing for the next job."""
    from torch._dynamo.utils import counters

    for is_second in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        remat.checkpoint(
            model, UNLIMITED, executor="inductor", solver=Given(keep_all), costs="flops"
        )

        counters.clear()
        model(batch()).backward()
        if is_second:
            assert counters["inductor"]["fxgraph_cache_hit"] == 2

        report = remat.report(model)
        assert report.measured_peak_bytes == report.kernels_peak_bytes


def test_a_graph_that_is_kept_is_refused() -> None:
    model = Net()
    remat.checkpoint(model, "100%", executor="inductor", costs="flops", plan_cache=False)
    with pytest.raises((remat.TraceError, RuntimeError), match="retain_graph"):
        model(batch()).backward(retain_graph=True)


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(ValueError, match='is not "eager", "inductor" or "auto"'):
        remat.checkpoint(Net(), "100%", executor="xla")
