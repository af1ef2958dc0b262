"""Steps cut into pieces, each compiled by Inductor, under one budget."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.inductor.fused_pieces import FusedPiecewise
from remat.pieces.runner import Piecewise
from remat.pieces.step_meter import StepMeter
from remat.tracers.cost_models import resolve_costs
from tests.support.broken_steps import MODELS, Halves, batch
from tests.support.planned import COMPILES, assert_same, state_after

pytestmark = [pytest.mark.usefixtures("fresh_torch", "quick_first_step"), *COMPILES]

OPTIONS: dict[str, Any] = {
    "executor": "inductor",
    "costs": "roofline",
    "time_limit_s": 0.5,
    "plan_cache": False,
}


@pytest.mark.parametrize(("device", "num_unmeasured"), [("cpu", 0), ("cuda", 1)])
def test_the_step_that_tunes_kernels_is_not_measured(
    device: str, num_unmeasured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: what Triton holds while it tries kernels out is above the budget: planned again."""
    solution = SimpleNamespace(budget_bytes=100)
    planned = SimpleNamespace(
        solution=solution, kernels_peak_bytes=90, meter=StepMeter(device, resident_bytes=0)
    )
    monkeypatch.setattr(Piecewise, "install", lambda *_: planned)
    step: Any = None
    runner = FusedPiecewise(Halves(), None, resolve_costs("flops", "cpu"))
    assert runner.install((), (), step, 0).meter.num_unmeasured == num_unmeasured


def test_pieces_compute_what_torch_compile_does() -> None:
    """Results are equal to the bit, dropout included.

    One plan runs both pieces from the second step on, or from the third step on if that plan has to
    leave more room between them.
    """
    model = MODELS["Views"]()
    traced = remat.trace(model, (batch(0),), executor="inductor")
    plain = copy.deepcopy(model)
    compiled = torch.compile(plain)
    remat.checkpoint(model, "90%", **OPTIONS)

    for seed in (0, 2, 0, 2):
        got = state_after(model, batch(seed), seed=seed)
        assert_same(got, state_after(plain, batch(seed), seed=seed, call=compiled))

    report = remat.report(model)
    assert report.num_pieces > 1
    assert report.graph == traced
    assert report.executor == "Inductor's kernels"
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.budget_bytes


@pytest.mark.parametrize("name", ["InPlace", "Buffer", "ChangesOnOneBranch", "Unused"])
def test_changes_by_eager_code_are_those_of_plain_pytorch(name: str) -> None:
    """`torch.compile` refuses the backward of the first three, and fills in zeros in the last."""

    model = MODELS[name]().double()
    model.count = model.count.float()  # Inductor loses changes of a float64 buffer
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0

    plain = copy.deepcopy(model)
    remat.checkpoint(model, "100%", **OPTIONS)

    for seed in (0, 2, 1) if name == "ChangesOnOneBranch" else (0, 2):
        x = batch(seed).double()
        got, wanted = (state_after(each, x, seed=seed) for each in (model, plain))
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_change_that_inductor_would_lose_is_refused(*, is_cut: bool) -> None:
    """`torch.compile` leaves such a buffer as it was (torch 2.13)."""

    class Counts(nn.Module):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4).double()
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            if is_cut:
                torch._dynamo.graph_break()
            self.count.add_(1)
            if is_cut:
                torch._dynamo.graph_break()
            out: torch.Tensor = (self.layer(x) * self.count).sum()
            return out

    model, x = Counts(), torch.randn(3, 4, dtype=torch.float64)
    remat.checkpoint(model, "100%", **OPTIONS)
    with pytest.raises(remat.TraceError, match="Inductor would lose the new value"):
        model(x)

    torch._dynamo.reset()
    model = Counts()
    model.compile()  # auto then chooses Inductor
    remat.checkpoint(model, "100%", **{**OPTIONS, "executor": "auto"})
    model(x).backward()
    assert model.count == 1
    assert "operator by operator: Inductor can't run it" in remat.report(model).executor


