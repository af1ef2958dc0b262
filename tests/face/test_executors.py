"""`executor="auto"` picks the executor for the step; the report says which, and why."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import remat
from remat.core.errors import TraceError
from remat.face.executors import Executor
from tests.support.planned import assert_same, call_of, state_after

pytestmark = [
    pytest.mark.usefixtures("fresh_torch"),
    # torch 2.13 warns when `torch.compile` imports Inductor
    pytest.mark.filterwarnings("ignore:.torch.jit"),
]


class Net(nn.Module):
    def __init__(self, *, has_break: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.has_break = has_break

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x)
        if self.has_break:
            torch._dynamo.graph_break()
        loss: torch.Tensor = self.layers(hidden).pow(2).mean()
        return loss


def test_a_named_executor_is_chosen() -> None:
    for name in ("eager", "inductor"):
        assert Executor.chosen(name, "cpu", is_compiled=True).name == name


@pytest.mark.parametrize(
    ("device_type", "is_compiled", "has_compiler", "name"),
    [
        ("cuda", False, True, "inductor"),
        ("cpu", True, True, "inductor"),
        ("cpu", True, False, "eager"),
        ("cpu", False, True, "eager"),
    ],
)
def test_auto_takes_kernels_where_they_pay_off(
    device_type: str,
    is_compiled: bool,
    has_compiler: bool,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/g++" if has_compiler else None)
    chosen = Executor.chosen("auto", device_type, is_compiled=is_compiled)
    assert chosen.name == name and chosen.reason in chosen.text()


def test_only_auto_gives_up_kernels() -> None:
    failure = TraceError("the step has a graph break\nand more")
    asked = Executor.chosen("inductor", "cpu", is_compiled=False)
    assert not asked.gives_up_kernels(failure) and asked.name == "inductor"

    left_open = Executor.chosen("auto", "cuda", is_compiled=False)
    assert left_open.gives_up_kernels(failure) and not left_open.gives_up_kernels(failure)
    assert left_open.text() == (
        "operator by operator: Inductor can't run it: the step has a graph break"
    )


def test_the_report_says_what_runs_and_why() -> None:
    model = Net()
    remat.checkpoint(model, "100%", executor="auto", costs="flops")
    model(torch.randn(4, 8)).backward()
    assert "executor" in str(remat.report(model)) and "on a CPU" in remat.report(model).executor
    remat.checkpoint(remat.unwrap(model), "100%", costs="flops")
    model(torch.randn(4, 8)).backward()
    assert remat.report(model).executor == ""


def test_a_compiled_module_with_a_graph_break_runs_in_pieces() -> None:
    model = Net(has_break=True)
    model.compile()
    remat.checkpoint(model, "100%", executor="auto", costs="flops")
    model(torch.randn(4, 8)).backward()
    report = remat.report(model)
    assert report.num_pieces > 1
    assert report.executor.startswith("Inductor's kernels: the module was compiled before")


class Counted(nn.Module):
    """The second piece updates a buffer in a way that Inductor would lose."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.norm(self.first(x)), 0.5)
        torch._dynamo.graph_break()
        self.count.add_(1)
        loss: torch.Tensor = (self.second(x) * self.count).sum()
        return loss


def test_a_step_that_inductor_gives_up_on_leaves_what_one_step_leaves() -> None:
    model, x = Counted(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    model.compile()
    remat.checkpoint(model, "200%", executor="auto", costs="flops", time_limit_s=1.0)
    assert_same(state_after(model, x), state_after(plain, x))
    assert call_of(model).executor.name == "eager"
