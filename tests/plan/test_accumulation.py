"""Gradients that accumulate: one budget for all micro-steps, each byte under its own name.

A user's report: "95%" held in the first micro-step and was a `BudgetError` in the second, which
named bytes that nobody had reserved; the report gave another budget in every micro-step.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.core.operators import ValueKind
from remat.core.room import Room
from remat.plan.planner import Plans
from tests.support.planned import call_of

pytestmark = pytest.mark.usefixtures("fresh_torch", "quick_first_step")

X = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, Any] = {"costs": "flops", "plan_cache": False, "time_limit_s": 5.0}


class Net(nn.Sequential):
    """Large layers and a small batch: gradients are a quarter of the step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x).square().mean()  # type: ignore[no-untyped-call]
        return loss


class Cut(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self[1](self[0](x))
        torch._dynamo.graph_break()
        loss: torch.Tensor = self[4](self[3](self[2](hidden))).square().mean()
        return loss


GRADIENT_BYTES = sum(p.nbytes for p in Net().parameters())


@cache
def traced() -> remat.Graph:
    return remat.trace(Net(), (X,), costs="flops")


def keep_all_bytes() -> int:
    return remat.simulate(traced(), remat.Schedule.keep_all(traced())).peak_bytes


@cache
def least_bytes() -> int:
    fit = remat.fits(Net(), (X,), device="cpu", optimizer="none", budget="100%", time_limit_s=5)
    return fit.minimum_bytes


def rooms_of(model: nn.Module, micro_steps: int, x: torch.Tensor = X) -> list[Room]:
    """The room of each micro-step's plan."""
    rooms = []
    for _ in range(micro_steps):
        model(x).backward()
        room = remat.report(model).room
        assert room is not None
        rooms.append(room)
    return rooms


@pytest.mark.parametrize(
    ("make", "budget"),
    [(Net, "95%"), (Net, "100%"), (Net, "200%"), (Cut, "95%"), (Cut, "100%")],
)
@pytest.mark.parametrize("is_accumulating", [False, True])
def test_a_percentage_is_of_all_micro_steps(
    make: type[Net], budget: str, is_accumulating: bool
) -> None:
    model = remat.checkpoint(make(), budget, is_accumulating=is_accumulating, **OPTIONS)

    first, second, third = rooms_of(model, 3)

    assert second == third
    assert second.budget_bytes == int(float(budget[:-1]) * second.keep_all_bytes / 100)
    assert second.gradient_bytes == GRADIENT_BYTES
    assert first.gradient_bytes == 0

    if is_accumulating:
        assert first.budget_bytes == second.budget_bytes
    else:
        assert second.keep_all_bytes == first.keep_all_bytes + GRADIENT_BYTES


def test_keeping_everything_includes_the_accumulated_gradients() -> None:
    model = remat.checkpoint(Net(), "100%", is_accumulating=True, **OPTIONS)

    first, second = rooms_of(model, 2)

    assert first.keep_all_bytes == second.keep_all_bytes == keep_all_bytes() + GRADIENT_BYTES
    assert remat.report(model).solution.overhead == 0


def test_announced_accumulation_must_fit_from_the_first_step() -> None:
    """A budget that the first micro-step could meet, but not the second, is refused at once."""
    least = least_bytes()
    budget = least + GRADIENT_BYTES // 2
    announced = remat.checkpoint(Net(), budget, is_accumulating=True, **OPTIONS)

    with pytest.raises(remat.BudgetError, match="accumulated gradients") as raised:
        announced(X)

    assert raised.value.budget_bytes == budget
    assert raised.value.minimum_bytes <= least + GRADIENT_BYTES
    assert "reserved" not in str(raised.value)


def test_a_percentage_that_held_without_gradients_holds_with_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Accumulation was not announced; the plan keeps its bytes, and the budget grows.

    The same percentage of a peak that includes the gradients would leave the plan too little.
    """
    least = least_bytes()
    budget = f"{100 * (least + 1000) / keep_all_bytes():.3f}%"
    model = remat.checkpoint(Net(), budget, **OPTIONS)

    with caplog.at_level(logging.WARNING, "remat.plan"):
        first, second, third = rooms_of(model, 3)

    assert second == third
    assert second.plan_bytes == first.plan_bytes
    assert second.budget_bytes == first.budget_bytes + GRADIENT_BYTES
    assert sum("is_accumulating=True" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("make", [Net, Cut])
def test_the_report_says_the_budget_that_was_asked_for(make: type[Net]) -> None:
    reserve_bytes, budget = 123_456, 20_000_000
    model = remat.checkpoint(make(), budget, reserve_bytes=reserve_bytes, **OPTIONS)

    for held in (0, GRADIENT_BYTES, GRADIENT_BYTES):
        model(X).backward()
        report = remat.report(model)

        assert report.budget_bytes == budget
        assert report.solution.budget_bytes == budget - reserve_bytes - held

        lines = [" ".join(line.split()) for line in str(report).splitlines()]
        assert "budget 19.1 MiB (20,000,000 bytes)" in lines
        assert any(line == "- reserve 121 KiB (123,456 bytes)" for line in lines)
        accumulated = [line for line in lines if line.startswith("- accumulated gradients")]
        assert len(accumulated) == bool(held)
        assert not held or f"({held:,} bytes)" in accumulated[0]


def test_a_report_in_percent_says_of_what() -> None:
    model = remat.checkpoint(Net(), "90%", **OPTIONS)
    model(X).backward()

    text = str(remat.report(model))

    assert "90% of " in text
    assert "left for the plan" not in text


def test_a_reserve_counts_the_same_everywhere() -> None:
    """A percentage counts the reserve, in `solve` as in `checkpoint`."""
    reserve_bytes = 1_000_000
    solved = remat.solve(traced(), "90%", reserve_bytes=reserve_bytes, gap=0.5)

    model = remat.checkpoint(Net(), "90%", reserve_bytes=reserve_bytes, **OPTIONS)
    model(X).backward()

    planned = call_of(model).pieces[0].solution.budget_bytes
    assert solved.budget_bytes == planned
    assert planned == int(0.9 * (keep_all_bytes() + reserve_bytes)) - reserve_bytes


@pytest.mark.parametrize("make", [Net, Cut])
def test_a_step_is_planned_again_once_ddp_has_buckets(
    make: type[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = remat.checkpoint(make(), "200%", **OPTIONS)
    found = []
    for bucket_bytes in (0, 0, 4096, 4096):
        for place in ("plan.planner", "face.planned_module", "pieces.runner"):
            monkeypatch.setattr(f"remat.{place}.bucket_bytes", lambda size=bucket_bytes: size)
        model(X).backward()
        model.zero_grad()
        room = remat.report(model).room
        assert room is not None
        found.append(room.bucket_bytes)
    assert found == [0, 0, 4096, 4096]


@pytest.mark.parametrize("make", [Net, Cut])
def test_gradients_of_inputs_accumulate_too(make: type[Net]) -> None:
    """Naive: only parameters' gradients are counted."""
    model, x = remat.checkpoint(make(), "200%", **OPTIONS), X.clone().requires_grad_()
    *_, last = rooms_of(model, 3, x)
    held = sum(p.nbytes for p in model.parameters()) + x.nbytes
    assert last.gradient_bytes == held


def test_frozen_parameters_have_no_gradients() -> None:
    model = Net()
    model[0].requires_grad_(False)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    remat.checkpoint(model, "100%", is_accumulating=True, **OPTIONS)

    (first, second) = rooms_of(model, 2)

    assert first.budget_bytes == second.budget_bytes
    assert second.gradient_bytes == trained
    graph = remat.report(model).graph
    assert sum(v.size_bytes for v in graph.values if v.kind is ValueKind.PARAMETER) == trained


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_trainer_says_whether_gradients_accumulate(tmp_path: Path, accumulated: int) -> None:
    from types import SimpleNamespace

    pytest.importorskip("accelerate")
    integration = pytest.importorskip("remat.huggingface")
    model = Net()

    integration.RematCallback("90%", **OPTIONS).on_train_begin(
        SimpleNamespace(gradient_accumulation_steps=accumulated, n_gpu=0), None, None, model=model
    )

    plan = call_of(model).plan
    assert isinstance(plan, Plans)
    assert plan.options.is_accumulating == (accumulated > 1)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("accumulated", [1, 4])
def test_lightning_says_whether_gradients_accumulate(accumulated: int) -> None:
    from types import SimpleNamespace

    pytest.importorskip("lightning.pytorch")
    integration = pytest.importorskip("remat.lightning")
    body = nn.Module()
    body.model = Net()
    trainer = SimpleNamespace(optimizers=[], accumulate_grad_batches=accumulated)

    integration.RematCallback("90%", module="model", **OPTIONS).on_train_start(trainer, body)

    plan = call_of(body.model).plan
    assert isinstance(plan, Plans)
    assert plan.options.is_accumulating == (accumulated > 1)
