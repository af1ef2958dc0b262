"""Operands that Inductor pads, as on a GPU, are padded once, and the plan knows of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._inductor.fx_passes import pad_mm
from torch.fx.experimental.proxy_tensor import make_fx

import remat
from remat.inductor import backend, fused_pieces
from remat.inductor.paddings import pads_products, share_paddings
from tests.support.planned import COMPILES

aten = torch.ops.aten
pytestmark = COMPILES
_MULTIPLE = 4  # float32 sizes that are a multiple of it need no padding


def both_products(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
    """A head's backward, padded by hand: by columns for one product, by rows for the other."""
    of_weight = F.pad(gradient.t(), (0, 0, 0, 3)) @ x
    of_x = F.pad(gradient, (0, 3)) @ F.pad(weight, (0, 0, 0, 3))
    return of_weight[:5], of_x


def traced(function: Any, *tensors: torch.Tensor) -> fx.GraphModule:
    return make_fx(
        function, decomposition_table={aten.t.default: lambda x: x.permute(1, 0)},
        tracing_mode="fake",
    )(*tensors)  # fmt: skip


def count(module: fx.GraphModule, target: Any) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


def test_an_operand_of_two_products_is_padded_once() -> None:
    tensors = torch.randn(6, 5), torch.randn(6, 4), torch.randn(5, 4)
    joint = traced(both_products, *tensors)
    expected = joint(*tensors)
    assert count(joint, aten.constant_pad_nd.default) == 3

    share_paddings(joint)
    assert count(joint, aten.constant_pad_nd.default) == 2
    for found, wanted in zip(joint(*tensors), expected, strict=True):
        assert torch.equal(found, wanted)

    for node in joint.graph.nodes:
        if node.op == "call_function":
            assert node.meta["val"].shape and node.meta["val"].device.type == "cpu"
    joint.graph.lint()


def test_paddings_of_other_values_or_sides_are_not_shared() -> None:
    def function(x: torch.Tensor) -> Any:
        sides = F.pad(x, (0, 3)), F.pad(x, (3, 0)), F.pad(x, (0, 3), value=1.0)
        return (*sides, F.pad(x.permute(1, 2, 0), (1, 2, 0, 0, 3, 4)))

    x = torch.randn(2, 3, 4)
    joint = traced(function, x)
    expected = joint(x)
    share_paddings(joint)
    assert count(joint, aten.constant_pad_nd.default) == 4
    assert all(map(torch.equal, joint(x), expected))


def test_the_users_own_paddings_keep_their_memory() -> None:
    """Naive: two results share memory, and a padded transpose has other strides."""

    def function(x: torch.Tensor) -> Any:
        return F.pad(x, (0, 1)), F.pad(x, (0, 1)), F.pad(x.permute(1, 0), (2, 2))

    joint = traced(function, torch.randn(4, 5))
    before = [node.meta["val"].stride() for node in joint.graph.output_node().all_input_nodes]
    share_paddings(joint)
    after = joint.graph.output_node().all_input_nodes
    assert len(after) == 3
    assert [node.meta["val"].stride() for node in after] == before


def test_views_of_a_padded_result_have_its_strides() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ F.pad(weight, (0, 3)))[:, :5].view(2, 3, 5)

    tensors = torch.randn(6, 4), torch.randn(4, 5)
    joint = traced(function, *tensors)
    view = joint.graph.find_nodes(op="call_function", target=aten.view.default)[0]
    right = view.meta["val"]
    view.meta["val"] = torch.empty_like(right, memory_format=torch.contiguous_format)
    share_paddings(joint)
    assert view.meta["val"].stride() == right.stride() == (24, 8, 1)


def test_only_paddings_of_products_count() -> None:
    x = torch.randn(4, 5)
    assert pads_products(traced(lambda x: F.pad(x, (0, 3)) @ torch.ones(8, 2), x).graph)
    assert pads_products(traced(lambda x: F.pad(x, (0, 3)).t().mm(x), x).graph)
    assert not pads_products(traced(lambda x: F.pad(x, (0, 3)).sum(), x).graph)


class Head(nn.Module):
    """Layers, and a head whose number of classes is not a multiple of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))
        self.head = nn.Linear(128, 501, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The cross entropy of the next word."""
        for layer in self.layers:
            x = F.gelu(layer(x), approximate="tanh")
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(self.head(x).view(-1, 501), shifted.reshape(-1))


class CutHead(Head):
    """The same model in two pieces."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The cross entropy, after a graph break."""
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return super().forward(x, labels)


@pytest.fixture
def _pads_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Inductor pad products, as it does on a GPU where that is faster."""

    def should_pad(match: Any, left: Any, right: Any, op: Any, **_: Any) -> bool:
        del match, op
        return any(size % _MULTIPLE for size in (*left.shape, *right.shape))

    monkeypatch.setattr(pad_mm, "should_pad", should_pad)


@pytest.mark.usefixtures("fresh_torch", "_pads_on_a_cpu")
@pytest.mark.parametrize(("make", "budget"), [(Head, "100%"), (Head, "75%"), (CutHead, "100%")])
def test_a_padded_head_holds_what_its_plan_predicts(make: type[Head], budget: str) -> None:
    """Naive: the gradient of its result is held three times; plans are refused or made again."""
    torch.manual_seed(0)
    model, plain = make(), make()
    plain.load_state_dict(model.state_dict())
    x, labels = torch.randn(8, 64, 128), torch.randint(0, 501, (8, 64))

    remat.checkpoint(model, budget, executor="inductor", costs="roofline", time_limit_s=1)
    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            each(x, labels).backward()

    report = remat.report(model)
    assert any("constant_pad_nd" in op.target for op in report.graph.operators)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)

    assert report.kernels_peak_bytes is not None
    assert report.kernels_peak_bytes <= report.budget_bytes
    assert report.kernels_peak_bytes == pytest.approx(report.solution.peak_bytes, rel=0.01)


@pytest.mark.usefixtures("fresh_torch", "idle_kernels", "_pads_on_a_cpu")
def test_a_head_that_is_padded_twice_would_hold_more(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    for is_naive in (False, True):
        torch._dynamo.reset()
        if is_naive:
            for module in (backend, fused_pieces):
                monkeypatch.setattr(module, "share_paddings", lambda _: None)

        model = remat.checkpoint(Head(), "64MiB", executor="inductor", costs="flops")
        model(torch.randn(8, 64, 128), torch.zeros(8, 64, dtype=torch.long)).backward()
        peaks.append(remat.report(model).kernels_peak_bytes or 0)

    assert peaks[1] - peaks[0] > 0.9 * 8 * 64 * 501 * 4
