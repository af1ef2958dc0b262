"""A planned module is still the user's: evaluation, hooks, copies and pickles as before."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.torch_border.modules import get_call
from tests.support.planned import assert_same, call_of, planned
from tests.support.small_models import MLP, MODELS, assert_same_steps

pytestmark = pytest.mark.usefixtures("fresh_torch")


class Noting(MLP):
    """Notes whether its last run was compiled."""

    is_compiled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_compiled = torch.compiler.is_compiling()
        return super().forward(x)


def test_evaluation_and_no_grad_run_the_plain_module() -> None:
    """Naive: what needs no gradient is compiled too."""
    model, x = Noting(), torch.randn(4, 8)
    plain = copy.deepcopy(model).eval()
    planned(model)
    model(x).backward()
    assert model.is_compiled

    model.eval()
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert_same(model(x), plain(x))
        assert not model.is_compiled

    assert_same_steps(model, plain, x)
    assert model.is_compiled
    assert len(call_of(model).pieces) == 2  # with gradients, evaluation is a step of its own


class Hooked:
    """Hooks a module, a submodule and a parameter, and counts the calls of the module's hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: Counter[str] = Counter()
        model.register_forward_pre_hook(lambda *_: self.calls.update(["before"]))
        model.register_forward_hook(lambda *_: self.calls.update(["after"]))
        model.get_submodule("middle").register_forward_hook(lambda _, __, out: out * 2)
        model.get_parameter("up.weight").register_hook(lambda gradient: gradient * 3)


@pytest.mark.parametrize("when", ["before the first step", "after it"])
def test_hooks_still_run(when: str) -> None:
    model, x = MODELS["mlp"]()
    plain = copy.deepcopy(model)
    planned(model)
    if when == "after it":
        model(x).backward()

    hooked = [Hooked(model), Hooked(plain)]
    assert_same_steps(model, plain, x)
    assert hooked[0].calls == hooked[1].calls


def test_a_copy_is_a_plain_module_and_the_original_keeps_its_plan() -> None:
    model, x = MODELS["mlp"]()
    planned(model)(x).backward()
    twin = copy.deepcopy(model)
    assert get_call(twin) is None
    assert_same_steps(model, twin, x)


def test_a_checkpointed_module_pickles() -> None:
    model, x = MODELS["mlp"]()
    planned(model)(x).backward()
    again: nn.Module = pickle.loads(pickle.dumps(model))
    assert get_call(again) is None
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert_same_steps(model, again, x)


class Guarded(MLP):
    """Leaves one attribute out of its pickle, as modules of users do, and keeps all others."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}


def test_a_module_with_its_own_getstate_has_plain_copies() -> None:
    """Naive: the plan is copied too, and runs the original module.

    Nor can the module be pickled.
    """
    model, x = Guarded(), torch.randn(4, 8)
    planned(model)(x).backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert get_call(twin) is None
        assert_same_steps(model, twin, x)


def test_unwrap_gives_the_plain_module_back() -> None:
    model, x = MODELS["mlp"]()
    planned(model)(x).backward()
    assert remat.unwrap(model) is model
    assert get_call(model) is None
    assert model(x).requires_grad
