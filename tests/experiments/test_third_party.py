"""Models of other libraries: the harness judges steps, keeps rows, says what is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments import third_party, third_party_table
from experiments.models import Workload
from experiments.third_party import measure
from experiments.third_party_models.steps import mean_square, step
from experiments.third_party_table import ALL, Row, outcomes, table

pytestmark = pytest.mark.usefixtures("fresh_torch")


class _Tiny(nn.Module):
    def __init__(self, look: Callable[[torch.Tensor], object] = lambda _: None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.dropout, self.norm, self.look = nn.Dropout(0.2), nn.BatchNorm1d(8), look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(F.gelu(layer(x)))
        self.look(x)
        out: torch.Tensor = self.norm(x)
        return out


def _made(model: Callable[[], nn.Module]) -> Callable[[], Workload]:
    batch = {"inputs": (512, 8), "targets": (512, 8)}
    return lambda: step(model(), mean_square, **{k: torch.randn(s) for k, s in batch.items()})


def test_a_model_is_right_within_three_budgets() -> None:
    everything, part, least = measure("tiny", _made(_Tiny))
    assert [row.budget for row in (everything, part, least)] == ["100%", "60%", "least"]
    assert {row.outcome for row in (everything, part, least)} == {"equal"}

    assert least.budget_bytes <= part.budget_bytes < everything.budget_bytes
    assert all(0 < row.measured_bytes <= row.budget_bytes for row in (everything, part, least))
    assert part.overhead > 0 and part.measured_bytes < part.plain_bytes


def test_a_step_that_cannot_be_planned_is_a_row_with_its_error() -> None:
    class Recurrent(_Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8)  # oneDNN keeps memory of its own for it

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(x) + self.lstm(x[:2])[0].mean()
            return out

    (row,) = measure("recurrent", _made(Recurrent))
    assert row.budget == "" and row.outcome.startswith("TraceError: an LSTM on the CPU")
    assert row.aot_eager  # what PyTorch's own compilation does with it


def test_a_step_with_hidden_state_is_not_judged() -> None:
    noise = torch.Generator().manual_seed(0)

    class Noisy(_Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.rand((), generator=noise)

    (row,) = measure("noisy", _made(Noisy))
    assert row.outcome == "plain PyTorch differs from itself"


def test_differences_are_found_and_measured() -> None:
    ones = torch.ones(3)
    assert third_party._difference_of([ones], [ones.clone()]) is None
    assert third_party._difference_of([ones, ones * 2], [ones, ones * 4]) == 0.5
    assert third_party._difference_of([torch.empty(0)], [ones]) == float("inf")

    nan = torch.tensor([1.0, torch.nan])
    assert third_party._difference_of([nan], [nan.clone()]) is None
    assert third_party._difference_of([nan], [nan.nan_to_num()]) == float("inf")
    assert third_party._difference_of([ones * 1j], [ones.mul(-1j).conj()]) is None


def test_rows_are_kept_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(third_party_table, "RESULTS", tmp_path / "third_party.json")
    name = next(iter(ALL))
    good = Row(name, "100%", "equal", budget_bytes=8, measured_bytes=8, num_operators=3)
    rows = [good, Row(name, "60%", "below the least"), Row(name, "least", "DIFFERENT", 0.25)]
    kept = {"environment": {"date": "today"}, "version": "1.0"}
    known = {name: {**kept, "rows": [asdict(row) for row in rows]}}

    text = third_party_table.save(known)
    assert third_party_table.load() == known
    assert (tmp_path / "third_party.md").read_text() == text + "\n"

    assert outcomes(rows) == {"DIFFERENT": 1} and outcomes(rows[:2]) == {"equal": 1}
    assert table(rows[:2]).startswith("1 models of 1 libraries: 1 equal.")


def test_every_library_is_named_for_installation() -> None:
    listed = Path(third_party.__file__).with_name("third_party.txt").read_text().split()
    assert {model.package for model in ALL.values()} <= set(listed)
    assert len(ALL) >= 40 and len({model.package for model in ALL.values()}) >= 8


def test_a_missing_library_is_skipped_with_its_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(third_party_table, "RESULTS", tmp_path / "third_party.json")
    monkeypatch.setattr(third_party, "installed_version", lambda package: "")
    monkeypatch.setattr(third_party, "_prepare", lambda: None)
    name = next(iter(ALL))
    third_party.main([name])
    assert f"{name} | skipped: {ALL[name].package} is not installed" in capsys.readouterr().err
    assert third_party_table.load() == {}


def test_an_empty_module_replaces_an_import_that_is_not_used() -> None:
    program = (
        "from experiments.absent_modules import stand_in_for\n"
        "assert stand_in_for('json', 'no_such_library') == ('no_such_library',)\n"
        "from no_such_library.transforms import InterpolationMode\n"
        "import json\n"
        "assert InterpolationMode.BICUBIC == 'BICUBIC' and json.loads('1') == 1\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
