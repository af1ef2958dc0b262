"""Sizes that data decides, sparse and nested tensors: they cut the step or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from tests.support.planned import assert_same

pytestmark = pytest.mark.usefixtures("fresh_torch", "quick_first_step")


class Selects(nn.Module):
    """Selects rows by a mask, in some way."""

    def __init__(self, select: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.select = nn.Linear(8, 16), nn.Linear(16, 8), select

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.select(self, x, mask)


def deep(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = model.down(model.up(x).relu())
    return hidden


def first_rows(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    count = int(mask.sum().item())
    return deep(model, x)[:count].square().mean()


def repeated(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(deep(model, x), mask.long(), dim=0).square().mean()


PATTERNS: dict[str, Callable[..., torch.Tensor]] = {
    "of the loss": lambda s, x, mask: (deep(s, x) - x).pow(2)[mask].mean(),
    "of the input": lambda s, x, mask: deep(s, x[mask]).square().mean(),
    "to a known size": lambda s, x, mask: (s.up(x)[mask] + s.up(x)[:4]).square().mean(),
    "masked_select": lambda s, x, mask: deep(s, x).masked_select(mask[:, None]).square().mean(),
    "nonzero": lambda s, x, mask: deep(s, x)[mask.nonzero().squeeze(1)].square().mean(),
    "repeat_interleave": repeated,
    "a slice of a counted length": first_rows,
    "a mask made in the step": lambda s, x, mask: deep(s, x)[torch.ones(8) > 0].square().mean(),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_step_is_cut_where_data_decides_a_size(name: str) -> None:
    torch.manual_seed(0)
    plain = Selects(PATTERNS[name])
    model = remat.checkpoint(copy.deepcopy(plain), "100%", costs="flops", time_limit_s=5)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    masks = [torch.arange(8) % 2 == 0] * 2
    if name != "to a known size":  # other lengths than the first step's
        masks += [torch.arange(8) < 3]

    for mask in masks:
        for each in (model, plain):
            each.zero_grad()
            each(x, mask).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same(mine.grad, theirs.grad)

    report = remat.report(model)
    assert report.breaks and all("backend" not in place for place in report.breaks)
    sizes = [(value.size_bytes, *value.shape) for value in report.graph.values]
    assert all(type(size) is int for size in sum(sizes, ()))


def test_a_trace_names_the_operator_and_its_line() -> None:
    model = Selects(PATTERNS["masked_select"])
    with pytest.raises(remat.TraceError, match=r"masked_select \(test_sizes_data_decides.py:\d+"):
        remat.trace(model, (torch.ones(8, 8), torch.arange(8) > 3))


def test_sizes_that_are_known_do_not_cut_the_step() -> None:
    model = Selects(lambda s, x, mask: torch.where(mask[:, None], deep(s, x), 0.0).sum())
    remat.checkpoint(model, "100%", costs="flops")
    model(torch.ones(8, 8), torch.arange(8) > 3).backward()
    assert remat.report(model).num_pieces == 1


class MaskedGradient(torch.autograd.Function):
    """Selects the positive part of a gradient, whose size the data decides."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        positive = gradients[0][gradients[0] > 0]
        return gradients[0] + positive.sum()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # dynamo does
def test_a_size_that_data_decides_in_a_backward_is_refused() -> None:
    def select(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        passed: torch.Tensor = MaskedGradient.apply(deep(model, x))  # type: ignore[no-untyped-call]
        return passed.sum()

    model = remat.checkpoint(Selects(select), "100%")
    with pytest.raises(remat.TraceError, match=r"index|nonzero"):
        model(torch.ones(8, 8), torch.arange(8) > 3)


@pytest.mark.parametrize(
    ("model", "operator"),
    [
        (nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)), "embedding"),
        (nn.EmbeddingBag(8, 4, sparse=True, mode="sum"), "embedding_bag"),
    ],
    ids=["Embedding", "EmbeddingBag"],
)
def test_a_sparse_gradient_is_refused(model: nn.Module, operator: str) -> None:
    numbers = torch.randint(8, (4, 2))
    message = f"gradient of _?{operator}.* is sparse, .* build the embedding with sparse=False"
    with pytest.raises(remat.TraceError, match=message):
        remat.trace(model, (numbers,))
    with pytest.raises(remat.TraceError, match=message):
        remat.checkpoint(model, "100%")(numbers)


class OfAGraph(nn.Module):
    """Mixes nodes along the edges of a graph, whose matrix is sparse."""

    edges: torch.Tensor

    def __init__(self, edges: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("edges", edges)
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = torch.sparse.mm(self.edges, x)
        return mixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(self.before(x).relu())
        loss: torch.Tensor = self.after(mixed).relu().sum()
        return loss


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_sparse_buffer_is_held_and_cuts_the_step(layout: torch.layout) -> None:
    torch.manual_seed(0)
    edges = torch.eye(6).to_sparse(layout=layout)
    plain, model = OfAGraph(edges), OfAGraph(edges)
    model.load_state_dict(plain.state_dict())
    remat.checkpoint(model, "100%", costs="flops")
    x = torch.randn(6, 8)

    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            each(x).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same(mine.grad, theirs.grad)

    report = remat.report(model)
    parts = [value for value in report.graph.values if value.name == "edges"]
    assert len(report.breaks) == 1 and parts and all(part.size_bytes > 0 for part in parts)


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.layer(x).values().sum()
        return total


class MakesJagged(Jagged):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, 2, 6])
        return super().forward(torch.nested.nested_tensor_from_jagged(x, offsets))


def jagged() -> torch.Tensor:
    parts = [torch.randn(2, 4), torch.randn(4, 4)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("model", "make"), [(Jagged(), jagged), (MakesJagged(), lambda: torch.randn(6, 4))]
)
def test_nested_tensors_are_refused(model: nn.Module, make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(remat.TraceError, match=r"nested tensor|data decides"):
        remat.trace(model, (make(),))
    with pytest.raises(remat.TraceError, match=r"nested tensor|data decides"):
        remat.checkpoint(model, "100%")(make())


def test_a_backward_hook_that_leaves_no_piece_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    model[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    remat.checkpoint(model, "100%")
    with pytest.raises(remat.TraceError, match="backward hook, and 0 has one"):
        model(torch.ones(2, 4)).sum().backward()


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.last(self.second(self.first(x).tanh()).tanh()).square().sum()
        return loss


@pytest.mark.parametrize("register", ["full_backward_hook", "full_backward_pre_hook"])
def test_a_backward_hook_inside_of_a_step_runs(register: str) -> None:
    seen: list[list[torch.Tensor]] = [[], []]
    models = Hooked(), Hooked()
    for model, gradients in zip(models, seen, strict=True):
        hook = getattr(model.second, f"register_{register}")
        hook(lambda module, *given, gradients=gradients: gradients.append(given[-1][0]))

    remat.checkpoint(models[0], "100%", costs="flops")
    for model in models:
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 4)).backward()

    assert len(seen[0]) == 2
    assert_same(*seen)
