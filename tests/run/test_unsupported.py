"""The option `on_unsupported`: every way to plan a step takes it, and the budget holds."""

from __future__ import annotations

import copy
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import remat
from tests.support.planned import UNLIMITED, assert_same, call_of, planned
from tests.support.second_backwards import (
    MARKS,
    Changes,
    Field,
    Sum,
    Tied,
    hessian_product,
    left_by,
    penalized,
    plain_where_needed,
    planned_step,
    retained,
)

pytestmark = MARKS


@pytest.mark.filterwarnings("default")
def test_callbacks_pass_the_option_on() -> None:
    pytest.importorskip("lightning.pytorch")
    integration = pytest.importorskip("remat.lightning")
    body = nn.Module()
    body.model = Field()
    trainer = SimpleNamespace(optimizers=[], accumulate_grad_batches=1)
    options = {"costs": "flops", "module": "model"}

    callback = integration.RematCallback(UNLIMITED, **options, on_unsupported="plain")
    callback.on_train_start(trainer, body)
    assert call_of(body.model).on_unsupported == "plain"

    callback = integration.RematCallback(UNLIMITED, **options, on_unsupported="plane")
    with pytest.raises(ValueError, match="neither"):
        callback.on_train_start(trainer, body)


def test_accumulation_goes_on_across_an_unsupported_micro_step() -> None:
    model = Changes()
    plain = copy.deepcopy(model)
    plain_where_needed(model)

    for seed in range(2):
        for each in (model, plain):
            torch.manual_seed(seed)
            each.zero_grad()
            for step in (planned_step, retained, planned_step, penalized, planned_step):
                step(each, torch.randn(4, 8))
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


class Penalty:
    """A step function that returns two losses, of which one is differentiated twice."""

    def __init__(self) -> None:
        self.model = Changes()

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model(x), x.square().sum() * self.model.enter.weight.sum()


def test_a_step_function_runs_plain_where_needed() -> None:
    own, plain = Penalty(), Penalty()
    plain.model.load_state_dict(own.model.state_dict())
    step = plain_where_needed(own)

    def run(call: Any, model: Changes) -> list[Any]:
        def both(_: nn.Module, x: torch.Tensor) -> None:
            loss, other = call(x)
            (slope,) = torch.autograd.grad(other, model.enter.weight, create_graph=True)
            (loss + slope.square().sum()).backward(retain_graph=True)
            loss.backward()

        return left_by(model, both, torch.ones(4, 8), 0)

    for _ in range(2):
        assert_same(run(step, own.model), run(plain, plain.model))


def test_a_plan_from_a_file_runs_plain_where_needed() -> None:
    model, x = Changes(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    solution = remat.solve(remat.trace(model, (x,), costs="flops"), UNLIMITED)
    remat.wrap(model, solution, costs="flops", on_unsupported="plain")
    for seed in range(2):
        assert_same(left_by(model, retained, x, seed), left_by(plain, retained, x, seed))


def test_the_backend_of_torch_compile_runs_plain_where_needed() -> None:
    model, x = Changes(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    options: Any = {"budget": UNLIMITED, "costs": "flops", "on_unsupported": "plain"}
    compiled: Any = torch.compile(model, backend="remat", options=options)
    for seed in range(2):
        assert_same(left_by(compiled, penalized, x, seed), left_by(plain, penalized, x, seed))


def test_running_plain_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    model = plain_where_needed(Changes())
    x = torch.randn(4, 8)
    planned_step(model, x)
    assert "plain" not in caplog.text

    for _ in range(2):
        retained(model, x)
        penalized(model, x)
        retained(model, torch.randn(2, 8))

    (said,) = [record.getMessage() for record in caplog.records if "plain" in record.getMessage()]
    assert "Changes" in said
    assert "retain_graph=True" in said
    assert "not held to the budget" in said


def deep() -> nn.Module:
    """Layers that draw and count, and a loss."""
    layers = [
        nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.5))
        for _ in range(4)
    ]
    return nn.Sequential(*layers, Sum())


def peak_of(model: nn.Module, x: torch.Tensor) -> int:
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
    model.zero_grad(set_to_none=True)
    return held + remat.measure(lambda: planned_step(model, x), device="cpu").peak_bytes


def test_planned_steps_stay_within_the_budget() -> None:
    """The budget includes copies of buffers and random state, which only the option makes."""
    x = torch.randn(256, 32)
    graph = remat.trace(deep(), (x,), costs="flops")
    budget_bytes = remat.simulate(graph, remat.Schedule.keep_all(graph)).peak_bytes * 8 // 10

    for_plans = []
    for on_unsupported in ("error", "plain"):
        model = deep()
        remat.checkpoint(model, budget_bytes, costs="flops", on_unsupported=on_unsupported)
        planned_step(model, x)
        if on_unsupported == "plain":
            retained(model, x)
            penalized(model, x)

        assert peak_of(model, x) <= budget_bytes
        for_plans.append(call_of(model).pieces[0].solution.budget_bytes)

    kept_bytes = 5056 + sum(buffer.nbytes for buffer in deep().buffers())
    assert for_plans == [budget_bytes, budget_bytes - kept_bytes]


def test_only_the_option_adds_an_autograd_node() -> None:
    x = torch.randn(4, 8)
    name = "CompiledFunctionBackward"
    assert planned(Tied())(x).grad_fn.name() == name
    assert plain_where_needed(Tied())(x).grad_fn.name() == "_WatchedBackward"


def test_nothing_is_kept_after_the_only_backward() -> None:
    """Naive: the batch lives as long as its loss, beside the next batch."""
    model = plain_where_needed(Changes())
    x = torch.randn(4, 8)
    batch = weakref.ref(x)
    loss = model(x)
    loss.backward()

    del x
    assert batch() is None
    assert loss.requires_grad


def test_inductor_runs_unsupported_steps_plain_too() -> None:
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1), Sum())
    plain = copy.deepcopy(model)
    options: Any = {"costs": "flops", "plan_cache": False, "on_unsupported": "plain"}
    remat.checkpoint(model, "100%", executor="inductor", **options)

    for run in (planned_step, retained, penalized, hessian_product, planned_step):
        x = torch.randn(4, 8)
        got, want = left_by(model, run, x, 0), left_by(plain, run, x, 0)
        torch.testing.assert_close(got, want)
