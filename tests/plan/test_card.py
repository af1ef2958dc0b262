"""Without a budget, a GPU's free memory is the budget; the GPU's answers are made up here."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import remat
from remat.fit.optimizer_memory import bytes_to_keep_free, state_bytes_of
from remat.fit.question import Question
from remat.plan import card, distributed, planner
from remat.plan.planner import Options, Plans
from remat.tracers.synthetic import chain
from tests.support.planned import call_of

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes that cuBLAS keeps on a device of each type."""
    sizes = {"cpu": 0, "cuda": 0}
    monkeypatch.setattr(planner, "library_bytes", lambda device_type: sizes[device_type])
    return sizes


def say(monkeypatch: pytest.MonkeyPatch, **words: Any) -> None:
    """Makes torch report these numbers; the others are those of a free card of 80 GiB."""
    total = words.get("total", 80 * GIB)
    answers = {
        "mem_get_info": (words.get("free", total), total),
        "memory_reserved": words.get("reserved", 0),
        "memory_allocated": words.get("allocated", 0),
        "get_per_process_memory_fraction": words.get("fraction", 1.0),
    }

    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)


def planned_there(
    monkeypatch: pytest.MonkeyPatch, model: Any, budget: str | None = None, **options: Any
) -> Any:
    """`model`, planned as if it were on that card."""
    with monkeypatch.context() as while_asked:
        while_asked.setattr(torch.cuda, "is_available", lambda: True)
        remat.checkpoint(model, budget, costs="flops", plan_cache=False, **options)
    # the model seems to move there after it was planned
    monkeypatch.setattr("remat.face.planned_module.device_type", lambda module: "cuda")
    return model


@pytest.mark.parametrize(
    ("words", "step_bytes", "budget_bytes"),
    [
        ({}, 0, 75 * GIB),
        ({"free": 60 * GIB}, 0, 55 * GIB),
        # what torch reserved and does not use counts as free, and so does what the step holds
        ({"free": 60 * GIB, "reserved": 15 * GIB, "allocated": 5 * GIB}, 0, 65 * GIB),
        ({"free": 60 * GIB, "reserved": 15 * GIB, "allocated": 5 * GIB}, 3 * GIB, 68 * GIB),
        # a share of the card, 20 GiB, of which this process holds 15 and uses 5
        (
            {"free": 60 * GIB, "reserved": 15 * GIB, "allocated": 5 * GIB, "fraction": 0.25},
            0,
            15 * GIB - 20 * GIB // 16,
        ),
        ({"total": 4 * GIB}, 0, 4 * GIB - 512 * MIB),  # a small card keeps 512 MiB
        ({"free": 60 * GIB - 1}, 0, 55 * GIB - 64 * MIB),  # a multiple of 64 MiB
    ],
)
def test_without_a_budget_the_budget_is_what_the_gpu_has_free(
    words: dict[str, Any], step_bytes: int, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, **words)

    assert card.budget_of_card("cuda", step_bytes) == budget_bytes


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch say that the current GPU is an H100."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")


@pytest.mark.usefixtures("h100")
def test_fits_takes_of_the_gpu_what_checkpoint_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: all of the card, so that fits promises batches that checkpoint refuses."""
    say(monkeypatch, free=60 * GIB, reserved=15 * GIB, allocated=5 * GIB)
    monkeypatch.setattr("remat.fit.question.there_bytes", lambda *_: 3 * GIB)
    model, graph = nn.Linear(4, 4), chain(3)

    question = Question.of(model, optimizer="none")
    assert question.budget_bytes(graph) == card.budget_of_card("cuda", 3 * GIB) == 68 * GIB

    say(monkeypatch, free=5 * GIB)  # read once: all batches are compared for one budget
    assert question.budget_bytes(graph) == 68 * GIB
    assert Question.of(model, budget="90GiB").budget_bytes(graph) == 90 * GIB


@pytest.mark.usefixtures("h100")
def test_a_fake_model_takes_nothing_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, free=60 * GIB)
    monkeypatch.setattr(
        "remat.fit.question.there_bytes", lambda *_: pytest.fail("nothing is there")
    )
    with FakeTensorMode():
        model = nn.Linear(4, 4)

    assert Question.of(model, optimizer="none").budget_bytes(chain(3)) == 55 * GIB


@pytest.mark.usefixtures("h100")
def test_fits_refuses_a_full_card_and_needs_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: one rank asks whether a step fits, and waits for the others to ask as well."""
    monkeypatch.setattr(card, "least_of_all_ranks", lambda _: pytest.fail("no rank is asked"))
    say(monkeypatch)
    assert Question.of(nn.Linear(4, 4), optimizer="none").budget == 75 * GIB

    say(monkeypatch, free=2 * GIB)
    with pytest.raises(ValueError, match="nothing is left for a step"):
        remat.fits(nn.Linear(4, 4), (torch.randn(2, 4),))


