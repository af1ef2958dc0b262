"""The graph of a step as a card would run it, traced without the card."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import remat
from remat.cli.commands import app
from remat.fit.question import Question
from remat.tracers import retarget
from remat.tracers.devices import device as device_named

pytestmark = [
    pytest.mark.usefixtures("fresh_torch"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here"),
]


class Net(nn.Sequential):
    """A norm, and dropout, whose kernels differ on a card."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(33, 65), nn.LayerNorm(65), nn.Dropout(0.1), nn.Linear(65, 1), nn.Flatten(0)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x).pow(2).mean()  # type: ignore[no-untyped-call]
        return loss


class Cut(Net):
    """The same step, which `torch.compile` cuts in two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear, norm, dropout, last, flat = self
        hidden = dropout(norm(linear(x)))
        torch._dynamo.graph_break()
        loss: torch.Tensor = flat(last(hidden)).pow(2).mean()
        return loss


X = torch.randn(7, 33)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_the_graph_is_the_one_that_remat_fits_plans(autocast: torch.dtype | None) -> None:
    traced = remat.trace(Net(), (X,), device="H100", autocast=autocast)

    assert traced == Question.of(Net(), device="H100", autocast=autocast).trace((X,))
    assert traced.device == "cuda"
    assert traced.costs == "roofline:H100"
    assert all(value.size_bytes % 512 == 0 for value in traced.values)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_a_step_in_pieces_has_the_operators_of_the_whole_one(autocast: torch.dtype | None) -> None:
    """Naive: the pieces are traced for the machine that is there."""
    whole, cut = (
        remat.trace(model(), (X,), device="H100", autocast=autocast) for model in (Net, Cut)
    )
    assert (cut.device, cut.costs) == ("cuda", "roofline:H100")
    assert all(value.size_bytes % 512 == 0 for value in cut.values)
    assert len({op.region for op in cut.operators if op.target != "between"}) == 2

    def computed(graph: remat.Graph) -> list[tuple[str, float]]:
        virtual = ("between", "tangent", "generator_state")
        return sorted((op.target, op.cost_s) for op in graph.operators if op.target not in virtual)

    assert computed(cut) == computed(whole)
    assert cut.resident_bytes == whole.resident_bytes

    with torch.device("meta"):
        without_memory = Cut(), (torch.empty_like(X),)
    assert remat.trace(*without_memory, device="H100", autocast=autocast) == cut


def test_autocast_for_another_device_changes_nothing() -> None:
    plain = remat.trace(Net(), (X,), device="H100")
    with torch.autocast("cpu", torch.bfloat16):
        assert remat.trace(Net(), (X,), device="H100") == plain


def test_costs_may_be_those_of_another_card_or_none() -> None:
    assert remat.trace(Net(), (X,), device="H100", costs="flops").costs == "flops"
    assert remat.trace(Net(), (X,), device="H100", costs="roofline:T4").costs == "roofline:T4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "H100", "costs": "profile"}, 'use costs="roofline"'),
        ({"device": "H1000"}, "unknown device 'H1000'"),
        ({"autocast": torch.bfloat16}, "name a device"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        remat.trace(Net(), (X,), **options)


def test_the_trace_command_takes_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import torch\n\ndef make():\n    return torch.nn.Linear(3, 3), (torch.randn(2, 3),)\n"
    (tmp_path / "small_factory.py").write_text(source)
    monkeypatch.chdir(tmp_path)

    def graph_of(*options: str) -> remat.Graph:
        result = CliRunner().invoke(app, ["trace", "small_factory.py:make", *options])
        assert result.exit_code == 0, result.output
        return remat.Graph.load("graph.json")

    plain = graph_of("--device", "H100")
    assert plain.device == "cuda"
    cast = graph_of("--device", "H100", "--autocast", "bfloat16")
    dtypes = {value.dtype for value in cast.values} - {value.dtype for value in plain.values}
    assert dtypes == {"bfloat16"}

    result = CliRunner().invoke(app, ["trace", "small_factory.py:make", "--autocast", "bfloat16"])
    assert result.exit_code == 2
    assert "name a device" in result.output


class TorchWithH100:
    """Torch on a machine with an H100, as far as `retarget` looks at it."""

    cuda = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (9, 0))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def has_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retarget, "torch", TorchWithH100())


@pytest.mark.usefixtures("has_h100")
@pytest.mark.parametrize(
    ("device", "type_"), [("H100", "cuda"), ("H200", "cuda"), ("T4", "cpu"), ("B200", "cpu")]
)
def test_a_gpu_traces_steps_for_cards_of_its_own_capability(device: str, type_: str) -> None:
    """Naive: a step for a T4 has the kernels of the H100 on which it is traced."""
    assert retarget.traced_on(device_named(device)) == type_


@pytest.mark.usefixtures("has_h100")
def test_a_step_for_another_card_than_the_one_here_is_traced_on_the_cpu() -> None:
    class Attention(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = super().forward(x).view(1, 2, 16, 32)
            return nn.functional.scaled_dot_product_attention(heads, heads, heads).sum()

    model = Attention(64, 64, dtype=torch.bfloat16)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    graph = remat.trace(model, (x,), device="T4")
    assert (graph.device, graph.costs) == ("cuda", "roofline:T4")
    assert any("_safe_softmax" in op.target for op in graph.operators), "no bfloat16 on a T4"
    with pytest.raises(ValueError, match="no GPU such as T4"):
        remat.trace(model, (x,), device="T4", executor="inductor")
