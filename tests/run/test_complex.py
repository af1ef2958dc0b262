"""Steps with complex numbers are equal to the bit and within the prediction, as real ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.tracers.calls import Call
from remat.tracers.cpu_workspace import formula_bytes
from remat.tracers.replay import workspace_of
from tests.support.planned import SCHEDULES, assert_same, call_of, keep_all, planned

pytestmark = pytest.mark.usefixtures("fresh_torch")
aten = torch.ops.aten


class Spectral(nn.Module):
    """A filter of frequencies, as in Fourier neural operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.randn(33, 64, dtype=torch.complex64) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.linear(x), dim=1) * self.weight
        loss: torch.Tensor = torch.fft.irfft(spectrum, dim=1, n=64).square().mean()
        return loss


def of_spectrum(h: torch.Tensor) -> torch.Tensor:
    power: torch.Tensor = torch.fft.irfft(h, n=16, dim=1).pow(2).mean()
    return power


# Readers of a spectrum, which set and resolve conjugate and negative bits in several places.
READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a conjugate is multiplied": lambda h: of_spectrum(h * h.conj()),
    "from polar": lambda h: of_spectrum(torch.polar(h.abs(), h.angle())),
    "a conjugate resolved": lambda h: torch.view_as_real(h.conj().resolve_conj()).pow(2).mean(),
    "a conjugate cloned": lambda h: (
        torch.view_as_real(h.conj().clone().resolve_conj()).sin().mean()
    ),
    "a negative resolved": lambda h: h.conj().imag.resolve_neg().sin().mean(),
    "a negative cloned": lambda h: (h.conj().imag.clone() * h.real).sin().mean(),
    "a conjugate in a product": lambda h: (h.mH @ h).abs().pow(2).mean(),
    "both": lambda h: (
        of_spectrum(torch.polar(h.abs(), h.angle()) * h.conj())
        + torch.view_as_real(h).pow(2).mean()
    ),
    "quotients": lambda h: ((h / (h.conj() + 3)).exp() * h).abs().mean(),
}