@pytest.mark.parametrize(
    ("name", "total_bytes", "kept_bytes"),
    [("H100", 80 * 10**9, 5 * 10**9), ("T4", 16 * 10**9, 10**9)],
)
def test_a_card_of_the_table_keeps_a_sixteenth_free(
    name: str, total_bytes: int, kept_bytes: int
) -> None:
    question = Question.of(nn.Linear(4, 4), device=name)
    assert question.device.memory_bytes == total_bytes
    assert question.budget_bytes(chain(3)) == total_bytes - kept_bytes


def test_a_cpu_keeps_nothing_free() -> None:
    question = Question.of(nn.Linear(4, 4), device="cpu")
    assert question.budget_bytes(chain(3)) == question.device.memory_bytes


def test_a_full_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, free=2 * GIB)

    with pytest.raises(ValueError, match=r"the GPU has 2 GiB .* nothing is left for a step"):
        card.budget_of_card("cuda", 0)


@pytest.mark.usefixtures("fresh_torch")
def test_the_first_step_is_planned_for_what_the_card_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card is read once; the reserve is for optimizer state made after the first step."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Flatten(0)), torch.randn(4, 8)
    planned_there(monkeypatch, model, reserve_bytes=GIB)
    say(monkeypatch, free=60 * GIB)
    model(x).sum().backward()
    say(monkeypatch, free=10 * GIB)
    model.zero_grad()
    model(x[:3]).sum().backward()

    first, second = call_of(model).pieces
    assert first.solution.budget_bytes == second.solution.budget_bytes == 54 * GIB
    assert "55 GiB (59,055,800,320 bytes), what the GPU had" in str(remat.report(model))


@pytest.mark.usefixtures("fresh_torch")
def test_a_step_in_pieces_is_planned_for_what_the_card_had_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x).tanh()
            torch._dynamo.graph_break()
            say(monkeypatch, free=6 * GIB)  # the step's own activations take the rest
            loss: torch.Tensor = self.layer(x).sum()
            return loss

    model = planned_there(monkeypatch, Cut())
    say(monkeypatch, free=60 * GIB)
    model(torch.randn(4, 8)).backward()

    assert remat.report(model).solution.budget_bytes == 55 * GIB


@pytest.mark.usefixtures("fresh_torch")
@pytest.mark.parametrize("budget", [None, "1GiB", "100%"])
def test_the_plan_may_not_use_what_cublas_keeps(
    budget: str | None, monkeypatch: pytest.MonkeyPatch, kept: dict[str, int]
) -> None:
    """A budget covers all that the device counts, whichever way it is given."""
    found = []
    for kept_bytes in (0, 64 * MIB):
        kept["cuda"] = kept_bytes
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Flatten(0))
        planned_there(monkeypatch, model, budget=budget)
        say(monkeypatch, free=60 * GIB - kept_bytes, allocated=kept_bytes, reserved=kept_bytes)
        model(torch.randn(4, 8)).sum().backward()
        found.append(remat.report(model))

    (without, with_it) = found
    assert without.room is not None and with_it.room is not None
    expected = {None: 64 * MIB, "1GiB": 64 * MIB, "100%": 0}[budget]
    assert without.solution.budget_bytes - with_it.solution.budget_bytes == expected
    assert with_it.room.held() == {"cuBLAS's workspace": 64 * MIB}
    assert "cuBLAS's workspace" in str(with_it) and "cuBLAS" not in str(without)


@pytest.mark.usefixtures("fresh_torch")
@pytest.mark.parametrize(("budget", "plan_bytes"), [(None, 55 * GIB), ("1GiB", GIB)])
def test_blocks_are_planned_for_what_the_card_has(
    budget: str | None, plan_bytes: int, monkeypatch: pytest.MonkeyPatch, kept: dict[str, int]
) -> None:
    kept["cuda"] = 64 * MIB
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Flatten(0))
    planned_there(monkeypatch, model, budget, blocks=blocks)
    say(monkeypatch, free=60 * GIB - 64 * MIB, allocated=64 * MIB, reserved=64 * MIB)
    model(torch.randn(4, 8)).sum().backward()

    report = remat.report(model)
    assert report.solution.budget_bytes == plan_bytes - 64 * MIB
    assert report.captured_s > 0


