"""Masks stored as numbers of one byte: the same step, without booleans in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import remat
from remat.inductor import backend, fused_pieces
from remat.inductor.byte_masks import store_masks_as_bytes
from remat.inductor.compiled_halves import CompiledHalves
from remat.inductor.realize import values_to_realize
from tests.support.planned import COMPILES

aten = torch.ops.aten
pytestmark = COMPILES

X, DRAWN = torch.randn(16, 16), torch.rand(16, 16)


def dropped(x: torch.Tensor, drawn: torch.Tensor) -> Any:
    mask = drawn > 0.5
    return mask * x, torch.where(mask, x, 1.0)


def traced(function: Callable[..., Any]) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(X, DRAWN)


def dtypes(graph: fx.Graph) -> list[torch.dtype]:
    return [node.meta["val"].dtype for node in graph.nodes if node.op == "call_function"]


def test_only_the_number_of_one_byte_is_left_to_store() -> None:
    joint = traced(dropped)
    expected = joint(X, DRAWN)
    (mask,) = joint.graph.find_nodes(op="call_function", target=aten.gt.Scalar)
    mask.meta["stack_trace"] = "the line of the dropout"
    store_masks_as_bytes(joint)
    joint.graph.lint()

    for found, wanted in zip(joint(X, DRAWN), expected, strict=True):
        assert torch.equal(found, wanted)
    assert dtypes(joint.graph).count(torch.int8) == 1

    (stored,) = values_to_realize(joint.graph, frozenset(), 0)
    assert stored.meta["val"].dtype is torch.int8
    assert stored.meta["stack_trace"] == "the line of the dropout", "as the report names it"


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, drawn: (drawn > 0.5) * x, id="read once"),
        pytest.param(lambda x, drawn: (drawn > 0.5, (drawn > 0.5) * x), id="returned"),
        pytest.param(
            lambda x, drawn: ((mask := drawn > 0.5) * x, mask.sum()), id="read by a reduction"
        ),
        pytest.param(
            lambda x, _: ((mask := torch.arange(16)[:, None] >= torch.arange(16)) * x, mask * -x),
            id="made from less",
        ),
    ],
)  # fmt: skip
def test_other_masks_are_left_alone(function: Callable[..., Any]) -> None:
    joint = traced(function)
    store_masks_as_bytes(joint)
    assert torch.int8 not in dtypes(joint.graph)


class Dropping(nn.Module):
    """Dropout of activations and of attention."""

    def __init__(self, dtype: torch.dtype, *, is_cut: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.dtype, self.is_cut = dtype, is_cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.gelu(self.first(x)).to(self.dtype), 0.3).float()
        if self.is_cut:
            torch._dynamo.graph_break()
        x = F.dropout(F.gelu(self.second(x)).to(self.dtype), 0.3).float()
        heads = x.view(8, 4, 16, 8)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).square().mean()


@pytest.mark.usefixtures("fresh_torch", "vector_kernels")
@pytest.mark.parametrize(
    ("dtype", "is_cut"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)],
    ids=["float32", "bfloat16", "in pieces"],
)
def test_a_step_with_dropout_is_the_same(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_cut: bool
) -> None:
    """The same gradients to the bit and the same peak; the backward gets no boolean."""
    given: list[torch.dtype] = []
    compiled = CompiledHalves.compile

    def compile_half(
        self: CompiledHalves, graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        if kwargs.get("is_backward"):
            given.extend(each.dtype for each in inputs if isinstance(each, torch.Tensor))
        return compiled(self, graph, inputs, **kwargs)

    monkeypatch.setattr(CompiledHalves, "compile", compile_half)
    torch.manual_seed(0)
    model, x = Dropping(dtype, is_cut=is_cut), torch.randn(8, 16, 32)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    found = []
    for stores_bytes in (True, False):
        torch._dynamo.reset()
        given.clear()
        if not stores_bytes:
            for module in (backend, fused_pieces):
                monkeypatch.setattr(module, "store_masks_as_bytes", lambda _: None)

        model = Dropping(dtype, is_cut=is_cut)
        model.load_state_dict(state)
        remat.checkpoint(model, "80%", executor="inductor", costs="flops", plan_cache=False)
        torch.manual_seed(1)
        loss = model(x)
        loss.backward()

        assert (torch.bool in given) is not stores_bytes
        peak_bytes = remat.report(model).kernels_peak_bytes
        found.append((peak_bytes, loss.detach(), [p.grad for p in model.parameters()]))

    (ours, loss, gradients), (theirs, plain_loss, plain_gradients) = found
    assert ours == theirs
    assert torch.equal(loss, plain_loss)
    for gradient, wanted in zip(gradients, plain_gradients, strict=True):
        assert gradient is not None and wanted is not None
        assert torch.equal(gradient, wanted)
