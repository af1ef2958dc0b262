"""Planned modules that users compile as well, and steps that dynamo would not compile."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import remat
from tests.support.planned import assert_same, call_of

pytestmark = pytest.mark.usefixtures("fresh_torch")


class Own(nn.Module):
    """A class whose forward is a user's code, unlike that of `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers(x).sin()
        return hidden


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [[nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)] for _ in range(4)]
    return nn.Sequential(*(layer for block in layers for layer in block))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.inner(x).tanh()).square()
        return loss


def plan(model: nn.Module) -> nn.Module:
    return remat.checkpoint(model, "70%", costs="flops", gap=0.2, time_limit_s=5)


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="aot_eager", **options)


def by_method(model: nn.Module) -> nn.Module:
    plan(model).compile(backend="aot_eager")
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile(planned)": lambda model: compiled(plan(model)),
    "planned.compile()": by_method,
    "checkpoint(torch.compile(model))": lambda model: plan(compiled(model)),
}


@pytest.mark.parametrize("make", [mlp, Own], ids=["of torch", "own"])
@pytest.mark.parametrize("way", WAYS)
def test_a_plan_stays_when_the_module_is_compiled(
    way: str, make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    plain, model, x = make(), make(), torch.randn(64, 32)

    with caplog.at_level(logging.WARNING, "remat"):
        step = WAYS[way](model)
        for _ in range(2):
            for each in (step, plain):
                each.zero_grad()
                each(x).mean().backward()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert_same(mine.grad, theirs.grad)

    report = remat.report(model)
    assert report.recomputed and report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.solution.budget_bytes
    assert "stays as planned" in caplog.text


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
@pytest.mark.parametrize("make", [mlp, Own], ids=["of torch", "own"])
def test_a_part_of_a_compiled_module_keeps_its_plan(make: Callable[[], nn.Module]) -> None:
    outer = Outer(make())
    plain, x = copy.deepcopy(outer), torch.randn(64, 32)
    plan(outer.inner)
    step = compiled(outer)

    for each in (step, plain):
        each(x).mean().backward()
    for mine, theirs in zip(outer.parameters(), plain.parameters(), strict=True):
        assert_same(mine.grad, theirs.grad)

    assert remat.report(outer.inner).recomputed
    with torch.no_grad():
        assert_same(step(x), plain(x))


def test_a_compiled_function_keeps_its_plan() -> None:
    model, plain, x = mlp(), mlp(), torch.randn(64, 32)
    step = remat.checkpoint(
        lambda x: model(x).square().mean(), "80%", costs="flops", gap=0.2, time_limit_s=5
    )
    again: Any = torch.compile(step, backend="aot_eager")

    again(x).backward()
    plain(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(mine.grad, theirs.grad)
    assert remat.report(step).recomputed


def test_fullgraph_around_a_planned_part_says_why_it_fails() -> None:
    outer = Outer(mlp())
    plan(outer.inner)
    with pytest.raises(Exception, match="remat planned this module"):
        compiled(outer, fullgraph=True)(torch.randn(64, 32))


def test_a_planned_part_joins_the_plan_of_the_module_around_it() -> None:
    outer = Outer(mlp())
    plain, x = copy.deepcopy(outer), torch.randn(64, 32)
    plan(outer.inner)
    plan(outer)

    for each in (outer, plain):
        each(x).mean().backward()
    for mine, theirs in zip(outer.parameters(), plain.parameters(), strict=True):
        assert_same(mine.grad, theirs.grad)
    assert remat.report(outer).breaks == () and not call_of(outer.inner).pieces


def test_a_plan_replaces_model_compile_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    model.compile(backend="aot_eager")
    with caplog.at_level(logging.WARNING, "remat"):
        plan(model)(torch.randn(64, 32)).mean().backward()
    assert "compiled by model.compile(), which its plan replaces" in caplog.text
    assert remat.report(model).recomputed


def test_modules_without_a_plan_are_compiled_as_before() -> None:
    plan(mlp())  # from here on, remat tells planned modules from others
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Own()
    model.compile(backend=backend, fullgraph=True)
    model(torch.randn(64, 32))
    torch.compile(Outer(mlp()), backend=backend, fullgraph=True)(torch.randn(64, 32))
    assert len(graphs) == 2


def test_a_step_under_a_dispatch_mode_is_refused_and_works_after_it() -> None:
    model, x = plan(mlp()), torch.randn(64, 32)
    for _ in range(2):
        with (
            FlopCounterMode(display=False),
            pytest.raises(remat.TraceError, match="can't run under FlopCounterMode"),
        ):
            model(x)

        model(x).mean().backward()
        assert remat.report(model).recomputed
        model.zero_grad()

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    assert counter.get_total_flops() > 0


def test_a_step_where_torch_compile_is_off_says_so_and_works_after_it() -> None:
    model, x = plan(mlp()), torch.randn(64, 32)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(remat.TraceError, match="switched off"),
    ):
        model(x)

    model(x).mean().backward()
    assert remat.report(model).recomputed


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
def test_a_later_step_that_torch_compile_leaves_plain_says_so(stance: Any) -> None:
    """Another shape, or gradients of an earlier step, need a capture that does not happen."""
    model = plan(mlp())
    model(torch.randn(64, 32)).mean().backward()  # leaves gradients
    with torch.compiler.set_stance(stance):
        for rows in (64, 16):
            with pytest.raises(remat.TraceError, match="switched off"):
                model(torch.randn(rows, 32))

    model.zero_grad()
    model(torch.randn(64, 32)).mean().backward()
    assert remat.report(model).recomputed


class Skips(nn.Module):
    """Returns its input, sometimes, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_skipped = nn.Linear(8, 8), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.is_skipped else self.linear(x).sin()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_step_may_return_its_input() -> None:
    model = remat.checkpoint(Skips(), "1MiB", costs="flops")
    x = torch.randn(4, 8, requires_grad=True) * 2
    model(x).sum().backward(inputs=[*model.parameters()])
    model.is_skipped = True
    assert model(x) is x
