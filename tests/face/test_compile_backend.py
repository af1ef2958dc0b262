"""`torch.compile(model, backend="remat")`: what it can't notice by itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.plan import planner
from tests.face.test_other_compiles import mlp

pytestmark = pytest.mark.usefixtures("fresh_torch")


def compiled(model: nn.Module, **options: Any) -> Any:
    options = {"budget": "90%", "costs": "flops", "time_limit_s": 5.0, **options}
    return torch.compile(model, backend="remat", options=options)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_gradients_of_earlier_steps_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    step, x = compiled(mlp()), torch.randn(64, 32)
    step(x).mean().backward()
    assert not warnings_in(caplog)
    for _ in range(2):
        step(x).mean().backward()
    (warning,) = warnings_in(caplog)
    assert "is_accumulating" in warning


def test_with_is_accumulating_their_memory_is_reserved(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: the plan that runs is the one of a first micro-step."""
    reserved: list[int] = []
    plan = planner.Plans.__call__

    def noted(self: Any, step: Any, *, gradient_bytes: int = 0, **beside: Any) -> Any:
        reserved.append(gradient_bytes)
        return plan(self, step, gradient_bytes=gradient_bytes, **beside)

    monkeypatch.setattr(planner.Plans, "__call__", noted)
    model, x = mlp(), torch.randn(64, 32)
    step = compiled(model, is_accumulating=True)
    for _ in range(2):
        step(x).mean().backward()
    assert reserved == [sum(p.nbytes for p in model.parameters())]
    assert not warnings_in(caplog)


def test_a_second_shape_is_an_error_that_says_what_to_do() -> None:
    step = compiled(mlp())
    step(torch.randn(64, 32)).mean().backward()
    with pytest.raises(Exception, match="dynamic=False") as found:
        step(torch.randn(16, 32))
    assert isinstance(found.value, remat.TraceError) or "TraceError" in str(found.value)