def test_cublas_is_measured_once_per_stream_by_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product, forward and backward, leaves nothing else behind.

    Naive: once per GPU. A step on another stream would be planned for a workspace that is counted
    as held there, and is allocated only later.
    """
    held, stream = {"bytes": 5 * MIB}, SimpleNamespace(cuda_stream=0)
    runs = []

    def run(device: str) -> None:
        runs.append((device, stream.cuda_stream))
        held["bytes"] += 64 * MIB

    card._kept_by_cublas.cache_clear()
    say(monkeypatch)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held["bytes"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(card, "_run_product", run)
    monkeypatch.setattr(card, "forget_cublas_workspaces", lambda: None)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())

    assert [card.library_bytes("cuda"), card.library_bytes("cuda")] == [64 * MIB, 64 * MIB]
    assert card.library_bytes("cpu") == 0
    assert runs == [("cuda", 0)]

    stream.cuda_stream = 7
    assert card.library_bytes("cuda") == 64 * MIB
    assert runs == [("cuda", 0), ("cuda", 7)]
    card._kept_by_cublas.cache_clear()


def test_the_product_leaves_nothing() -> None:
    measured = remat.measure(lambda: card._run_product("cpu"), device="cpu")

    assert measured.peak_bytes > 0
    assert measured.end_bytes == 0


@pytest.mark.parametrize("is_there", [False, True])
def test_a_cpu_needs_a_budget(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at once without a GPU; with one, at the first step, since the model might move."""
    message = r'a budget is needed on a CPU.*budget="8GiB" or budget="60%"'
    model = nn.Linear(4, 4)
    with monkeypatch.context() as while_asked:
        while_asked.setattr(torch.cuda, "is_available", lambda: is_there)
        if not is_there:
            with pytest.raises(ValueError, match=message):
                remat.checkpoint(model)
            return
        remat.checkpoint(model, costs="flops")

    with pytest.raises(ValueError, match=message):
        model(torch.randn(2, 4))


@pytest.mark.usefixtures("fresh_torch")
def test_the_backend_needs_a_budget_on_a_cpu() -> None:
    compiled = torch.compile(nn.Linear(4, 4), backend="remat")

    with pytest.raises(Exception, match="a budget is needed on a CPU"):
        compiled(torch.randn(2, 4)).sum()


def test_existing_optimizer_state_gets_no_room_again() -> None:
    """As when training resumes: free memory already excludes it. A given budget includes it."""
    layer = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(layer.parameters())
    to_come = state_bytes_of(optimizer)
    assert bytes_to_keep_free(optimizer, of_card=True) == to_come > 0

    layer(torch.ones(32)).sum().backward()
    optimizer.step()

    assert bytes_to_keep_free(optimizer, of_card=True) == 0
    assert bytes_to_keep_free(optimizer, of_card=False) == to_come


def test_a_solver_needs_a_budget() -> None:
    graph = remat.trace(nn.Linear(4, 4), (torch.randn(2, 4),), costs="flops")
    with pytest.raises(TypeError, match="NoneType"):
        remat.solve(graph, None)  # type: ignore[arg-type]


def test_ranks_agree_on_the_least_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings: Any = torch._C._distributed_c10d
    store = bindings.HashStore()
    monkeypatch.setattr(distributed, "is_distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(distributed, "rank_store", lambda _: bindings.PrefixStore("remat", store))
    monkeypatch.setattr(distributed, "_counts_of", lambda _: {})

    found: list[int] = []
    ranks = [
        threading.Thread(target=lambda own=own: found.append(distributed.least_of_all_ranks(own)))
        for own in (70, 64, 68)
    ]

    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()

    assert found == [64, 64, 64]


def test_a_model_that_leaves_the_card_needs_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    say(monkeypatch)
    plans = Plans(Options(None))
    plans.look_at_card("cuda", lambda: 0)

    with pytest.raises(ValueError, match="a budget is needed on a CPU"):
        plans.look_at_card("cpu", lambda: 0)
