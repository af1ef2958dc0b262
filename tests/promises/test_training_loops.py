"""Training loops as people write them.

A planned model ends where the plain one does, and nothing stays behind.
"""

from __future__ import annotations

import contextvars
import copy
import gc
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.torch_border.modules import get_call
from tests.support.planned import (
    assert_same,
    batches,
    call_of,
    keep_all,
    on_both_executors,
    planned,
    reference,
)

Loop = Callable[[nn.Module], Any]


pytestmark = pytest.mark.usefixtures("fresh_torch")


class Net(nn.Module):
    """Dropout, batch norm and two layers with one weight; returns its loss."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(width, width, bias=False),
        )
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.3)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(self.first(x)).sin())
        hidden = hidden + self.dropout(F.gelu(self.second(hidden)))
        loss: torch.Tensor = self.last(hidden).pow(2).mean()
        return loss


def assert_same_loop(
    loop: Loop, make: Callable[[], nn.Module] = Net, executor: str = "eager"
) -> nn.Module:
    """The loop gives a planned and a plain model equal results, gradients and states.

    Returns the planned model.
    """
    plain = make()
    model = planned(copy.deepcopy(plain), executor=executor)
    reference(plain, executor)

    ends = []
    for each in (model, plain):
        torch.manual_seed(1)
        result = loop(each)
        gradients = {name: p.grad for name, p in each.named_parameters()}
        ends.append([result, dict(each.state_dict()), gradients, torch.get_rng_state()])

    assert_same(*ends, executor=executor)
    assert call_of(model).pieces
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, with an `eps` so large that rounding errors of zero gradients have no effect."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.1, eps=1e-2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_and_clipped_gradients_train_the_same(*, set_to_none: bool) -> None:
    """Tied weights stay tied.

    The same loop through Inductor is in `inductor/test_loops.py`.
    """

    def loop(model: nn.Module) -> list[float]:
        optimizer, losses = adam(model), []
        for index, x in enumerate(batches(6)):
            loss = model(x) / 3
            loss.backward()
            losses.append(loss.item())

            if index % 3 == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        return losses

    model = assert_same_loop(loop)
    assert model.get_submodule("first").weight is model.get_submodule("last").weight


def test_gradients_of_earlier_steps_count() -> None:
    """Naive: the plan of the first step, made without gradients, serves later steps too.

    Their peak is then above the budget.
    """
    model, x = Net(64), torch.randn(256, 64)
    graph = remat.trace(model, (x,), costs="flops")
    budget = remat.simulate(graph, remat.Schedule.keep_all(graph)).peak_bytes * 3 // 4
    remat.checkpoint(model, budget, costs="flops", time_limit_s=5.0)
    for _ in range(3):
        model(x).backward()

    first, second = (piece.solution for piece in call_of(model).pieces)
    held = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    resident = held + sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))

    assert first.peak_bytes + held > budget
    assert (first.budget_bytes, second.budget_bytes) == (budget, budget - held)
    assert remat.measure(lambda: model(x).backward(), device="cpu").peak_bytes + resident <= budget


class Untied(nn.Module):
    """Uses each weight once per forward.

    With two uses in each of several forwards, the order of adding the gradients is not defined.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).sin().pow(2).mean()
        return loss


@on_both_executors
def test_several_forwards_may_precede_a_backward(executor: str) -> None:
    """Each keeps its own values and its own random state.

    Naive: those of the last forward serve them all.
    """

    def loop(model: nn.Module) -> list[float]:
        first, second, third, fourth = (model(x) for x in batches(4))
        (first * second + third).backward()
        fourth.backward()
        return [loss.item() for loss in (first, second, third, fourth)]

    assert_same_loop(loop, Untied, executor)


@on_both_executors
def test_evaluation_in_between_runs_the_plain_model(executor: str) -> None:
    """Naive: evaluation runs the training plan, with dropout, and moves running statistics."""

    def loop(model: nn.Module) -> list[float]:
        optimizer, seen = adam(model), []
        for x in batches(3):
            model.train()
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()

            model.eval()
            with torch.no_grad():
                seen.append(model(x).item())
            with torch.inference_mode():
                seen.append(model(x).item())
            seen.append(model(x).item())  # with gradients, and never a backward
        return seen

    assert_same_loop(loop, executor=executor)


def test_layers_may_be_frozen_and_trained_again() -> None:
    """Naive: the gradients planned at the first step are those of all steps."""

    def loop(model: nn.Module) -> None:
        for index, x in enumerate(batches(4)):
            model.get_submodule("second").requires_grad_(index % 2 == 1)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()

    assert_same_loop(loop)


