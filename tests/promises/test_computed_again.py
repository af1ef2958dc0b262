"""What existing tools get silently wrong where values are computed again, one test each.

The planned step is right, and without our protection it is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import nn

import remat
from remat.run import rewrite
from remat.tracers import aot, recomputable
from tests.support.planned import ChangedBuffer, call_of, keep_nothing, on_both_executors, planned
from tests.support.protections import assert_only_naive_is_wrong, same_as_plain

pytestmark = pytest.mark.usefixtures("fresh_torch")


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
        (piece,) = call_of(model).pieces
        halves = piece.split
        names = [
            str(node.target)
            for half in (halves.forward, halves.backward)
            for node in half.graph.nodes
        ]

        assert sum("all_reduce" in name for name in names) == 1
        assert piece.solution.schedule is not None
        assert piece.solution.schedule.num_recomputations > 0

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


class Puts(nn.Module):
    """Puts rows of one tensor where an index says, and adds them there or not."""

    def __init__(self, *, accumulate: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear, self.accumulate = nn.Linear(8, 8, dtype=dtype), accumulate

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).sin()
        hidden = torch.zeros_like(hidden).index_put((index,), hidden, accumulate=self.accumulate)
        loss: torch.Tensor = hidden.sin().square().sum()
        return loss


@pytest.mark.parametrize(
    ("accumulate", "dtype", "is_pinned"),
    [(True, torch.float32, True), (False, torch.float32, False), (True, torch.float64, False)],
)
def test_what_threads_add_runs_once(accumulate: bool, dtype: torch.dtype, is_pinned: bool) -> None:
    """On a CPU, threads add float32 numbers by atomics, so a second sum may differ."""
    args = (torch.randn(4, 8, dtype=dtype), torch.tensor([0, 1, 1, 2]))
    graph = remat.trace(Puts(accumulate=accumulate, dtype=dtype), args, costs="flops", device="cpu")
    puts = [op for op in graph.operators if "index_put" in op.target]
    assert puts
    assert all(bool(op.pinned) is is_pinned for op in puts)
