"""Plans run by Inductor: results of `torch.compile`, dropout included, within the budget."""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.choices import InductorChoices
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V

import remat
from remat.inductor.kernel_order import Loops
from remat.torch_border import kernel_scheduler
from tests.support.fused_models import Net, batch
from tests.support.planned import (
    COMPILES,
    UNLIMITED,
    ChangedBuffer,
    Given,
    call_of,
    keep_all,
    keep_nothing,
    state_after,
)

pytestmark = [pytest.mark.usefixtures("fresh_torch"), *COMPILES]


@pytest.fixture(scope="module")
def expected() -> tuple[Net, list[list[Any]]]:
    """A model, and what `torch.compile` alone computes in two steps, with vector instructions."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    compiled = torch.compile(plain)
    with inductor_config.patch({"cpp.simdlen": None}):
        return model, [state_after(plain, batch(), seed=seed, call=compiled) for seed in (1, 2)]


def bytes_held_by_a_step(model: nn.Module) -> int:
    """Returns the measured peak of a step, with the model and its input."""
    model.zero_grad()
    x = batch()
    held = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers(), x))
    return remat.measure(lambda: model(x).backward(), device="cpu").peak_bytes + held


@pytest.mark.usefixtures("vector_kernels")
@pytest.mark.parametrize("budget", ["65%", "keep nothing"])
def test_a_plan_computes_what_torch_compile_does_within_the_budget(
    budget: str, expected: tuple[Net, list[list[Any]]]
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
        got = state_after(model, batch(), seed=seed)
        torch.testing.assert_close(got, states, rtol=1e-5, atol=1e-7)

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
        # masks are made again from their seeds: only seeds and results of the forward are kept
        (piece,) = call_of(model).pieces
        forward, backward = (
            sum("inductor_random" in str(node.target) for node in half.graph.nodes)
            for half in (piece.split.forward, piece.split.backward)
        )
        assert backward == forward > 0
        assert report.solution.overhead > 0.2


def test_the_backward_reads_a_buffer_as_it_was_before_it_changed() -> None:
    """Naive: the backward reads the changed buffer, as with Inductor's own partitioner."""
    model = ChangedBuffer(32)
    plain = copy.deepcopy(model)
    remat.checkpoint(
        model, UNLIMITED, solver=Given(keep_nothing), executor="inductor", costs="flops"
    )

    for seed in (1, 2):
        got, wanted = (state_after(each, batch(), seed=seed) for each in (model, plain))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_the_kernels_of_the_last_round_run(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expected: tuple[Net, list[list[Any]]],
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
        ends = state_after(model, batch(), seed=1)

    counts = re.findall(r"(\d+) loops and library operators in (\d+) kernels", caplog.text)
    assert len(counts) == 2
    assert all(parts == kernels for parts, kernels in counts)

    torch.testing.assert_close(ends, expected[1][0], rtol=1e-5, atol=1e-7)
    report = remat.report(model)
    assert report.measured_peak_bytes == report.kernels_peak_bytes


class TwoAverages(nn.Module):
    """Changes buffers that it has read: one in the same kernel as the reduction it is made from."""

    scale: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(32, 32) for _ in range(3))
        self.register_buffer("scale", torch.ones(16, 1))
        self.register_buffer("mean", torch.zeros(16, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.first(x), self.second(x)
        scaled = one + self.scale  # saves neither
        means = (one * two).mean(1, keepdim=True)
        self.scale.mul_(0.9).add_(means.detach(), alpha=0.1)
        self.mean.mul_(0.9).add_(scaled.detach(), alpha=0.1)
        loss: torch.Tensor = self.last(scaled).square().mean()
        return loss


def test_a_change_of_a_buffer_waits_for_all_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: Inductor forgets it where the fused kernels ensure it, and they are taken apart."""
    from torch._inductor import config as inductor_config

    awaited: dict[str, set[str]] = {}
    lost: list[str] = []
    note, read_parts = kernel_scheduler._note_orders, kernel_scheduler.parts_of

    def noted(nodes: list[Any]) -> list[Any]:
        writer = {b.get_name(): node.get_name() for node in nodes for b in node.get_outputs()}
        for node in nodes:
            names = (dep.name for dep in node.unmet_dependencies)
            awaited[node.get_name()] = {writer[name] for name in names if name in writer}
        return note(nodes)

    def parts_of(*args: Any) -> Any:
        parts = read_parts(*args)
        lost.extend(p.name for p in parts.parts if not p.after >= awaited[p.name] - {p.name})
        return parts

    monkeypatch.setattr(kernel_scheduler, "_note_orders", noted)
    monkeypatch.setattr("remat.inductor.kernel_plan.parts_of", parts_of)
    model, x = TwoAverages(), torch.randn(16, 32)
    plain = copy.deepcopy(model)
    remat.checkpoint(model, UNLIMITED, executor="inductor", solver=Given(keep_all), costs="flops")
    with inductor_config.patch(fx_graph_cache=False):
        got = state_after(model, x)
    torch.testing.assert_close(got, state_after(plain, x), rtol=1e-5, atol=1e-6)
    assert any(map(len, awaited.values()))
    assert not lost


@pytest.mark.skipif(
    not hasattr(custom_graph_pass, "CustomSchedulerPass"), reason="passes have no key before 2.13"
)
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
    with pytest.raises(remat.TraceError, match="retain_graph"):
        model(batch()).backward(retain_graph=True)


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(ValueError, match='is not "eager", "inductor" or "auto"'):
        remat.checkpoint(Net(), "100%", executor="xla")


class OnlyAdds(nn.Module):
    """Its backward computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


def test_a_step_whose_backward_computes_nothing_runs() -> None:
    model = OnlyAdds()
    remat.checkpoint(model, "200%", executor="inductor", costs="flops", plan_cache=False)
    model(torch.randn(4, 4)).sum().backward()
    assert model.bias.grad is not None and torch.equal(model.bias.grad, torch.ones(4, 4))
    assert remat.report(model).kernels_peak_bytes is not None


class Chosen(nn.Module):
    """A graph inside of an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        chosen = torch.cond(x.sum() > 0, lambda h: h.sin() * 2, lambda h: h.cos() * 3, (hidden,))
        loss: torch.Tensor = chosen.square().mean()
        return loss


def test_graphs_inside_of_operators_are_not_run_on_fake_tensors() -> None:
    model, x = Chosen(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    remat.checkpoint(model, "200%", executor="inductor", costs="flops", plan_cache=False)
    for each in (model, plain):
        each(x).backward()
    torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)


class Selected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.linear(x) - x).pow(2)[mask].mean()
        return loss


def test_a_size_that_data_decides_cuts_the_step() -> None:
    model = Selected()
    remat.checkpoint(model, "200%", executor="inductor", costs="flops", plan_cache=False)
    model(torch.randn(8, 8), torch.arange(8) % 2 == 0).backward()
    assert remat.report(model).num_pieces == 2


class CountedPass(CustomGraphPass):
    """Counts the graphs that it sees."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.num_graphs += 1

    def uuid(self) -> str:
        return "counted"


@pytest.mark.parametrize("name", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
def test_the_users_passes_run_too(name: str) -> None:
    """Naive: ours take their place."""
    own, model = CountedPass(), Net()
    remat.checkpoint(model, "90%", executor="inductor", costs="flops", time_limit_s=1.0)
    with inductor_config.patch({name: own, "fx_graph_cache": False}):
        model(batch()).backward()
    assert own.num_graphs >= 2  # one for each half, and each time that it was compiled


def test_the_users_choice_of_what_to_fuse_holds_too() -> None:
    class Counted(InductorChoices):
        asked = 0

        @staticmethod
        def can_fuse(*args: Any) -> bool:
            Counted.asked += 1
            return bool(InductorChoices.can_fuse(*args))

    model = Net()
    remat.checkpoint(model, "90%", executor="inductor", costs="flops", time_limit_s=1.0)
    with V.set_choices_handler(Counted()), fresh_cache():
        model(batch()).backward()
    assert Counted.asked


def test_settings_that_decide_what_a_plan_decides_are_refused() -> None:
    model = Net()
    remat.checkpoint(model, "90%", executor="inductor", costs="flops", time_limit_s=1.0)
    setting = {"_post_fusion_custom_pass": lambda kernels: kernels}
    with (
        inductor_config.patch(setting),
        pytest.raises(remat.TraceError, match="_post_fusion_custom_pass is set"),
    ):
        model(batch())