class LoRA(nn.Module):
    """A frozen layer and a trained correction of low rank (Hu et al. 2021)."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(layer.in_features, rank, bias=False),
            nn.Linear(rank, layer.out_features, bias=False),
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x) + 2.0 * self.up(self.down(self.dropout(x)))
        return result


def with_adapters() -> nn.Module:
    model = Net().requires_grad_(False)
    for name in ("first", "second"):
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        setattr(model, name, LoRA(layer))
    return model


def train(model: nn.Module) -> None:
    optimizer = adam(model)
    for x in batches(3):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


@on_both_executors
def test_adapters_of_low_rank_train_the_same(executor: str) -> None:
    model = assert_same_loop(train, with_adapters, executor)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        f"{layer}.{part}.weight" for layer in ("first", "second") for part in ("down", "up")
    }


def test_adapters_of_peft_train_the_same() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["layers.0", "layers.3"], lora_dropout=0.2)
    assert_same_loop(train, lambda: peft.get_peft_model(Untied(), config))


@on_both_executors
def test_a_state_dict_is_saved_and_loaded(tmp_path: Path, executor: str) -> None:
    plain = Net()
    model = planned(copy.deepcopy(plain), executor=executor)
    reference(plain, executor)
    train(model)

    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))
    model.load_state_dict(torch.load(tmp_path / "model.pt"))

    ends = []
    for each in (model, plain):
        torch.manual_seed(3)
        train(each)
        ends.append(dict(each.state_dict()))
    assert_same(*ends, executor=executor)


def test_a_module_pickles_and_copies_before_and_after_it_is_planned() -> None:
    model = Net()
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    train(planned(model))
    twins += [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert [get_call(twin) for twin in twins] == [None] * 4

    again = planned(twins[2])
    train(again)
    assert call_of(again).pieces
    assert call_of(again) is not call_of(model)


class Interrupted(Exception):
    """Raised by the tests below in the middle of a step."""


def fail_on(x: torch.Tensor) -> Any:
    def hook(*_: Any) -> None:
        raise Interrupted

    return x.register_hook(hook)


@on_both_executors
def test_an_exception_between_forward_and_backward_leaves_nothing(executor: str) -> None:
    """Naive: the module keeps what the forward saved until the backward reads it."""
    model, x = planned(Net(64), keep_all, executor=executor), torch.randn(512, 64)
    model(x).backward()
    model.zero_grad()
    saved: list[weakref.ref[torch.Tensor]] = []

    def interrupted() -> None:
        loss: Any = model(x)
        saved.extend(weakref.ref(tensor) for tensor in loss.grad_fn.saved_tensors)
        raise Interrupted

    def step() -> None:
        with pytest.raises(Interrupted):
            interrupted()

    step()
    assert remat.measure(step, device="cpu").end_bytes == 0
    alive = [tensor for ref in saved if (tensor := ref()) is not None]
    assert len(saved) > len(alive)
    assert all(tensor is x or isinstance(tensor, nn.Parameter) for tensor in alive)


@on_both_executors
def test_an_exception_in_the_backward_leaves_nothing_and_the_next_step_is_right(
    executor: str,
) -> None:
    """Naive: recomputation leaves the generator changed, or half a backward counts as done."""

    def loop(model: nn.Module) -> torch.Tensor:
        x = batches(1)[0].requires_grad_()
        model(x).backward()
        model.zero_grad()

        handle = fail_on(x)
        loss = model(x)
        drawn = torch.rand(2)
        with pytest.raises(Interrupted):
            loss.backward()
        handle.remove()

        model.zero_grad()
        model(x).backward()
        return drawn

    model = assert_same_loop(loop, executor=executor)
    x = batches(1)[0].requires_grad_()
    fail_on(x)

    def step() -> None:
        model.zero_grad()
        with pytest.raises(Interrupted):
            model(x).backward()
        model.zero_grad()

    remat.measure(step, device="cpu")  # frees what was there before
    assert remat.measure(step, device="cpu").end_bytes == 0


@on_both_executors
def test_a_deleted_model_is_gone(executor: str) -> None:
    """Naive: dynamo's cache, or a table of plans, holds every model that was ever planned."""
    model = planned(Net(), executor=executor)
    train(model)
    parts = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
    del model
    gc.collect()
    assert [ref() for ref in parts] == [None] * len(parts)


class InPieces(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).sin()
        torch._dynamo.graph_break()
        loss: torch.Tensor = self.second(hidden).sin().mean()
        return loss


