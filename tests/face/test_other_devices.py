"""Other devices: refused if remat can't plan for them, and told from one another."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import remat
from remat.face.compile_backend import backend
from remat.pieces.unplanned_memory import gradient_bytes, there_bytes
from remat.torch_border.dynamo import without_settings_in_log
from remat.tracers import devices
from tests.support.planned import call_of


class Elsewhere(nn.Module):
    """A module that says its parameters are on other devices."""

    def __init__(self, *places: str) -> None:
        super().__init__()
        self.places = [torch.device(place) for place in places]

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        for place in self.places:
            is_cuda = place.type == "cuda"
            yield SimpleNamespace(device=place, is_cuda=is_cuda, requires_grad=True)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (["mps"], "is on mps; remat plans steps on a CPU or a CUDA device"),
        (["cpu", "xpu"], "is on xpu"),
        (["cuda:0", "cuda:1"], "spread over 2 GPUs of one process"),
    ],
)
def test_a_device_remat_cannot_plan_for_is_refused_at_once(places: list[str], message: str) -> None:
    with pytest.raises(remat.TraceError, match=message):
        remat.checkpoint(Elsewhere(*places), "80%", costs="flops")


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (["mps"], "the compiled model is on mps; remat plans steps on a CPU or a CUDA device"),
        (["cpu", "xpu"], "is on xpu"),
        (["cpu", "cuda:0", "cuda:1"], "spread over 2 GPUs of one process"),
        (["cuda:1"], r"is on cuda:1, and the current GPU.* is cuda:0; .*set_device\(1\) first"),
    ],
)
def test_the_backend_refuses_the_same_devices(
    places: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: what is on no GPU is on a CPU, and one GPU's memory is measured for two."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with FakeTensorMode():
        inputs = [torch.empty(4, device=place) for place in places]

    step = fx.GraphModule(nn.Module(), fx.Graph())
    with pytest.raises(remat.TraceError, match=message):
        backend(step, inputs, options={"budget": "80%", "costs": "flops"})


class Moves(nn.Module):
    """A layer that can say that its parameters are elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.place = nn.Linear(4, 4), ""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield from Elsewhere(self.place).parameters() if self.place else super().parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(x).tanh().sum()
        return loss


@pytest.mark.usefixtures("fresh_torch")
@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_model_on_another_gpu_is_refused_at_any_call(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: only the first call looks which GPU is current, and a later one measures it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    model = Moves()
    remat.checkpoint(model, "100%", costs="flops", plan_cache=False)
    for _ in range(num_steps):
        model(torch.randn(2, 4)).backward()
    call_of(model).device_type = "cuda"
    model.place = "cuda:1"

    with pytest.raises(remat.TraceError, match=r"Moves is on cuda:1, .* is cuda:0; call torch\."):
        model(torch.randn(2, 4))


def test_gradients_on_a_cpu_take_no_memory_of_a_gpu() -> None:
    """A part of the model may be there, such as a large embedding."""
    model = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
    with FakeTensorMode(allow_non_fake_inputs=True):
        model[1].weight = nn.Parameter(torch.empty(256, device="cuda:0"))
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)

    assert gradient_bytes(model, "cpu") == 8 * 8 * 4
    assert gradient_bytes(model, "cuda") == 256 * 4
    assert there_bytes(model, (), "cuda") == 2 * 256 * 4


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("torch.__version__", "2.99"),
        ("torch.version.cuda", "12.0"),
    ],
)
def test_times_are_kept_apart_by_version(
    setting: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    before = devices.cuda_settings()
    monkeypatch.setattr(setting, value)

    assert devices.cuda_settings() != before


@pytest.mark.parametrize(
    "flags", [{"enabled": False}, {"benchmark": True}, {"deterministic": True}]
)
def test_times_are_kept_apart_by_cudnn_flags(
    flags: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    known = {"enabled": True, "benchmark": False, "deterministic": False}
    with torch.backends.cudnn.flags(**known):
        before = devices.cuda_settings()
    with torch.backends.cudnn.flags(**{**known, **flags}):
        assert devices.cuda_settings() != before


def test_a_slice_of_a_gpu_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice (MIG) has the name of its card, and less memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (9 << 30, 10 << 30))

    assert devices.local_device().name == "H100"
    assert devices.local_device().memory_bytes == 10 << 30


@pytest.mark.parametrize(("version", "is_left_out"), [("2.12.1+cu130", True), ("2.13.0", False)])
def test_settings_that_cannot_be_written_are_left_out_of_the_log(
    version: str, is_left_out: bool
) -> None:
    utils: Any = torch._dynamo.utils
    before = utils._get_dynamo_config_for_logging
    with without_settings_in_log(version):
        assert (utils._get_dynamo_config_for_logging is not before) == is_left_out
    assert utils._get_dynamo_config_for_logging is before
