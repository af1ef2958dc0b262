"""A step that `torch.compile` cuts into pieces is planned as one, and is the plain step."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.core.schedule import Schedule, simulate
from remat.face.planned_module import PlannedCall
from remat.pieces.joined_step import composed
from remat.pieces.runner import Piecewise
from remat.run import capture, executor
from remat.torch_border.modules import get_call
from tests.support.planned import UNLIMITED, Given, keep_nothing, planned

WIDTH, ROWS = 16, 256


pytestmark = pytest.mark.usefixtures("fresh_torch")


class Block(nn.Module):
    """Dropout, batch norm, and enough that is cheap to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.norm = (
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.2),
            nn.BatchNorm1d(WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        out: torch.Tensor = self.norm(x + self.dropout(hidden.sin() * hidden))
        return out


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[float] = []

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x).pow(2).mean()
        return out


class Broken(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x = self.blocks[1](x)
        torch._dynamo.graph_break()
        return self.loss(self.blocks[3](self.blocks[2](x)))


class Prints(Base):
    """Reads numbers off tensors.

    Python's own state changes at every step, and dynamo compiles anew.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        self.seen.append(x.abs().max().item())
        sys.stdout.write(f"{self.seen[-1]:.3f}")
        return self.loss(self.blocks[1](x))


class Loop(Base):
    """A break within a loop: dynamo gives the frame up, its other operators run eagerly.

    Blocks share their compiled code.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
            self.seen.append(float(x.detach().sum()))
        return self.loss(x.sin())


class InPlace(Base):
    """What a piece handed over, and what another one read, is changed afterwards, by a piece and by
    an eager operator.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        moved = (x + self.head.weight.sum()).sin()
        torch._dynamo.graph_break()
        x.mul_(0.5)
        x[:3] = 0
        torch._dynamo.graph_break()
        x = self.blocks[1](x + moved)
        torch.compiler.disable(x.mul_)(2.0)
        return self.loss(self.blocks[2](x))


class Buffer(Base):
    """A buffer that one piece reads and a later one changes."""

    count: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.blocks[0](x) + self.count).sin()
        torch._dynamo.graph_break()
        self.count.mul_(3).add_(1)
        torch._dynamo.graph_break()
        return self.loss(self.blocks[1](x) * self.count)


class Skips(Base):
    """Two pieces read what a third made: its gradient is a sum.

    A parameter that two pieces read.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        torch._dynamo.graph_break()
        second = self.blocks[1](first.sin())
        torch._dynamo.graph_break()
        return self.loss(self.blocks[0](second + first))


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(self.look)

    def look(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        torch._dynamo.graph_break()
        self.seen.append(out.detach().sum().item())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.blocks[2](self.blocks[1](self.blocks[0](x))))


class Random(Base):
    """Random numbers in pieces, and one that becomes a Python number.

    A piece whose backward computes nothing.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        scale = torch.rand(())
        torch._dynamo.graph_break()
        x = x + torch.randn_like(x)
        torch._dynamo.graph_break()
        return self.loss(self.blocks[1](x * scale))


class Views(Base):
    """Eager operators take part of what a piece made, keep a tensor for their own backward, and
    hold for a moment what no graph knows.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](x))
        part = torch.compiler.disable(
            lambda t: (t[1:] * 2).exp() + torch.stack([t[1:].detach()] * 10).mean(0)
        )(x)
        return self.loss(self.blocks[3](self.blocks[2](part)))


class ViewAfterwards(Base):
    """A piece reads what it was given, and later a view of it.

    A sum may not be made in its memory in between.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        moved = (x + self.head.weight.sum()).exp().mean()
        return self.loss(self.blocks[1](x[1:])) + moved


class Branches(Base):
    """Which block runs is decided by the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks[0](x)
        hidden = self.blocks[1](hidden) if x[0, 0] > 0 else self.blocks[2](hidden)
        return self.loss(self.blocks[3](hidden))


