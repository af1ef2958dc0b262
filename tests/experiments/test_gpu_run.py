"""The GPU run, rehearsed on the CPU: facts are written at once, and a failure is a fact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import gpu_run
from experiments.gpu import forecast, measuring, steps, tables
from experiments.gpu.comparing import LEAST, Way, plans_and
from experiments.gpu.steps import Place

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def short_plans_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives planning less time, since these plans need not be good."""
    monkeypatch.setattr(steps, "PLAN_LIMIT_S", 3.0)


def few_plans_and(budgets: Sequence[str], *others: tuple[str, Way]) -> list[tuple[str, Way]]:
    """Leaves out budgets between the largest and the least, which are planned in the same way."""
    return plans_and([budget for budget in budgets if budget in ("100%", LEAST)], *others)


def facts(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# transformers 5.23 renamed it; older versions only have the old name
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is dep:FutureWarning")
def test_a_rehearsal_writes_facts_and_no_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_run, "plans_and", few_plans_and)
    output = tmp_path / "facts.jsonl"
    where = ["--device", "cpu", "--tiny", "--seconds", "600", "--output", str(output)]
    gpu_run.main([*where, "--only", "environment", "correct", "medium"])

    found = facts(output)
    assert not [fact for fact in found if "error" in fact]
    assert all(fact["gradient"] == 0 for fact in found if fact.get("section") == "correct")
    ways = {fact["way"]: fact for fact in found if "way" in fact}
    assert {"plain", "remat 100%", "remat least", "checkpoint per block"} <= set(ways)
    assert ways["remat least"]["predicted"] < ways["remat 100%"]["predicted"]
    assert all(fact["gradient"] < 0.05 for fact in ways.values())

    capsys.readouterr()
    tables.show(output)
    assert "remat least" in capsys.readouterr().out


def test_a_plan_made_elsewhere_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "MODELS", ("gpt2-medium",))
    place, output = Place("cpu", is_tiny=True), tmp_path / "facts.jsonl"
    forecast.write_plans(tmp_path, place, "cpu")
    forecast.run_plans(measuring.Facts(output, place, 600), tmp_path)
    (plan,) = facts(output)
    assert plan["predicted"] > 0 and plan["step_s"] > 0

    monkeypatch.setattr(forecast, "_SHARE", "100%")  # nothing to search for
    forecast.write_plans(tmp_path, place, "H100")  # another step: its kernels differ
    forecast.run_plans(measuring.Facts(output, place, 600), tmp_path)
    assert facts(output)[-1]["error"].startswith("ScheduleError: this plan is for another step")


def test_a_failure_is_written_down_and_the_next_section_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: measuring.Facts) -> None:
        raise RuntimeError("a kernel is missing")

    monkeypatch.setitem(gpu_run.SECTIONS, "vision", (broken, 0))
    monkeypatch.setitem(gpu_run.SECTIONS, "oom", (lambda facts: facts.say(section="oom"), 0))
    output = tmp_path / "facts.jsonl"
    where = ["--device", "cpu", "--tiny", "--seconds", "50", "--output", str(output)]
    gpu_run.main([*where, "--only", "vision", "oom", "large"])

    found = facts(output)
    assert found[0]["error"] == "RuntimeError: a kernel is missing"
    assert found[1]["section"] == "oom" and "error" not in found[1]
    assert "needed" in found[2]["skipped"]
    assert found[-1]["section"] == "end"
