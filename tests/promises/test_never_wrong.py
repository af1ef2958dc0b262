"""What existing tools get silently wrong, one test each.

The planned step is right, and without our protection it is not.

Each test runs the same comparison twice: as it is, and on the naive implementation, which is ours
with one protection taken out. The second run must fail, so that the comparison is known to see the
mistake."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import nn

import remat
from remat.inductor import backend
from remat.run import capture, rewrite
from remat.run import executor as eager_executor
from remat.tracers import aot, cleaning, recomputable
from tests.support.planned import (
    COMPILES,
    UNLIMITED,
    ChangedBuffer,
    Steps,
    assert_same,
    call_of,
    keep_all,
    keep_nothing,
    on_both_executors,
    planned,
    reference,
    state_after,
)

Check = Callable[[], None]


pytestmark = pytest.mark.usefixtures("fresh_torch")


def assert_only_naive_is_wrong(
    check: Check, monkeypatch: pytest.MonkeyPatch, *naive: tuple[Any, str, Any]
) -> None:
    """`check` passes, and fails with each (owner, name, value) of `naive` patched in."""
    check()
    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        for owner, name, value in naive:
            patch.setattr(owner, name, value)
        with pytest.raises((AssertionError, RuntimeError)):
            check()


def same_as_plain(
    make: Callable[[], nn.Module],
    x: torch.Tensor,
    steps_of: Steps = keep_nothing,
    executor: str = "eager",
    draws: bool = False,
) -> Check:
    """Returns a check that two planned steps leave what the plain ones do.

    Through Inductor, a model that draws random numbers is compared with `torch.compile`, which
    draws other numbers than plain PyTorch.
    """

    def check() -> None:
        torch.manual_seed(0)
        model = make()
        plain = reference(copy.deepcopy(model), executor if draws else "eager")
        planned(model, steps_of, executor=executor)

        for seed in (1, 2):
            assert_same(
                state_after(model, x.clone(), seed=seed),
                state_after(plain, x.clone(), seed=seed),
                executor=executor,
            )
        assert call_of(model).pieces

    return check


class Dropouts(nn.Module):
    """Every way to draw numbers in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rrelu = nn.Linear(8, 8), nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.linear(x).sin(), 0.3)
        hidden = self.rrelu(hidden + torch.randn_like(hidden) * torch.rand(8))
        hidden = F.alpha_dropout(hidden.sin(), 0.2) * torch.bernoulli(hidden.sigmoid())
        hidden = F.scaled_dot_product_attention(
            hidden[None], hidden[None], hidden[None], dropout_p=0.2
        )
        return hidden.sin().pow(2).sum()


