"""Blocks of a model run as they would without a plan: their own forwards, hooks and checkpoints."""

from __future__ import annotations

import copy
import functools
import threading
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from tests.support.planned import UNLIMITED, assert_same, state_after

pytestmark = pytest.mark.usefixtures("fresh_torch", "quick_first_step")

WIDTH = 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x).square().mean()

    def call(self, block: nn.Module, x: torch.Tensor) -> Any:
        return block(x).tanh()

    def head(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x)
        return normed


class CheckpointedBlocks(Model):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def call(self, block: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=self.use_reentrant)


class CheckpointedHead(Model):
    def head(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = checkpoint(self.norm, x.sin().exp(), use_reentrant=False)
        return normed


def planned(model: nn.Module) -> nn.Module:
    return remat.checkpoint(model, UNLIMITED, blocks=model.blocks, costs="flops")  # type: ignore[arg-type]


def batch() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return 2 * nn.Linear.forward(self, x)


def test_a_forward_that_was_set_on_a_block_is_the_one_that_runs() -> None:
    """Naive: the class's forward is planned, and the user's own runs only without gradients."""
    torch.manual_seed(0)
    model = Model()
    model.blocks[0].forward = MethodType(doubled, model.blocks[0])
    model.blocks[1].forward = functools.partial(doubled, model.blocks[1])
    plain = Model()
    plain.load_state_dict(model.state_dict())
    plain.blocks[0].forward = MethodType(doubled, plain.blocks[0])
    plain.blocks[1].forward = functools.partial(doubled, plain.blocks[1])
    planned(model)

    for _ in range(2):
        assert_same(state_after(model, batch()), state_after(plain, batch()))
    assert remat.report(model).num_pieces == 3

    for one in (model, plain):
        one.blocks[2].forward = MethodType(doubled, one.blocks[2])
        del one.blocks[0].forward
    assert_same(state_after(model, batch()), state_after(plain, batch()))


def test_steps_in_two_threads_leave_the_blocks_as_they_were() -> None:
    """Naive: the thread that ends last puts back the forward that the other one had set."""
    model = Model()
    planned(model)
    model(batch()).backward()
    first_is_in, second_is_in = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread() is first:
            first_is_in.set()
            second_is_in.wait(60)
        else:
            second_is_in.set()
            first.join(60)

    model.blocks[0].register_forward_hook(wait)
    first, second = (threading.Thread(target=model, args=(batch(),)) for _ in range(2))
    first.start()
    first_is_in.wait(60)
    second.start()
    second.join(60)
    assert all("forward" not in vars(block) for block in model.blocks)
    remat.unwrap(model)(batch()).backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_a_block_is_refused(use_reentrant: bool) -> None:
    """Naive: each block runs plain, within no budget, or fails with torch's own error."""
    model = CheckpointedBlocks(use_reentrant=use_reentrant)
    planned(model)
    with pytest.raises(remat.TraceError, match="remove the checkpoint around the block"):
        model(batch().requires_grad_()).backward()


def test_a_checkpoint_between_blocks_runs_as_often_as_without_a_plan() -> None:
    """Naive: planning reads what it saved, which computes it again: statistics change twice."""
    torch.manual_seed(0)
    model = CheckpointedHead()
    plain = copy.deepcopy(model)
    planned(model)
    for _ in range(2):
        assert_same(state_after(model, batch()), state_after(plain, batch()))


def test_a_model_that_moves_after_a_step_is_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    planned(model)
    model(batch()).backward()
    begun: list[str] = []
    monkeypatch.setattr("remat.face.planned_module.device_type", lambda _: "meta")
    monkeypatch.setattr(
        "remat.face.blocks.PlannedBlocks._first_call", lambda *_: begun.append("anew")
    )
    model(batch())
    assert begun == ["anew"]
