"""A trace predicts its step, to the byte; a plan made from it runs that step and no other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import remat
from tests.support.planned import UNLIMITED, Given, assert_same, call_of, planned
from tests.support.small_models import MLP, MODELS, SCHEDULES, assert_same_steps, keep_some

pytestmark = pytest.mark.usefixtures("fresh_torch")


def solution_for(model: nn.Module, x: torch.Tensor) -> remat.Solution:
    return remat.solve(remat.trace(model, (x,)), "100%")


def test_a_plan_for_another_shape_is_refused() -> None:
    model, x = MODELS["mlp"]()
    remat.wrap(model, solution_for(model, x))
    with pytest.raises(remat.ScheduleError, match=r"another step.*an input has another size"):
        model(torch.randn(5, 8))


def test_a_plan_for_another_model_is_refused() -> None:
    model, x = MODELS["mlp"]()
    other = nn.Sequential(MLP(8, 0.0), nn.Identity())
    remat.wrap(other, solution_for(model, x))
    with pytest.raises(remat.ScheduleError, match="another step"):
        other(x)


def test_a_plan_runs_the_model_it_was_made_for() -> None:
    model, x = MODELS["attention"]()
    plain = copy.deepcopy(model)
    graph = remat.trace(model, (x,))
    solution = Given(keep_some(7)).solve(graph, budget_bytes=UNLIMITED)
    assert_same_steps(remat.wrap(model, solution), plain, x)
    assert call_of(model).pieces[0].solution == solution


def test_tracing_leaves_the_model_unchanged() -> None:
    model, x = MODELS["buffers"]()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    parameters = dict(model.named_parameters())
    remat.trace(model, (x,))
    assert_same(dict(model.state_dict()), dict(before))
    assert_same(torch.get_rng_state(), state)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_of_a_trace_is_the_plan_of_the_step(name: str) -> None:
    model, x = MODELS[name]()
    graph = remat.trace(model, (x,), costs="flops")
    planned(model)(x).backward()
    assert call_of(model).pieces[0].step.graph.fingerprint == graph.fingerprint


@pytest.mark.parametrize("schedule", ["keep all", "keep some"])
@pytest.mark.parametrize("name", MODELS)
def test_the_simulated_peak_is_the_allocators(name: str, schedule: str) -> None:
    model, x = MODELS[name]()
    # tensors so large that the 5,056 bytes of a generator's state do not show
    x = x.repeat(64, *[1] * (x.dim() - 1))
    planned(model, SCHEDULES[schedule])(x).backward()

    model.zero_grad(set_to_none=True)
    measured = remat.measure(lambda: model(x).backward(), device="cpu").peak_bytes

    tensors = [*model.parameters(), *model.buffers(), x]
    resident = sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )
    assert measured + resident == call_of(model).pieces[0].solution.peak_bytes


class _Registers(nn.Module):
    """Keeps a table that its first forward makes, and one that no forward reads."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("unread", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(256, 16), persistent=False)
        out: torch.Tensor = (self.linear(x) + self.table).tanh().mean()
        return out


def test_a_buffer_that_a_forward_registers_is_held_from_then_on() -> None:
    """With x-transformers' ALiBi, the predicted peak left such a buffer out."""
    model, x = _Registers(), torch.randn(256, 16)
    remat.checkpoint(model, "100%", costs="roofline", plan_cache=False)
    for _ in range(3):
        model.zero_grad()
        model(x).backward()

    model.zero_grad()
    held = (*model.parameters(), *model.buffers(), x)
    measured = remat.measure(lambda: model(x).backward(), device="cpu").peak_bytes
    resident = sum(tensor.nbytes for tensor in held)
    assert measured + resident == remat.report(model).solution.peak_bytes