@pytest.mark.parametrize("name", ["Broken", "Whole"])
def test_a_failure_of_inductor_is_our_own_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fails(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("no such kernel\nand twenty lines more")

    monkeypatch.setattr("remat.inductor.compiled_halves.compile_fx_inner", fails)
    model: nn.Module = Stack() if name == "Whole" else MODELS[name]()
    remat.checkpoint(model, "100%", **OPTIONS)
    with pytest.raises(remat.TraceError, match=r"Inductor can't compile this step") as said:
        model(torch.randn(8, 32) if name == "Whole" else batch(0))
    assert str(said.value).endswith('RuntimeError: no such kernel; use executor="eager"')


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(32), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = self.head(x).pow(2).mean()
        return loss


def test_blocks_are_compiled_once_and_hold_what_was_predicted() -> None:
    """The plan leaves out what the eager head holds while it runs: a few hundred bytes."""
    model, x = Stack(), torch.randn(256, 32)
    plain = copy.deepcopy(model)
    for layer in plain.layers:
        layer.compile()
    remat.checkpoint(model, "70%", blocks=model.layers, **OPTIONS)

    for seed in range(2):
        assert_same(state_after(model, x, seed=seed), state_after(plain, x, seed=seed))

    report = remat.report(model)
    assert report.kernels_peak_bytes is not None and report.measured_peak_bytes is not None
    assert 0 <= report.measured_peak_bytes - report.kernels_peak_bytes < 2048
    assert report.measured_peak_bytes <= report.budget_bytes


@pytest.mark.usefixtures("idle_kernels")
def test_what_a_forward_saves_beyond_its_plan_is_held_until_its_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Naive: it counts only while this piece's own kernels run, not during those in between."""
    from remat.inductor.dry_run import dry_run

    more_bytes = 1 << 30

    def saves_more(*args: Any) -> Any:
        memory = dry_run(*args)
        is_forward = memory.end_bytes > 0
        return replace(memory, end_bytes=memory.end_bytes + more_bytes * is_forward)

    monkeypatch.setattr("remat.inductor.compiled_halves.dry_run", saves_more)
    model = Halves()
    remat.checkpoint(model, 1 << 40, **OPTIONS)
    for seed in range(2):
        state_after(model, batch(seed), seed=seed)
    report = remat.report(model)
    assert report.num_pieces == 2
    assert report.kernels_peak_bytes is not None
    assert report.kernels_peak_bytes >= 2 * more_bytes


@pytest.mark.usefixtures("idle_kernels")
def test_pieces_whose_kernels_would_hold_too_much_are_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from remat.inductor import fused_pieces

    foretold: list[int | None] = []
    true_bytes = fused_pieces.FusedPiecewise.kernels_peak_bytes

    def more_at_first(self: Any, *args: Any) -> int | None:
        foretold.append(true_bytes(self, *args))
        assert foretold[-1] is not None
        return foretold[-1] + 20_000 if len(foretold) == 1 else foretold[-1]

    monkeypatch.setattr(fused_pieces.FusedPiecewise, "kernels_peak_bytes", more_at_first)
    model = Halves()
    remat.checkpoint(model, "100%", **OPTIONS)
    for seed in range(2):
        state_after(model, batch(seed), seed=seed)

    report = remat.report(model)
    assert len(foretold) == 2
    assert report.solution.peak_bytes < report.budget_bytes - 10_000

    monkeypatch.setattr(
        fused_pieces.FusedPiecewise, "kernels_peak_bytes", lambda *_: report.budget_bytes + 20_000
    )
    monkeypatch.setattr("remat.inductor.attempts.ATTEMPTS", 2)
    torch._dynamo.reset()
    again = Halves()
    remat.checkpoint(again, "100%", **OPTIONS)
    with pytest.raises(remat.BudgetError, match="Inductor's kernels hold"):
        again(batch(0))


def without_dropout(model: nn.Module) -> nn.Module:
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model.double()


def test_a_piece_may_have_an_effect() -> None:
    """Cholesky's check of its factor is one; Inductor has to run it once, in its place."""
    model = without_dropout(MODELS["Checked"]())
    plain = copy.deepcopy(model)
    remat.checkpoint(model, "90%", **OPTIONS)

    for seed in (0, 2, 0):
        x = batch(seed).double()
        got, wanted = (state_after(each, x, seed=seed) for each in (model, plain))
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)

    report = remat.report(model)
    assert report.num_pieces > 1
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.budget_bytes
    if torch.__version__ >= "2.13":  # Inductor before that leaves such a check out
        with pytest.raises(RuntimeError, match=r"linalg\.cholesky"):
            model(batch(0).double() * torch.nan)


class InFloat32(nn.Module):
    """The second piece turns the autocast around the call off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        with torch.autocast("cpu", enabled=False):
            x = x.float() @ self.weight
        loss: torch.Tensor = self.second(x).float().square().mean()
        return loss


def test_pieces_are_compiled_without_the_autocast_around_the_call() -> None:
    model, x = InFloat32(), torch.randn(256, 64)
    plain = copy.deepcopy(model)
    remat.checkpoint(model, "100%", **OPTIONS)
    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(x)
            loss.backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=3e-2, atol=3e-3)