class Reads(nn.Module):
    def __init__(self, reader: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.reader = nn.Linear(64, 64), reader

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reader(torch.fft.rfft(self.linear(x), dim=1))


def assert_is_plain(plain: nn.Module, x: torch.Tensor, steps_of: Any) -> nn.Module:
    model = planned(copy.deepcopy(plain), steps_of)
    ends = []
    for each in (model, plain):
        each.zero_grad()
        loss = each(x)
        loss.backward()
        ends.append([loss.detach(), *(p.grad for p in each.parameters())])

    assert_same(*ends)
    return model


@pytest.mark.parametrize(
    ("reader", "schedule"),
    [
        *((reader, "anything again") for reader in READERS),
        ("both", "all kept"),
        ("both", "nothing kept"),
    ],
)
def test_conjugate_and_negative_bits_are_kept(reader: str, schedule: str) -> None:
    """Copies are dropped at the capture, before there is a schedule.

    Naive: a copy that resolves such a bit is dropped as one that changes nothing.
    """
    assert_is_plain(Reads(READERS[reader]), torch.randn(8, 16, 64), SCHEDULES[schedule])


@pytest.mark.parametrize("steps_of", SCHEDULES.values(), ids=SCHEDULES)
def test_a_filter_of_frequencies_equals_the_plain_one(steps_of: Any) -> None:
    """Naive: the product overwrites its input, and rounds differently from the plain one."""
    assert_is_plain(Spectral(), torch.randn(32, 64, 64), steps_of)


def test_complex_sums_may_overwrite_an_input_and_products_may_not() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(8, 8, dtype=torch.complex64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x) + self.b(x)
            loss: torch.Tensor = (h * self.b(x)).abs().mean()
            return loss

    model = assert_is_plain(Chain(), torch.randn(16, 8, dtype=torch.complex64), keep_all)
    step = call_of(model).pieces[0].step
    taking = {step.graph.operators[index].target for index, _ in step.in_place}
    is_complex = {op.target for op in step.graph.operators for v in op.writes
                  if step.graph.values[v].dtype == "complex64"}  # fmt: skip
    assert "aten.mul.Tensor" in is_complex
    assert taking & is_complex == {"aten.add.Tensor"}


class Layers(nn.Module):
    """Complex layers; their products read conjugates in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 128, dtype=torch.complex64)
        self.b = nn.Linear(128, 64, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        loss: torch.Tensor = self.b(torch.complex(h.real.relu(), h.imag.relu())).abs().mean()
        return loss


@pytest.mark.parametrize("budget", ["100%", "85%"])
def test_a_complex_models_peak_is_the_predicted_one(budget: str) -> None:
    """Equal but for the four bytes of the gradient that `loss.backward()` starts from."""
    model = remat.checkpoint(Layers(), budget, plan_cache=False, costs="flops", time_limit_s=2)
    model(torch.randn(512, 64, dtype=torch.complex64)).backward()
    report = remat.report(model)
    assert report.measured_peak_bytes is not None
    assert 0 <= report.solution.peak_bytes - report.measured_peak_bytes <= 4


def operands(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    left, right = torch.randn(64, 48, dtype=dtype), torch.randn(48, 40, dtype=dtype)
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "plain": lambda t: t,
        "conjugate": lambda t: t.conj(),
        "transposed": lambda t: t.mT.contiguous().mT,
        "adjoint": lambda t: t.mT.contiguous().mT.conj(),
    }
    return {f"{a} {b}": (f(left), g(right)) for a, f in forms.items() for b, g in forms.items()}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_a_product_of_conjugates_copies_what_is_predicted(dtype: torch.dtype) -> None:
    for name, (left, right) in operands(dtype).items():
        batch = (left.expand(3, *left.shape), right.expand(3, *right.shape))
        for target, args in ((aten.mm.default, (left, right)), (aten.bmm.default, batch)):
            if target is aten.bmm.default and not (left.is_conj() or right.is_conj()):
                continue

            dense = tuple(t.clone() if t.stride()[0] == 0 and not t.is_conj() else t for t in args)
            call = Call.made(target, dense, {}, target(*dense))
            assert formula_bytes(call) == workspace_of(call), (name, target)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_the_workspace_of_complex_elementwise_operators_is_the_allocators(
    dtype: torch.dtype,
) -> None:
    x, y = torch.randn(50, 40, dtype=dtype), torch.randn(50, 40, dtype=dtype)
    calls: list[tuple[Any, ...]] = [
        (getattr(aten, name).default, x) for name in ("abs", "angle", "exp", "neg", "sgn")
    ]
    for name in ("add", "sub", "mul", "div"):
        target = getattr(aten, name).Tensor
        calls += [(target, x, other) for other in (y, y.real.clone(), 2.0, 2, 2.0 + 1j)]
        calls += [(target, y.real.clone(), 2.0 + 1j)]

    for target, *args in calls:
        call = Call.made(target, args, {}, target(*args))
        assert formula_bytes(call) == workspace_of(call), str(call)


@pytest.mark.parametrize(
    ("reads", "schedule"),
    [
        *((reads, "nothing kept") for reads in ("clone", "a copying cast", "a sum", "a product")),
        ("clone", "all kept"),
        ("clone", "anything again"),
    ],
)
def test_readers_of_an_inference_tensor_are_kept(reads: str, schedule: str) -> None:
    """Autograd can't save an inference tensor for the backward, but it can save results of it."""
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "clone": lambda x: x.clone(),
        "a copying cast": lambda x: x.to(torch.float32, copy=True),
        "a sum": lambda x: x + 1,
        "a product": lambda x: x * 2,
    }

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.linear(ways[reads](x) * self.weight)
            return result.sin().pow(2).mean()

    with torch.inference_mode():
        x = torch.randn(4, 8)
    assert_is_plain(Net(), x, SCHEDULES[schedule])
