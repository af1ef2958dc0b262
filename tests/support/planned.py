"""Planned steps for tests.

A solver that answers with given steps, and what a step leaves behind.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.face.planned_module import PlannedCall
from remat.solvers.core.base import Solver
from remat.solvers.core.on_demand import steps_on_demand
from remat.torch_border.modules import get_call

Steps = Callable[[remat.Graph], Sequence[int]]
UNLIMITED = 1 << 50

# marks of tests that compile kernels
COMPILES = [
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++"
    ),
    # torch 2.13 warns when `torch.compile` imports Inductor
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    # `torch.compile` alone warns where it cuts a step
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # torch 2.11 warns about its own code
    pytest.mark.filterwarnings("ignore:.torch._prims_common.check:FutureWarning"),
]
on_both_executors = pytest.mark.parametrize(
    "executor", ["eager", pytest.param("inductor", marks=COMPILES)]
)


@dataclass(frozen=True)
class Step:
    """A captured step as a planner sees it: its graph."""

    graph: remat.Graph


@final
@dataclass(frozen=True)
class Given(Solver):
    """Answers with the steps it is told to."""

    steps_of: Steps

    def solve(self, graph: remat.Graph, *, budget_bytes: int) -> remat.Solution:
        return remat.Solution.of_steps(
            graph, budget_bytes, self.steps_of(graph), lower_bound_s=0.0, solver="given", wall_s=0.0
        )


def keep_all(graph: remat.Graph) -> Sequence[int]:
    return range(graph.num_operators)


def keep_nothing(graph: remat.Graph) -> Sequence[int]:
    return steps_on_demand(graph, [])


def repeat_anything(seed: int) -> Steps:
    """Computes anything again at any time, in the forward too, and many times."""

    def steps(graph: remat.Graph) -> Sequence[int]:
        chance = random.Random(seed)
        found: list[int] = []

        for index in range(graph.num_operators):
            found.append(index)
            again = [
                i
                for i in set(found)
                if graph.operators[i].is_recomputable and not graph.operators[i].is_snapshot
            ]
            found += chance.sample(again, min(len(again), chance.choice([0, 1, 2])))
        return found

    return steps


# under each of these, a planned step equals the plain one
SCHEDULES = {
    "all kept": keep_all,
    "nothing kept": keep_nothing,
    "anything again": repeat_anything(3),
}


def planned(
    model: nn.Module,
    steps_of: Steps = keep_nothing,
    *,
    differentiate: str = "scalars",
    executor: str = "eager",
) -> nn.Module:
    return remat.checkpoint(
        model,
        UNLIMITED,
        solver=Given(steps_of),
        costs="flops",
        differentiate=differentiate,
        executor=executor,
    )


def reference(model: nn.Module, executor: str = "eager") -> nn.Module:
    """What a planned step has to equal: plain PyTorch, or `torch.compile` alone."""
    if executor == "inductor":
        model.compile()
    return model


def call_of(model: nn.Module) -> PlannedCall:
    call = get_call(model.module if isinstance(model, DistributedDataParallel) else model)
    assert isinstance(call, PlannedCall)
    return call


def batches(count: int, size: int = 4, width: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(size, width, generator=generator) for _ in range(count)]


def assert_same(got: Any, want: Any, *, executor: str = "eager") -> None:
    """Equal to the bit; through Inductor up to rounding, since a plan changes its kernels."""
    rtol, atol = (1e-4, 1e-5) if executor == "inductor" else (0.0, 0.0)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)


def loss_of(result: Any) -> torch.Tensor:
    """The loss of a step that returns it alone, or under its name in a dictionary."""
    loss: torch.Tensor = result["loss"] if isinstance(result, dict) else result
    return loss


def state_after(
    model: nn.Module,
    *args: Any,
    seed: int = 1,
    loss_of: Callable[[Any], torch.Tensor] = loss_of,
    call: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Everything a step leaves: loss, random state, gradients, buffers.

    The step calls the model, or `call`, which computes with the model's parameters.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = loss_of((model if call is None else call)(*args, **kwargs))
    loss.backward()

    gradients = {name: p.grad for name, p in model.named_parameters()}
    return [
        loss.detach(),
        torch.get_rng_state(),
        gradients,
        {name: buffer.clone() for name, buffer in model.named_buffers()},
    ]


class ChangedBuffer(nn.Module):
    """Reads a buffer, then changes it. Returns its loss."""

    scale: torch.Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (self.linear(x) + self.scale).sin()
        self.scale.mul_(3)
        loss: torch.Tensor = hidden.cos().sum()
        return loss


class Net(nn.Module):
    """Three blocks of a transformer without their attention; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
            for _ in range(3)
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).pow(2).mean()
        return loss


def batch(rows: int) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))
