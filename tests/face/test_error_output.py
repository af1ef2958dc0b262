"""What a user sees of an error: its cause and the model's line, without internal frames."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import remat
from tests.support.checkout import ROOT

SCRIPT = """
import torch, remat
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.layers(x).sum()

model = remat.checkpoint(Model(), "90%", costs="flops")
model(torch.randn(4, 9))
"""
LINE_OF_THE_MODEL = 1 + SCRIPT.splitlines().index("        return self.layers(x).sum()")


def test_a_wrong_input_shape_is_reported_briefly_with_the_models_line(
    tmp_path: Path,
) -> None:
    """Torch used to log 370 lines first, and the traceback had 60 internal frames."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "REMAT_PROGRESS": "0"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )

    lines = done.stderr.strip().splitlines()
    assert done.returncode == 1
    assert len(lines) <= 12, done.stderr
    assert lines[-1].startswith("remat.core.errors.TraceError: ")
    assert "[4, 9] X [8, 32]" in lines[-1]
    assert lines[-1].endswith(f"(train.py:{LINE_OF_THE_MODEL})")


class Impossible(nn.Module):
    """Fails when it runs, with or without remat."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(x)
        return hidden.view(3, 5)


def test_our_errors_show_no_internal_frames() -> None:
    for model, budget in ((Impossible(), "90%"), (nn.Linear(8, 8), 16)):
        remat.checkpoint(model, budget, costs="flops", plan_cache=False, time_limit_s=2)
        with pytest.raises(remat.RematError) as caught:
            model(torch.randn(2, 8))

        frames = traceback.extract_tb(caught.value.__traceback__)
        assert [frame.name for frame in frames[1:]] == ["_wrapped_call_impl", "__call__"]
        assert caught.value.__cause__ is None


def test_an_error_in_a_plain_sequential_names_no_line() -> None:
    model = remat.checkpoint(nn.Sequential(nn.Linear(8, 8), nn.GELU()), "90%", costs="flops")
    with pytest.raises(remat.TraceError) as caught:
        model(torch.randn(2, 9))

    assert "[2, 9] X [8, 8]" in str(caught.value)
    assert ".py:" not in str(caught.value)


class Caller(nn.Module):
    """Raises an error of its own, which is not a failure of the capture."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer(x).sum().item() > -1e9:
            raise KeyError("no such expert")
        return x


def test_a_models_error_passes_unchanged() -> None:
    model = remat.checkpoint(Caller(), "90%", costs="flops")
    with pytest.raises(KeyError, match="no such expert"):
        model(torch.randn(2, 8))
