"""Steps cut inside torch's own modules, whose frames dynamo does not compile, are planned."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.pieces import frames
from remat.pieces.frames import OwnFrames
from tests.support.planned import assert_same, call_of, keep_nothing, planned

WIDTH, LENGTH = 16, 32

pytestmark = pytest.mark.usefixtures("fresh_torch", "quick_first_step")


def encoder(num_layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers)


class InALoop(nn.Module):
    """A break in a loop leaves the forward, which calls torch's own modules, to plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh(), nn.Dropout(0.1))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


def assert_equal_steps(model: nn.Module, plain: nn.Module, **options: Any) -> None:
    """Three steps of both: outputs, gradients and the generator's state are equal to the bit."""
    for seed in range(3):
        states = []
        for each in (model, plain):
            torch.manual_seed(seed)
            x = torch.randn(2, LENGTH, WIDTH)
            each.zero_grad()
            out = each(x, **options)
            out.pow(2).mean().backward()
            states.append(
                [out, *(parameter.grad for parameter in each.parameters()), torch.get_rng_state()]
            )

        for ours, theirs in zip(*states, strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize("make", [encoder, InALoop])
def test_layers_behind_a_cut_in_torchs_own_modules_are_planned(make: Any) -> None:
    """An encoder reads its mask, which cuts the step.

    Naive: dynamo compiles no frame of torch's files, finds no piece, and the step is refused.
    """
    model = make()
    plain = copy.deepcopy(model)
    planned(model, keep_nothing, differentiate="all")
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    assert_equal_steps(model, plain, mask=mask)

    runner = call_of(model).piecewise
    assert runner is not None
    assert len(runner.last) >= 3


def test_an_encoder_in_pieces_keeps_its_budget() -> None:
    """The budget is the parameters and half of what plain PyTorch holds beside them."""
    model = encoder()
    x, mask = torch.randn(4, LENGTH, WIDTH), nn.Transformer.generate_square_subsequent_mask(LENGTH)
    held = remat.measure(lambda: model(x, mask=mask).sum().backward(), device="cpu").peak_bytes
    model.zero_grad(set_to_none=True)
    resident = sum(p.numel() * 4 for p in model.parameters())
    remat.checkpoint(model, resident + held // 2, costs="flops", differentiate="all")

    for _ in range(2):
        model.zero_grad(set_to_none=True)
        measured = remat.measure(
            lambda: model(x, mask=mask).sum().backward(), device="cpu"
        ).peak_bytes

    report = remat.report(model)
    assert report.breaks
    assert measured + resident <= report.solution.budget_bytes


@pytest.mark.parametrize("is_causal", [True, False])
def test_an_encoder_told_whether_its_mask_is_causal_runs_as_one_graph(is_causal: bool) -> None:
    model = encoder(1)
    plain = copy.deepcopy(model)
    planned(model, keep_nothing, differentiate="all")

    assert_equal_steps(
        model,
        plain,
        mask=nn.Transformer.generate_square_subsequent_mask(LENGTH),
        is_causal=is_causal,
    )
    assert call_of(model).piecewise is None


def test_between_steps_modules_are_as_they_were() -> None:
    """Naive: a `forward` stays on the instance, and is bound to it.

    A shallow copy, such as `DataParallel` makes, would then run the original.
    """
    model = planned(encoder(2), keep_nothing, differentiate="all")
    before = [dict(vars(part)) for part in model.modules()]
    model(
        torch.randn(2, LENGTH, WIDTH), mask=nn.Transformer.generate_square_subsequent_mask(LENGTH)
    ).sum().backward()

    with pytest.raises(remat.TraceError, match="embedding dimension"):
        model(
            torch.randn(2, LENGTH, WIDTH + 1),
            mask=nn.Transformer.generate_square_subsequent_mask(LENGTH),
        )

    assert [dict(vars(part)).keys() for part in model.modules()] == [own.keys() for own in before]
    assert not frames._USERS
    pickle.dumps(model)


def test_a_users_own_forward_stays() -> None:
    """A `forward` that was set on an instance, as some libraries do, is the one that runs."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    model[0].forward = own = lambda x: x
    with OwnFrames(model).installed():
        assert model[0].forward is own
        assert "forward" in vars(model)
    assert model[0].forward is own
    assert "forward" not in vars(model)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_scripted_modules_are_left_alone() -> None:
    """Naive: asking their class for its `forward` raises an `AttributeError`."""
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Tanh())))
    before = vars(model[0]).get("forward")
    with OwnFrames(model).installed():
        assert "forward" in vars(model)
        assert vars(model[0]).get("forward") is before


def test_steps_of_threads_may_share_modules() -> None:
    """The last step that uses the frames removes them.

    Naive: the first step to end removes them, and the other's module is plain.
    """
    shared = nn.Sequential(nn.Linear(2, 2))
    frames, may_end, is_inside = (
        [OwnFrames(shared), OwnFrames(nn.Sequential(shared))],
        threading.Event(),
        threading.Event(),
    )

    def other() -> None:
        with frames[1].installed():
            is_inside.set()
            assert may_end.wait(60)

    thread = threading.Thread(target=other)
    with frames[0].installed():
        thread.start()
        assert is_inside.wait(60)
        first = vars(shared)["forward"]

    assert vars(shared)["forward"] is first
    may_end.set()
    thread.join()
    assert "forward" not in vars(shared)
