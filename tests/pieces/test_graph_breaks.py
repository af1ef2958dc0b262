"""A step that `torch.compile` cuts into pieces is planned as one; it equals the plain one."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.core.schedule import Schedule, simulate
from remat.pieces.joined_step import composed
from remat.run import capture, executor, tangents
from tests.support.broken_steps import (
    MODELS,
    ROWS,
    WIDTH,
    Base,
    Branches,
    Broken,
    Halves,
    Prints,
    assert_same_states,
    batch,
    peak_of_a_step,
    runner_of,
    state_after,
)
from tests.support.planned import (
    UNLIMITED,
    Given,
    assert_same,
    keep_nothing,
    loss_of,
    on_both_executors,
    planned,
)

pytestmark = pytest.mark.usefixtures("fresh_torch", "quick_first_step")


# each with another reason why a peak could be measured wrongly
MEASURED = ("Loop", "Views", "Unused", "ManyResults", "Hooked")


@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_pieces_equals_the_plain_step(name: str) -> None:
    """The measured peak, too, is that of a step (`test_step_meter.py` has more on it).

    Naive: a backward reads what a later piece changed; a piece keeps its first plan.
    """
    model, plain = MODELS[name](), MODELS[name]()
    plain.load_state_dict(model.state_dict())
    planned(model, keep_nothing)

    for seed in (0, 2, 1, 3) if name in ("Branches", "ChangesOnOneBranch") else (0, 2):
        assert_same(state_after(model, batch(seed), seed), state_after(plain, batch(seed), seed))

    runner = runner_of(model)
    plan = runner.plan
    assert plan is not None
    assert len(plan.step.runs) > 1
    assert plan.solution.overhead > 0

    if name in MEASURED:
        state_after(model, batch(0), 0)
        measured = remat.report(model).measured_peak_bytes
        assert measured == peak_of_a_step(model, batch(0).requires_grad_())


class Noted(nn.Module):
    """Eager code between two pieces notes what passes from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.between: list[weakref.ref[torch.Tensor]] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(self, hidden: torch.Tensor) -> None:
        """Keeps a weak reference."""
        self.between.append(weakref.ref(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of the head."""
        hidden = self.first(x).tanh()
        self.note(hidden)
        loss: torch.Tensor = self.head(hidden).square().mean()
        return loss


@on_both_executors
def test_nothing_of_a_step_stays_after_it(executor: str) -> None:
    """Naive: compiled code keeps the tensors it was captured with, and their history."""
    model = remat.checkpoint(Noted(), "1MiB", executor=executor, costs="flops")
    inputs = []
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        inputs.append(weakref.ref(x))
        model(x).backward()
        del x

    gc.collect()
    assert len(model.between) >= 3
    assert [ref() for ref in (*model.between, *inputs) if ref() is not None] == []


@pytest.mark.parametrize(
    ("name", "budget", "num_steps"), [("Broken", "70%", 3), ("Views", "90%", 5)]
)
def test_all_pieces_stay_within_one_budget(name: str, budget: str, num_steps: int) -> None:
    """Naive: each piece has the budget to itself, and keeps everything within it.

    What runs between the pieces is not counted.
    """
    model, x = MODELS[name](), batch(0).requires_grad_()
    remat.checkpoint(model, budget, costs="flops", time_limit_s=1.0)
    for _ in range(num_steps):
        model.zero_grad()
        loss_of(model(x)).backward()

    report = remat.report(model)
    assert (report.unplanned_bytes > 0) == (name == "Views")
    assert peak_of_a_step(model, x) <= report.solution.budget_bytes + report.unplanned_bytes

    if name == "Broken":
        assert report.measured_peak_bytes == report.solution.peak_bytes == peak_of_a_step(model, x)
        assert report.num_pieces == 3
        assert "broken_steps.py" in str(report)
        assert "3 compiled pieces share the budget" in str(report)

        joined = runner_of(model).joined
        assert joined is not None
        alone = [Schedule.keep_all(run.step.graph) for run in joined.runs]
        assert all(
            simulate(run.step.graph, own).peak_bytes <= report.solution.budget_bytes
            for run, own in zip(joined.runs, alone, strict=True)
        )

        # together they exceed the budget
        assert (
            simulate(joined.graph, composed(joined, alone)).peak_bytes
            > report.solution.budget_bytes
        )


def test_two_shapes_in_turn_both_run_as_planned() -> None:
    model = Halves()
    remat.checkpoint(model, UNLIMITED, costs="flops", time_limit_s=1.0)
    for step in range(4):
        loss_of(model(batch(0)[: (ROWS, ROWS // 2)[step % 2]])).backward()

    plans = runner_of(model).plans.values()
    assert {plan.gradient_bytes > 0 for plan in plans} == {False, True}
    peaks = [plan.meter.peak_bytes for plan in plans if plan.gradient_bytes]
    assert len(peaks) == 2 and None not in peaks


@pytest.fixture(scope="module")
def traced() -> remat.Graph:
    torch._dynamo.reset()
    model = Broken()
    before = copy.deepcopy(model.state_dict())
    graph = remat.trace(model, (batch(0),), costs="flops")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return graph


def test_a_trace_goes_through_the_breaks_and_its_plan_runs(traced: remat.Graph) -> None:
    model, x = Broken(), batch(0)
    plain = copy.deepcopy(model)
    remat.wrap(model, Given(keep_nothing).solve(traced, budget_bytes=UNLIMITED), costs="flops")

    for seed in range(3):
        losses = []
        for each in (model, plain):
            torch.manual_seed(seed)
            losses.append(loss_of(each(x)))
            losses[-1].backward()
        assert torch.equal(*losses)

    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_trace_that_needs_data_is_refused() -> None:
    with pytest.raises(
        remat.TraceError, match=r"remat\.checkpoint finds them in the first real step"
    ):
        remat.trace(Branches(), (batch(0),))


def test_a_plan_of_another_path_is_refused(traced: remat.Graph) -> None:
    solution = Given(keep_nothing).solve(traced, budget_bytes=UNLIMITED)
    with pytest.raises(remat.ScheduleError, match="another step"):
        remat.wrap(Prints(), solution, costs="flops")(batch(0))


def test_a_budget_that_pieces_cant_meet_says_what_can(traced: remat.Graph) -> None:
    with pytest.raises(
        remat.BudgetError, match=r"known to work is.* it cuts at: .*graph_break\(\)"
    ) as caught:
        remat.checkpoint(Broken(), 1000, costs="flops", time_limit_s=1.0)(batch(0))
    assert caught.value.minimum_bytes < 0.6 * simulate(traced, Schedule.keep_all(traced)).peak_bytes


def test_an_error_between_pieces_leaves_nothing_behind() -> None:
    class Fails(Base):
        is_failing = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            torch._dynamo.graph_break()
            if self.is_failing:
                raise KeyError("of the model's own")
            return self.loss(self.blocks[1](x))

    model, x = Fails(), batch(0)
    plain = copy.deepcopy(model)
    planned(model, keep_nothing)
    model(x).backward()

    model.is_failing = True
    with pytest.raises(KeyError, match="of the model's own"):
        model(x)
    model.is_failing = False

    plain.load_state_dict(model.state_dict())
    for seed in range(2):
        assert_same(state_after(model, x, seed), state_after(plain, x, seed))


def test_steps_in_pieces_may_overlap() -> None:
    """Each backward runs the halves of its own forward, even if another forward ran between."""
    model = Halves()
    plain = copy.deepcopy(model)
    planned(model, keep_nothing)

    for each in (model, plain):
        for _ in range(2):
            torch.manual_seed(1)
            losses = [loss_of(each(batch(seed))) for seed in range(3)]
            (losses[0] + losses[2]).backward()
            losses[1].backward()

    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_gradients_of_earlier_steps_count_in_pieces() -> None:
    """Naive: the plan of the first step, made without gradients, serves later steps too."""
    model, x = Halves(), batch(0)
    planned(model, keep_nothing)

    budgets = []
    for _ in range(3):
        model(x).backward()
        plan = runner_of(model).plan
        assert plan is not None
        budgets.append(plan.solution.budget_bytes)

    held = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert budgets == [UNLIMITED, UNLIMITED - held, UNLIMITED - held]


def test_reserved_gpu_memory_is_not_part_of_the_step() -> None:
    """The measured peak leaves out what was held before the step, such as optimizer state.

    Naive: a step may use the reserve too.
    """
    model, x = Halves(), batch(0)
    remat.checkpoint(
        model, UNLIMITED, reserve_bytes=4096, solver=Given(keep_nothing), costs="flops"
    )

    model(x)
    runner = runner_of(model)
    runner.device_type = "cuda"
    assert runner.plan is not None

    runner.plan.meter.peak_bytes = UNLIMITED - 4096
    model(x)
    assert runner.plan.unplanned_bytes == 0

    runner.plan.meter.peak_bytes = UNLIMITED - 4096 + 100
    # planned again, with less than the one given plan needs
    with pytest.raises(remat.ScheduleError, match="exceeds the budget"):
        model(x)


def test_retain_graph_through_pieces_is_refused() -> None:
    model, x = Halves(), batch(0)
    planned(model, keep_nothing)
    for _ in range(2):
        with pytest.raises(remat.TraceError, match="retain_graph"):
            model(x).backward(retain_graph=True)


class Beside:
    """While entered, keeps another thread waiting in `step`, in a function that `meets` wraps."""

    def __init__(self) -> None:
        self.is_inside, self.may_end = threading.Event(), threading.Event()
        self.step: Callable[[], Any] = list

    def meets(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def met(*args: Any) -> Any:
            self.is_inside.set()
            assert self.may_end.wait(60)
            return run(*args)

        return met

    def __enter__(self) -> None:
        self.thread = threading.Thread(target=self.step)
        self.thread.start()
        assert self.is_inside.wait(60)

    def __exit__(self, *_: object) -> None:
        self.may_end.set()
        self.thread.join()


def test_a_step_in_pieces_runs_beside_a_whole_one_in_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Naive: under the other thread's `fullgraph=True`, dynamo compiles nothing in any thread.

    The pieces then run plain, and hold as much as plain PyTorch.
    """
    model, beside = Halves(), Beside()
    plain = copy.deepcopy(model)
    planned(model, keep_nothing)
    assert_same_states(model, plain)

    whole, x = (
        planned(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), differentiate="all"),
        torch.randn(2, 3),
    )
    for place in (capture, tangents):
        monkeypatch.setattr(
            place, "compile_graph", lambda graph: beside.meets(executor.compile_graph(graph))
        )
    beside.step = lambda: whole(x).sum().backward()

    with beside:
        assert_same_states(model, plain)
        assert len(runner_of(model).last) == 2
    assert all(p.grad is not None for p in whole.parameters())


def test_pieces_that_torch_does_not_compile_are_an_error() -> None:
    """Another thread is in a user's function compiled with `fullgraph=True`.

    Until torch 2.14 dynamo then compiles nothing new in any thread.

    Naive: the step runs plain, above its budget.
    """
    model, x, beside = Halves(), batch(0), Beside()
    planned(model, keep_nothing)(x).backward()
    beside.step = partial(
        torch.compile(torch.sin, backend=lambda module, _: beside.meets(module), fullgraph=True),
        torch.ones(2),
    )

    is_a_setting_of_threads = torch.__version__ >= "2.15"  # then the pieces are compiled
    with (
        beside,
        (
            nullcontext()
            if is_a_setting_of_threads
            else pytest.raises(remat.TraceError, match="fullgraph=True")
        ),
    ):
        model(x)
        assert runner_of(model).last
    model(x).backward()


class LoopOfOperators(nn.Module):
    """A break in a loop whose body has nothing that dynamo compiles by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.linear(x).sin()
            torch._dynamo.graph_break()
        return x.sum()


def test_a_step_without_any_piece_says_why() -> None:
    """Naive: first "nothing to differentiate", then plain steps, silently above the budget."""
    model = planned(LoopOfOperators(), keep_nothing)
    for _ in range(2):
        with pytest.raises(
            remat.TraceError, match=r"graph break inside of a loop.*graph_break\(\)"
        ):
            model(batch(0))


def test_the_compile_backend_refuses_a_break() -> None:
    """It never learns where a step begins, so it can't plan pieces together."""
    step = torch.compile(Broken(), backend="remat", options={"budget": "60%", "costs": "flops"})
    with pytest.raises(Exception, match=r"remat\.checkpoint plans the pieces together"):
        step(batch(0))
