"""A step traced for a card that is not there has the kernels that the card chooses."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import remat
from remat.core.graph import Graph
from remat.core.operators import Operator


class Attention(nn.Module):
    """Two heads between a product and a sum."""

    def __init__(
        self,
        *,
        width: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        mask: torch.Tensor | None = None,
        kernel: SDPBackend | None = None,
    ) -> None:
        super().__init__()
        self.project = nn.Linear(32, 6 * width, dtype=dtype)
        self.width, self.mask, self.kernel = width, mask, kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).view(2, -1, 3, 2, self.width).unbind(2)
        q, k, v = (head.transpose(1, 2) for head in heads)
        attention = nn.functional.scaled_dot_product_attention
        with sdpa_kernel(self.kernel) if self.kernel else nullcontext():
            return attention(q, k, v, self.mask, dropout_p=0.125).float().sum()


def attention_of(graph: Graph) -> set[str]:
    return {op.target for op in graph.operators if "scaled_dot_product" in op.target}


@pytest.mark.parametrize(
    ("device", "dtype", "is_masked", "kernel"),
    [
        ("H100", torch.bfloat16, False, "cudnn"),
        ("A100", torch.bfloat16, False, "flash"),
        ("A100", torch.bfloat16, True, "efficient"),
        ("A100", torch.float32, False, "efficient"),
        ("T4", torch.float16, False, "efficient"),
    ],
)
def test_a_step_has_the_kernel_of_its_card(
    device: str, dtype: torch.dtype, is_masked: bool, kernel: str
) -> None:
    mask = torch.ones(16, 16, dtype=torch.bool).tril() if is_masked else None
    model = Attention(dtype=dtype, mask=mask)
    graph = remat.trace(model, (torch.randn(2, 16, 32, dtype=dtype),), device=device)
    name = f"aten._scaled_dot_product_{kernel}_attention"
    assert attention_of(graph) == {f"{name}.default", f"{name}_backward.default"}
    assert graph.device == "cuda"
    (backward,) = (op for op in graph.operators if op.target == f"{name}_backward.default")
    assert "another result at every run" in backward.pinned


@pytest.mark.parametrize("is_around", [True, False], ids=["around", "inside"])
def test_a_kernel_that_the_user_enables_is_traced(*, is_around: bool) -> None:
    """Naive: an H100 takes cuDNN's."""
    kernel = SDPBackend.EFFICIENT_ATTENTION
    model = Attention(kernel=None if is_around else kernel)
    x = torch.randn(2, 16, 32, dtype=torch.bfloat16)
    with sdpa_kernel(kernel) if is_around else nullcontext():
        graph = remat.trace(model, (x,), device="H100")
    name = "aten._scaled_dot_product_efficient_attention"
    assert attention_of(graph) == {f"{name}.default", f"{name}_backward.default"}


def test_strict_determinism_leaves_cudnn_out() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        graph = remat.trace(
            Attention(), (torch.randn(2, 16, 32, dtype=torch.bfloat16),), device="H100"
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all("flash" in target for target in attention_of(graph))


def test_narrow_heads_and_masks_are_padded_as_on_a_card() -> None:
    """Heads of 20 numbers to 24 for flash attention, rows of 20 in a mask to 32 for efficient."""
    x = torch.randn(2, 20, 32, dtype=torch.bfloat16)

    def paddings(model: nn.Module) -> list[int]:
        graph = remat.trace(model, (x,), device="A100")
        padded = [op for op in graph.operators if "constant_pad_nd" in op.target]
        return [graph.values[op.writes[0]].size_bytes for op in padded if op.phase == "forward"]

    rows = 2 * 2 * 20
    assert paddings(Attention(width=20)) == 3 * [-(-rows * 24 * 2 // 512) * 512]
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    assert paddings(Attention(mask=mask)) == [-(-20 * 32 * 2 // 512) * 512]


def statistics_bytes(graph: Graph) -> list[int]:
    (norm,) = (op for op in graph.operators if op.target.startswith("aten.native_layer_norm.d"))
    return [graph.values[value].size_bytes for value in norm.writes[1:]]


def test_norms_save_statistics_in_float32_on_a_card() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)).to(torch.bfloat16)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).float().sum()  # type: ignore[no-any-return]

    x = torch.randn(1024, 8, dtype=torch.bfloat16)
    assert statistics_bytes(remat.trace(Loss(), (x,), device="cpu")) == [2048, 2048]
    assert statistics_bytes(remat.trace(Loss(), (x,), device="H100")) == [4096, 4096]


class RMSNormed(nn.Module):
    """A norm between a product and a sum."""

    def __init__(self, dtype: torch.dtype, weight: torch.dtype | None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, dtype=dtype)
        self.norm = nn.RMSNorm(8, elementwise_affine=weight is not None, dtype=weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)).float().sum()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("fresh_torch")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(
    ("dtype", "weight", "is_fused"),
    [
        (torch.float32, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.bfloat16, None, True),
        (torch.bfloat16, torch.float32, False),
    ],
)
def test_rms_norm_is_one_operator_on_a_card_where_the_types_agree(
    dtype: torch.dtype, weight: torch.dtype | None, *, is_fused: bool
) -> None:
    x = torch.randn(1024, 8, dtype=dtype)

    def norms(device: str) -> list[Operator]:
        graphs[device] = remat.trace(RMSNormed(dtype, weight), (x,), device=device)
        return [op for op in graphs[device].operators if "_fused_rms_norm" in op.target]

    graphs: dict[str, Graph] = {}
    assert norms("cpu") == []
    found = norms("H100")
    assert bool(found) == is_fused
    if is_fused:
        forward, backward = found
        saved = {value: graphs["H100"].values[value].size_bytes for value in forward.writes}
        assert list(saved.values()) == [x.nbytes, 4 * 1024], "the statistics are in float32"
        assert set(backward.reads) >= {forward.reads[0], forward.writes[1]}
        assert forward.writes[0] not in backward.reads
