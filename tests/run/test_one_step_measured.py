"""The measured peak is that of one step, whatever came before it, or none is reported."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn

import remat
from remat.run.measure import FirstStepMeter
from tests.support.planned import UNLIMITED, Given, call_of, keep_nothing

pytestmark = [
    pytest.mark.usefixtures("fresh_torch", "quick_first_step"),
    # torch 2.13 warns when `torch.compile` imports Inductor
    pytest.mark.filterwarnings("ignore:.torch.jit"),
]
WIDTH, ROWS = 32, 128


class Interrupts:
    """Raises what Ctrl-C raises, in the half that `where` names."""

    where = ""


@torch.library.custom_op("remat_tests::interruptible", mutates_args=())
def interruptible(x: torch.Tensor, half: str) -> torch.Tensor:
    if half == Interrupts.where:
        raise KeyboardInterrupt
    return x.clone()


@interruptible.register_fake
def _(x: torch.Tensor, half: str) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return interruptible(gradient, "backward"), None


interruptible.register_autograd(_backward)


class Net(nn.Module):
    def __init__(self, has_break: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.has_break = has_break

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin().exp()
        if self.has_break:
            torch._dynamo.graph_break()
        loss: torch.Tensor = interruptible(x, "forward").square().mean()
        return loss


@contextmanager
def interrupted(half: str) -> Iterator[None]:
    Interrupts.where = half
    try:
        with suppress(KeyboardInterrupt):
            yield
            pytest.fail("nothing was interrupted")
    finally:
        Interrupts.where = ""


def forward_only(model: nn.Module, x: torch.Tensor) -> None:
    """An evaluation that forgot `torch.no_grad`."""
    for _ in range(2):
        model(x)


def forward_that_is_kept(model: nn.Module, x: torch.Tensor) -> None:
    """Losses that a list holds on to."""
    model.__dict__["kept"] = [model(x), model(x)]


def error_in_the_forward(model: nn.Module, x: torch.Tensor) -> None:
    with interrupted("forward"):
        model(x)


def ctrl_c_in_the_backward(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x)
    with interrupted("backward"):
        loss.backward()


def ctrl_c_in_the_second_of_two(model: nn.Module, x: torch.Tensor) -> None:
    forward_only(model, x)
    ctrl_c_in_the_backward(model, x)


HISTORIES = [
    forward_only,
    forward_that_is_kept,
    error_in_the_forward,
    ctrl_c_in_the_backward,
    ctrl_c_in_the_second_of_two,
]


def planned(
    *, has_break: bool = False, executor: str = "eager", budget_bytes: int = UNLIMITED
) -> nn.Module:
    torch.manual_seed(0)
    solver = Given(keep_nothing)
    return remat.checkpoint(
        Net(has_break), budget_bytes, solver=solver, costs="flops", executor=executor
    )


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def train(model: nn.Module, num_steps: int = 3) -> None:
    for _ in range(num_steps):
        model.zero_grad()
        model(batch()).backward()


def measured(model: nn.Module) -> int | None:
    return remat.report(model).measured_peak_bytes


def true_peak(model: nn.Module) -> int:
    model.zero_grad()
    x = batch()
    held = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), x))
    return held + remat.measure(lambda: model(x).backward(), device="cpu").peak_bytes


@pytest.mark.parametrize(
    ("history", "has_break"),
    [
        *((history, False) for history in HISTORIES),
        (forward_that_is_kept, True),
        (ctrl_c_in_the_second_of_two, True),
    ],
)
def test_the_peak_is_that_of_one_step(
    history: Callable[[nn.Module, torch.Tensor], None], has_break: bool
) -> None:
    """Naive: the bytes of a forward without backward are added to another step's.

    Nothing notices when they are freed.
    """
    model = planned(has_break=has_break)
    if has_break:
        model(batch()).backward()  # finds the pieces
        model.zero_grad()
    history(model, batch())
    train(model)
    assert measured(model) == pytest.approx(true_peak(model), abs=8)


@pytest.mark.parametrize("has_break", [False, True])
def test_a_backward_belongs_to_its_own_forward(has_break: bool) -> None:
    """Of two forwards, the second is measured; the first backward does not belong to it."""
    model = planned(has_break=has_break)
    if has_break:
        model(batch()).backward()
        model.zero_grad()

    first, second = model(batch()), model(batch())
    first.backward()
    second.backward()
    assert measured(model) is None

    train(model)
    assert measured(model) == pytest.approx(true_peak(model), abs=8)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
def test_a_forward_without_backward_makes_no_new_plan() -> None:
    """Naive: the wrong peak leads to a new plan with less memory, which stays slower."""
    first = planned(executor="inductor")
    train(first)
    peak_bytes = remat.report(first).solution.peak_bytes  # the kernels hold less

    torch._dynamo.reset()
    model = planned(executor="inductor", budget_bytes=peak_bytes)
    ctrl_c_in_the_second_of_two(model, batch())
    (piece,) = call_of(model).pieces
    train(model)
    assert call_of(model).pieces == [piece]
    assert measured(model) == pytest.approx(true_peak(model), abs=64)


def test_garbage_of_an_interrupted_step_does_not_count() -> None:
    """What an error left in a cycle is collected at some time, but not in a measured step.

    Naive: it counts as memory that this step freed.
    """

    def meter_of(is_interrupted: bool) -> int | None:
        meter = FirstStepMeter("cpu", 0, 1)

        def fails(args: list[torch.Tensor]) -> list[torch.Tensor]:
            cycle: list[object] = [torch.empty(1 << 20)]
            cycle.append(cycle)
            raise KeyboardInterrupt

        def forward(args: list[torch.Tensor]) -> list[torch.Tensor]:
            made: list[object] = [[] for _ in range(100_000)]  # so many that a collection is due
            made.clear()
            return [torch.empty(4), torch.empty(1024)]

        if is_interrupted:
            with suppress(KeyboardInterrupt):
                meter.forward(fails)([])
        results = meter.forward(forward)([])
        meter.backward(lambda args: args.clear())(results[1:])
        return meter.peak_bytes

    alone = meter_of(False)
    assert alone is not None and meter_of(True) == alone