class ChangesOnOneBranch(Base):
    """One way of two changes what the first piece made and saved.

    Naively, it would copy only what changed in the step before.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.blocks[0](x)
        seen = (total * 2).exp().sin()
        if x[0, 0] > 0:
            total += x.detach()
        return self.loss(total * 3 + seen)


class ManyResults(Base):
    """A loss beside what a piece before it made, which gets no gradient of its own."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.blocks[0](x)
        torch._dynamo.graph_break()
        logits = self.head(self.blocks[1](hidden))
        return {"loss": logits.pow(2).mean(), "logits": logits, "hidden": hidden}


class Checked(Base):
    """A factor that is checked before the break: the check is an effect, with an order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](x))
        factor = torch.linalg.cholesky(x.mT @ x / ROWS + torch.eye(WIDTH))
        torch._dynamo.graph_break()
        determinant: torch.Tensor = factor.diagonal().log().sum()
        return self.loss(self.blocks[3](self.blocks[2](x))) + determinant


class Unused(Base):
    """A result that the loss does not need, of a head that has no other.

    Its gradient is none, not zeros.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x, unused = self.blocks[1](x), self.blocks[2](x)
        torch._dynamo.graph_break()
        self.seen.append(unused.sum().item())
        return self.loss(x)


MODELS: dict[str, Callable[[], Base]] = {
    m.__name__: m
    for m in (
        Broken,
        Prints,
        Loop,
        InPlace,
        Buffer,
        Skips,
        Hooked,
        Random,
        Views,
        ViewAfterwards,
        Checked,
        Unused,
        Branches,
        ChangesOnOneBranch,
        ManyResults,
    )
}


def batch(seed: int) -> torch.Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    x[0, 0] = 1.0 if seed % 2 else -1.0
    return x


def loss_of(result: Any) -> torch.Tensor:
    loss: torch.Tensor = result["loss"] if isinstance(result, dict) else result
    return loss


