"""Numbers that a forward reads off its tensors: one graph, and plain PyTorch's results."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import remat
from remat.core.operators import Phase
from tests.support.planned import assert_same

pytestmark = pytest.mark.usefixtures("fresh_torch")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.seen: list[float] = []


class Logs(Net):
    """Keeps what it reads, and computes nothing with it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        self.seen = [float(x.detach().sum()), x.detach().abs().max().item()]
        return x.square().mean()


class Computes(Net):
    """Scales, fills and adds with what it reads, between layers that are computed again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            norm = x.detach().norm().item()
            x = (layer(x) * norm).tanh() / (norm + 1.0) + torch.full_like(x, norm).sin()
        self.seen = [norm]
        return x.square().mean()


class ByHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(self.look)

    def look(self, module: nn.Module, args: object, out: torch.Tensor) -> None:
        self.seen = [out.detach().sum().item()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh().sin()
        return x.square().mean()


@pytest.mark.parametrize(
    ("make", "costs"),
    [(Logs, "flops"), (Computes, "flops"), (ByHook, "flops"), (Computes, "profile")],
)
def test_numbers_read_off_tensors_are_those_of_plain_pytorch(make: type[Net], costs: str) -> None:
    """Naive: a plan's time can't be measured, or the number is that of the first step."""
    plain = make()
    model = copy.deepcopy(plain)
    if make is ByHook:  # so that the hook is its own method
        model = make()
        model.load_state_dict(plain.state_dict())
    remat.checkpoint(model, "70%", costs=costs, time_limit_s=2)

    for seed in range(3):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))
        for each in (model, plain):
            each.zero_grad()
            each(x).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same(mine.grad, theirs.grad)
        assert model.seen == plain.seen and all(type(number) is float for number in model.seen)

    report = remat.report(model)
    assert not report.breaks and report.solution.overhead > 0
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.solution.peak_bytes <= report.budget_bytes


def test_a_tensor_whose_number_the_backward_reads_is_held_for_it() -> None:
    """Naive: the number is not a value of the graph, so no backward operator reads its tensor."""
    graph = remat.trace(Computes(), (torch.randn(64, 16),), costs="flops")
    norms = {i for i, value in enumerate(graph.values) if "linalg_vector_norm" in value.name}
    read = {value for op in graph.operators if op.phase is Phase.BACKWARD for value in op.reads}

    assert len(norms) == 4 and norms <= read
