"""A step traced for a card that is not there has the kernels that the card chooses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.core.graph import Graph
from remat.core.operators import Operator
from remat.tracers.cuda_attention import chosen_kernel
from remat.tracers.devices import device as device_named
from tests.support.checkout import ROOT

NAMES = ("math", "flash", "efficient", "cudnn")  # in the order of torch's numbers
FACTS = (ROOT / "experiments" / "results" / "gpu_run.jsonl").read_text().splitlines()
H100 = device_named("H100")
CHOICES = [fact for fact in map(json.loads, FACTS) if "bool mask" in fact]
assert len(CHOICES) == 21, "three types in seven widths"


@pytest.mark.parametrize("fact", CHOICES, ids=lambda fact: f"{fact['dtype']}-{fact['width']}")
def test_the_kernel_is_the_one_that_an_h100_chose(fact: dict[str, Any]) -> None:
    dtype: torch.dtype = getattr(torch, fact["dtype"].removeprefix("torch."))
    query = torch.zeros(2, 4, 64, fact["width"], dtype=dtype)
    mask = torch.zeros(2, 1, 64, 64)

    for case in ("plain", "causal", "dropout"):
        assert chosen_kernel(H100, query, query, None) == NAMES[fact[case]], case
    for case in ("mask", "bool mask", "mask, dropout"):
        assert chosen_kernel(H100, query, query, mask) == NAMES[fact[case]], case

    grouped = chosen_kernel(H100, query, query[:, :2], None, enable_gqa=True)
    assert grouped == NAMES[fact["grouped"]]


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

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(32, 96, dtype=dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.project(x).view(2, 16, 3, 2, 16).unbind(2)
            q, k, v = (head.transpose(1, 2) for head in heads)
            attention = nn.functional.scaled_dot_product_attention
            return attention(q, k, v, mask, dropout_p=0.1).float().sum()

    graph = remat.trace(Attention(), (torch.randn(2, 16, 32, dtype=dtype),), device=device)
    name = f"aten._scaled_dot_product_{kernel}_attention"
    found = {op.target for op in graph.operators if "attention" in op.target}
    assert found == {f"{name}.default", f"{name}_backward.default"}
    assert graph.device == "cuda"
    (backward,) = (op for op in graph.operators if op.target == f"{name}_backward.default")
    assert "another result at every run" in backward.pinned


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