def state_after(model: nn.Module, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Runs a step; its loss, gradients and buffers, and the next random number."""
    model.zero_grad()
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    loss = loss_of(model(x))
    loss.backward()
    assert x.grad is not None
    gradients = [torch.empty(0) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [loss.detach(), torch.rand(1), x.grad, *gradients, *(b.clone() for b in model.buffers())]


def assert_same_states(model: nn.Module, plain: nn.Module, seed: int = 0) -> None:
    for ours, theirs in zip(
        state_after(model, batch(seed), seed), state_after(plain, batch(seed), seed), strict=True
    ):
        assert torch.equal(ours, theirs)


def runner_of(model: nn.Module) -> Piecewise:
    call = get_call(model)
    assert isinstance(call, PlannedCall)
    assert call.piecewise is not None
    return call.piecewise


def peak_of_a_step(model: nn.Module, x: torch.Tensor) -> int:
    """Measured from outside: allocated in a step, and what is there before it."""
    model.zero_grad()
    held = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers(), x))
    return remat.measure(lambda: loss_of(model(x)).backward(), device="cpu").peak_bytes + held


@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_pieces_is_the_plain_step(name: str) -> None:
    """Naive: what a later piece changes is read again; a piece's plan is that of its first run."""
    model, plain = MODELS[name](), MODELS[name]()
    plain.load_state_dict(model.state_dict())
    planned(model, keep_nothing)
    for seed in (0, 2, 1, 3) if name in ("Branches", "ChangesOnOneBranch") else (0, 2):
        got, expected = state_after(model, batch(seed), seed), state_after(plain, batch(seed), seed)
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.equal(ours, theirs)
    runner = runner_of(model)
    plan = runner.plan
    assert plan is not None
    assert len(plan.step.runs) > 1
    assert plan.solution.overhead > 0


@pytest.mark.parametrize(
    ("name", "budget", "num_steps"), [("Broken", "70%", 3), ("Views", "90%", 5)]
)
def test_all_pieces_stay_within_one_budget(name: str, budget: str, num_steps: int) -> None:
    """Naive: each piece has a budget of its own, in which it keeps everything.

    What runs between them is forgotten.
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
        assert "test_graph_breaks.py" in str(report)
        assert "3 compiled pieces under one budget" in str(report)
        joined = runner_of(model).joined
        assert joined is not None
        alone = [Schedule.keep_all(run.step.graph) for run in joined.runs]
        assert all(
            simulate(run.step.graph, own).peak_bytes <= report.solution.budget_bytes
            for run, own in zip(joined.runs, alone, strict=True)
        )
        # that is how wrong it is
        assert (
            simulate(joined.graph, composed(joined, alone)).peak_bytes
            > report.solution.budget_bytes
        )


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


def test_a_trace_of_what_needs_data_says_so() -> None:
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
        remat.BudgetError, match=r"known to suffice is.* it cuts at: .*graph_break\(\)"
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
        for ours, theirs in zip(
            state_after(model, x, seed), state_after(plain, x, seed), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_steps_in_pieces_that_overlap() -> None:
    """Each backward runs the halves of its own forward, though another forward came between."""
    model = Broken()
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
    """Naive: the plan of the first step, which found no gradients, serves those that add to
    them.
    """
    model, x = Broken(), batch(0)
    planned(model, keep_nothing)
    budgets = []
    for _ in range(3):
        model(x).backward()
        plan = runner_of(model).plan
        assert plan is not None
        budgets.append(plan.solution.budget_bytes)
    held = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert budgets == [UNLIMITED, UNLIMITED - held, UNLIMITED - held]


def test_what_is_reserved_on_a_gpu_is_not_the_steps() -> None:
    """What was there before the step, such as optimizer state, is no part of its measured peak.

    Naive: a step may hold the reserve too.
    """
    model, x = Broken(), batch(0)
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
    # planned again, below the peak of the one plan that is given
    with pytest.raises(remat.ScheduleError, match="exceeds the budget"):
        model(x)


def test_a_graph_of_pieces_that_is_kept_is_refused() -> None:
    model, x = Broken(), batch(0)
    planned(model, keep_nothing)
    for _ in range(2):
        with pytest.raises(remat.TraceError, match="retain_graph"):
            model(x).backward(retain_graph=True)


class Beside:
    """While it is entered, another thread is inside of `step`, where that runs what `meets`
    returned.
    """

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


def test_a_step_in_pieces_beside_a_whole_one_in_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Naive: `fullgraph=True`, below which dynamo compiles nothing, in any thread.

    The pieces ran plain, and held as much.
    """
    model, beside = Broken(), Beside()
    plain = copy.deepcopy(model)
    planned(model, keep_nothing)
    assert_same_states(model, plain)
    whole, x = (
        planned(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), differentiate="all"),
        torch.randn(2, 3),
    )
    monkeypatch.setattr(
        capture, "compile_graph", lambda graph: beside.meets(executor.compile_graph(graph))
    )
    beside.step = lambda: whole(x).sum().backward()
    with beside:
        assert_same_states(model, plain)
        assert len(runner_of(model).last) == 3
    assert all(p.grad is not None for p in whole.parameters())


def test_pieces_that_torch_does_not_compile_are_an_error() -> None:
    """Another thread is in a user's own function of `fullgraph=True`.

    Naive: the step runs plain, and above its budget.
    """
    model, x, beside = Broken(), batch(0), Beside()
    planned(model, keep_nothing)(x).backward()
    beside.step = partial(
        torch.compile(torch.sin, backend=lambda module, _: beside.meets(module), fullgraph=True),
        torch.ones(2),
    )
    with beside, pytest.raises(remat.TraceError, match="fullgraph=True"):
        model(x)
    model(x).backward()


class LoopOfOperators(nn.Module):
    """A break within a loop, and nothing in it that dynamo could compile by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.linear(x).sin()
            torch._dynamo.graph_break()
        return x.sum()


def test_a_step_without_any_piece_says_why() -> None:
    """Naive: at first "nothing to differentiate", then plain steps, above the budget, that nobody
    notices.
    """
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
