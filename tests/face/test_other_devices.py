"""Other devices: refused if remat can't plan for them, and told from one another."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.torch_border.dynamo import without_settings_in_log
from remat.tracers import devices


class Elsewhere(nn.Module):
    """A module that says its parameters are on other devices."""

    def __init__(self, *places: str) -> None:
        super().__init__()
        self.places = [torch.device(place) for place in places]

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        for place in self.places:
            yield SimpleNamespace(device=place, is_cuda=place.type == "cuda")


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