@on_both_executors
def test_dropout_is_replayed(monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    """Naive: a recomputed dropout draws a new mask, or a recomputed kernel makes new seeds.

    `activation_memory_budget` of PyTorch 2.13 draws new masks.
    """

    def draw_anew(
        operator: Any, state: torch.Tensor, device: torch.device, /, *args: Any, **kwargs: Any
    ) -> Any:
        return operator(*args, **kwargs)

    check = same_as_plain(Dropouts, torch.randn(4, 8), executor=executor, draws=True)
    naive = {
        "eager": (rewrite, "replay", draw_anew),
        "inductor": (aot, "is_random", lambda _: False),
    }
    assert_only_naive_is_wrong(check, monkeypatch, naive[executor])


@on_both_executors
def test_a_buffer_is_read_as_it_was_before_it_changed(
    monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """Naive: the recomputation reads the changed buffer, as Inductor's does by default (2.13)."""
    check = same_as_plain(ChangedBuffer, torch.randn(4, 8), executor=executor)
    assert_only_naive_is_wrong(
        check, monkeypatch, (rewrite._Writer, "_replacements", lambda *_: {})
    )


class Counted(nn.Module):
    """Batch norm with running statistics, and a counter of its calls."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss: torch.Tensor = self.norm(self.linear(x)).sin().pow(2).sum() * self.calls
        return loss


def repeat_changes(graph: remat.Graph) -> list[int]:
    """Repeats each change of a buffer, new value included, where the graph allows it."""
    steps: list[int] = []
    for index, op in enumerate(graph.operators):
        steps.append(index)
        if op.target == "aten.copy_.default" and op.is_recomputable:
            steps += [graph.producer[op.reads[-1]], index]
    return steps


@on_both_executors
def test_buffers_change_once_a_step(monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    """Naive: a change of a buffer may be computed again, from the changed buffer."""
    check = same_as_plain(Counted, torch.randn(4, 8), repeat_changes, executor)
    if executor == "inductor":  # no operator of a half sees what another changed
        check()
        return

    assert_only_naive_is_wrong(
        check,
        monkeypatch,
        (aot, "pinned_reason", lambda *_: ""),
        (rewrite._Writer, "_replacements", lambda *_: {}),
    )


@torch.library.custom_op("remat_tests::ticket", mutates_args=())
def ticket(x: torch.Tensor) -> torch.Tensor:
    """Adds another number at each call: an effect, and not deterministic."""
    _TICKETS.append(len(_TICKETS))
    return x + len(_TICKETS)


@ticket.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_TICKETS: list[int] = []


class TakesTickets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        number: torch.Tensor = torch.ops.remat_tests.ticket(hidden.detach())
        loss: torch.Tensor = (hidden * number.sin()).sin().sum()
        return loss


@on_both_executors
def test_a_custom_operator_runs_once(monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    """Naive: every operator may be computed again.

    Its effect would happen twice, and its second result would differ.
    """

    def check() -> None:
        _TICKETS.clear()
        planned(TakesTickets(), executor=executor)(torch.randn(4, 8)).backward()
        assert len(_TICKETS) == 1

    assert_only_naive_is_wrong(check, monkeypatch, (aot, "pinned_reason", lambda *_: ""))


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


class Reduces(nn.Module):
    """A statistic over all ranks scales what each computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).sin()
        mean: torch.Tensor = collectives.all_reduce(hidden.detach().mean(0), "sum", [0])
        loss: torch.Tensor = (hidden * mean.sin()).sin().sum()
        return loss


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore")  # torch's own, about collectives under compilation
@on_both_executors
def test_a_collective_runs_once(monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    """Naive: every operator may be computed again.

    Ranks whose plans differ would then wait for each other forever.
    """

    def check() -> None:
        model = planned(Reduces(), executor=executor)
        model(torch.randn(4, 8)).backward()
        halves = call_of(model).pieces[0].split
        names = [
            str(node.target)
            for half in (halves.forward, halves.backward)
            for node in half.graph.nodes
        ]

        assert sum("all_reduce" in name for name in names) == 1
        assert len(names) > len(call_of(model).pieces[0].step.nodes)  # something was computed again

    assert_only_naive_is_wrong(check, monkeypatch, (aot, "pinned_reason", lambda *_: ""))


class Scatters(nn.Module):
    """Adds rows of one tensor where an index says; CUDA uses atomics, in no fixed order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).sin()
        loss: torch.Tensor = torch.zeros(3, 8).index_add(0, index, hidden).sin().sum()
        return loss


def test_a_kernel_that_is_not_deterministic_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: every operator may be computed again.

    The gradient would then belong to other values than the loss. The node states the reason.
    """
    args = (torch.randn(4, 8), torch.tensor([0, 1, 1, 2]))
    on_cpu = remat.trace(Scatters(), args, costs="flops", device="cpu")
    assert not any(op.pinned for op in on_cpu.operators if "index_add" in op.target)

    def check() -> None:
        graph = remat.trace(Scatters(), args, costs="flops", device="H100")
        times = Counter(keep_nothing(graph))
        assert max(times.values()) > 1
        for index, op in enumerate(graph.operators):
            if "index_add" in op.target:
                assert times[index] == 1
                assert op.pinned == "its CUDA kernel gives another result at every run"

    assert_only_naive_is_wrong(
        check, monkeypatch, (recomputable, "is_nondeterministic", lambda *_: False)
    )


class Item(nn.Module):
    """Scales by a number that Python reads off a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.linear(x).sin(), 0.5)
        return (hidden.sin() * hidden.detach().max().item()).sin().sum()


@pytest.mark.parametrize(
    ("executor", "dtype"),
    [
        ("eager", torch.float32),
        ("eager", torch.bfloat16),
        pytest.param("inductor", torch.float32, marks=COMPILES),
    ],
    ids=str,
)
def test_a_number_read_off_a_tensor_is_that_of_each_step(executor: str, dtype: torch.dtype) -> None:
    """Naive: `item` is traced as the number that it was in the first step.

    The second step, with another seed, shows it.
    """
    x = torch.randn(4, 8, dtype=dtype)
    same_as_plain(lambda: Item().to(dtype), x, executor=executor, draws=True)()


def test_the_step_stays_within_the_simulated_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: values live as long as their Python names.

    So they do in a module's `forward`, and in `fx.Interpreter` by default.
    """

    def check() -> None:
        torch.manual_seed(0)
        model, x = (
            nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]),
            torch.randn(64, 64),
        )
        planned(model, differentiate="all")
        model(x).sum().backward()

        piece = call_of(model).pieces[0]
        assert (piece.meter.peak_bytes or UNLIMITED) <= piece.solution.peak_bytes

    assert_only_naive_is_wrong(
        check, monkeypatch, (eager_executor._Source, "_delete", lambda *_: None)
    )