def test_a_deleted_model_in_pieces_is_gone() -> None:
    """Naive: AOTAutograd keeps what it compiled for ever, and with it the plan and its module."""
    model = planned(InPieces())
    train(model)
    parts = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
    del model
    for _ in range(2):  # what the first collection frees holds more
        gc.collect()
    assert [ref() for ref in parts] == [None] * len(parts)


@on_both_executors
@pytest.mark.parametrize("kind", [Net, InPieces])
def test_a_backward_may_outlive_its_model(kind: type[nn.Module], executor: str) -> None:
    plain = kind()
    ends = []
    for one in (planned(copy.deepcopy(plain), executor=executor), reference(plain, executor)):
        torch.manual_seed(1)
        x = torch.randn(4, 8, requires_grad=True)
        for _ in range(2):
            loss = one(x)
            loss.backward()
        loss = one(x)
        ends.append((loss, x))
    del one, plain
    for _ in range(2):  # what the first collection frees holds more
        gc.collect()
    for loss, _ in ends:
        loss.backward()
    assert_same(*[[x.grad] for _, x in ends], executor=executor)


def test_a_warning_is_shown_once_however_many_steps_follow() -> None:
    """Naive: each step changes the filters, after which Python shows every warning again."""
    model = planned(InPieces())
    train(model)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for x in batches(3):
            warnings.warn("said by the training loop", stacklevel=1)
            model(x).backward()
    assert [str(warning.message) for warning in shown] == ["said by the training loop"]


class Heads(nn.Module):
    """One of many heads learns in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, size) for size in range(1, 8))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        loss: torch.Tensor = self.heads[chosen](x).sin().mean()
        return loss


def test_few_sizes_of_earlier_gradients_have_plans_of_their_own() -> None:
    """Naive: each sum of bytes of gradients is captured and planned anew."""
    model = planned(Heads(), keep_all)
    for chosen in (0, 1, 2, 3, 4, 5, 6, 0):  # the gradients add up
        model(torch.ones(2, 8), chosen).backward()
    rooms = {held for held, *_ in call_of(model)._whole}
    for left in range(7):
        for parameter in model.get_submodule(f"heads.{left}").parameters():
            parameter.grad = None
        model(torch.ones(2, 8), 6).backward()
    assert {held for held, *_ in call_of(model)._whole} == rooms


@on_both_executors
def test_steps_leave_nothing_in_the_context_of_their_thread(executor: str) -> None:
    """Naive: settings are set by `config.patch`, each of which leaves a context variable behind."""
    model = planned(Net(), executor=executor)
    train(model)
    before = len(contextvars.copy_context())
    train(model)
    assert len(contextvars.copy_context()) == before


@on_both_executors
def test_threads_replay_their_own_dropout(executor: str) -> None:
    """Each thread replays the dropout of its own forward.

    Weight times gradient is the loss only if the mask is the same.

    Naive: recomputation sets the one generator that all threads draw from, and another thread draws
    from it in between."""
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            for step in range(60):
                assert_gradient_is_of_the_mask_drawn(models[seed], step)
        except BaseException as error:  # noqa: BLE001  # of any kind: it belongs to the test's thread
            failures.append(error)

    models = [planned(Masked(), executor=executor) for _ in range(3)]
    for model in models:
        model(torch.ones(64, 64)).backward()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as if they ran on many cores
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)

    assert not failures, failures[0]


THREADS_THAT_COLLECT = """
import gc, sys, threading, weakref
import torch
from remat.run.random_state import take_state

class Cycle: ...

def slow_finalizer(_):
    for _ in range(200): ...

def run():
    for _ in range(5_000):
        dead = Cycle()
        dead.itself = dead
        finalizers.append(weakref.ref(dead, slow_finalizer))
        del finalizers[:-1_000]
        take_state(torch.device("cpu"))

finalizers = []
gc.set_threshold(50, 2, 2)
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=run) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_threads_do_not_deadlock() -> None:
    """Naive: `torch.get_rng_state` holds the generator's mutex while garbage is collected.

    This test then hangs at once.
    """
    subprocess.run([sys.executable, "-c", THREADS_THAT_COLLECT], check=True, timeout=60)


class Masked(nn.Module):
    """Linear in its weight: weight times gradient is the loss if both used the same mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64, 64, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.weight * x
        for _ in range(3):
            hidden = F.dropout(hidden, 0.5) * 1.5
        return hidden.sum()


def assert_gradient_is_of_the_mask_drawn(model: nn.Module, step: int) -> None:
    model.zero_grad()
    weight = model.get_parameter("weight")
    loss = model(torch.full((64, 64), 1.0 + step))
    loss.backward()
    assert weight.grad is not None
    torch.testing.assert_close((weight * weight.grad).sum(), loss)
