"""Numbers that change at every step cost one more plan through Inductor too.

Naive: each value is captured, planned and compiled on its own.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from tests.support.planned import COMPILES, call_of, state_after

pytestmark = [pytest.mark.usefixtures("fresh_torch", "quick_first_step"), *COMPILES]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.calls, self.scale, self.decay = 0, 1.0, 1.0

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(self.down(F.gelu(self.up(x))))


class Argument(Net):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return (self.body(x) * (1 - 0.013 * step)).square().mean() / (step + 2)


class Attributes(Net):
    """A float that is used and one that is only counted; both are computed in the step."""

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.calls += 1
        self.scale *= 0.9
        self.decay = self.decay * 0.5 + 0.125 * self.scale
        return (self.body(x) * self.scale / self.calls).square().mean()


class Checked(Net):
    """Beside the float, the step returns the token of an effect, Cholesky's check."""

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.scale *= 0.9
        x = self.body(x) * self.scale
        factor = torch.linalg.cholesky(x.mT @ x + torch.eye(32, dtype=x.dtype))
        loss: torch.Tensor = x.square().mean() + factor.diagonal().log().sum()
        return loss


class CutAndChecked(Checked):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        loss = super().forward(x, step)
        torch._dynamo.graph_break()
        return self.body(x).square().mean() + loss


class Unused(Net):
    """No operator on tensors reads the float."""

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.scale *= 0.9
        return self.body(x).square().mean()


class Cut(Net):
    """A float and an int on both sides of a graph break."""

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.calls += 1
        self.scale *= 0.9
        x = self.body(x) * self.scale / self.calls
        torch._dynamo.graph_break()
        return (self.body(x * self.calls) * self.scale).square().mean()


class CutAndUnused(Unused):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.scale *= 0.9
        x = self.body(x)
        torch._dynamo.graph_break()
        return self.body(x).square().mean()


@pytest.mark.parametrize(
    "make", [Argument, Attributes, Checked, Unused, Cut, CutAndChecked, CutAndUnused]
)
def test_a_changing_number_costs_one_more_plan(make: type[Net]) -> None:
    model = make().double()
    plain = copy.deepcopy(model)
    remat.checkpoint(
        model,
        "100%",
        executor="inductor",
        costs="roofline",
        time_limit_s=0.5,
        plan_cache=False,
    )
    call = call_of(model)

    counts = []
    for step in range(4):
        x = torch.randn(64, 32, dtype=torch.float64)
        got, wanted = (state_after(each, x, step) for each in (model, plain))
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)
        numbers = [(each.calls, each.scale, each.decay) for each in (model, plain)]
        assert numbers[0] == numbers[1]
        counts.append(len(call.piecewise.plans) if call.piecewise else len(call.pieces))

    if torch.__version__ >= "2.13":  # before that dynamo may capture each value
        assert counts[-1] == counts[1] <= 2, counts
    report = remat.report(model)
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.budget_bytes
    if make in (Argument, Attributes, Checked, Unused):
        assert report.measured_peak_bytes == report.kernels_peak_bytes