class Aliases(nn.Module):
    """Returns its input, a view of it, and copies that change nothing; its layers are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = x.sin() @ self.token.weight.t()
        loss = (hidden @ self.head.weight).sin().sum()
        return {
            "loss": loss,
            "input": x,
            "view": x[:2],
            "copy": x.clone(),
            "hidden": hidden.detach(),
            "same": hidden.detach().clone(),
        }


@on_both_executors
def test_outputs_share_memory_where_plain_ones_do(
    monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """Naive: a copy that changes nothing is dropped wherever it is.

    Writing into one output then changes the other.
    """

    def check() -> None:
        torch.manual_seed(0)
        model, x = Aliases(), torch.randn(4, 8)
        plain = copy.deepcopy(model)
        planned(model, executor=executor)

        ends = []
        for each in (model, plain):
            out = each(given := x.clone())
            out["loss"].backward()
            out["copy"].zero_()
            out["same"].zero_()

            ends.append(
                (
                    out,
                    given,
                    each.head.weight.grad,
                    out["input"] is given,
                    out["view"].data_ptr() == given.data_ptr(),
                )
            )

        assert_same(*ends, executor=executor)

    assert_only_naive_is_wrong(
        check, monkeypatch, (cleaning, "_would_share_a_result", lambda *_: False)
    )


class Sines(nn.Module):
    """Its backward overwrites what it saved with the cosine of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.linear(self.linear(x).sin()).sin().sum()
        return loss


@on_both_executors
def test_a_second_backward_is_refused(monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    """Naive: the backward runs as often as it is asked to.

    Autograd then blames the user for values that the first run overwrote.
    """

    def check() -> None:
        torch.manual_seed(0)
        model, x = Sines(), torch.randn(4, 8)
        plain = copy.deepcopy(model)
        planned(model, keep_all, executor=executor)

        ends = []
        for each in (model, plain):
            loss = each(x)
            try:
                loss.backward(retain_graph=True)
                loss.backward()
            except remat.TraceError as error:
                assert "retain_graph" in str(error)  # noqa: PT017  # refused is as good as right
                return
            ends.append([p.grad for p in each.parameters()])

        assert_same(*ends)

    owner = {"eager": capture, "inductor": backend}[executor]
    assert_only_naive_is_wrong(
        check, monkeypatch, (owner, "runs_once", lambda backward, *_: backward)
    )


class TwoLosses(nn.Module):
    """Two losses with a shared body and one head each."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x).tanh()
        return self.first(hidden).square().mean(), self.second(hidden).square().mean()


@on_both_executors
def test_the_head_of_the_other_loss_has_no_gradient(
    monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """Naive: autograd fills in zeros for the other loss, and its head gets gradients of zeros.

    An optimizer's weight decay would then change the head.
    """

    def check() -> None:
        plain = TwoLosses()
        model = planned(copy.deepcopy(plain), executor=executor)
        for which in (0, 1, 0):
            for each in (model, plain):
                each.zero_grad()
                each(torch.ones(4, 8))[which].backward()

            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None)
                assert_same(mine.grad, theirs.grad, executor=executor)

    assert_only_naive_is_wrong(
        check, monkeypatch, (capture, "keep_missing_gradients", lambda _: None)
    )
