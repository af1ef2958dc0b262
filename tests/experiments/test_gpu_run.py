"""The GPU run, rehearsed on the CPU: facts are written at once, and a failure is a fact."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from experiments import gpu_run
from experiments.gpu import forecast, lanes, measuring, steps, tables
from experiments.gpu.comparing import LEAST, at_the_peaks_of, compare, plans
from experiments.gpu.steps import Place

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def short_plans_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives planning less time, since these plans need not be good."""
    monkeypatch.setattr(steps, "PLAN_LIMIT_S", 1.0)


def facts(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


EAGER = ("environment", "correct", "medium", "vision", "oom", "billions", "operators", "autocast")


# transformers 5.23 renamed it; older versions only have the old name
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is dep:FutureWarning")
def test_a_rehearsal_writes_facts_and_no_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One plan per model, within the peak of selective checkpoints; the next test has the least.

    Sections that run the same code on another model are left out, and slow ones: `large` and
    the other `autocast_*` run what `billions` and `autocast` run. Those through Inductor take 40 to
    100 seconds a way on a CPU; `tests/inductor` runs such plans. `foretold` runs the committed
    plans, which are for a card; another test here runs plans for this machine.
    """
    monkeypatch.setattr(gpu_run, "plans", lambda *_: [])
    monkeypatch.setattr(gpu_run, "at_the_peaks_of", lambda ways: at_the_peaks_of(ways[-1:]))
    output = tmp_path / "facts.jsonl"
    where = ["--device", "cpu", "--tiny", "--seconds", "600", "--output", str(output)]
    gpu_run.main([*where, "--only", *EAGER])

    found = facts(output)
    assert not [fact for fact in found if "error" in fact or "skipped" in fact]
    assert all(fact["gradient"] == 0 for fact in found if fact.get("section") == "correct")
    assert all(fact["gradient"] < 0.05 for fact in found if "way" in fact)

    models = {fact["model"] for fact in found if "model" in fact}
    assert len(models) == 4
    for model in models:
        ways = {fact["way"]: fact for fact in found if fact.get("model") == model}
        for way, fact in ways.items():
            _, is_equal, other = way.partition(tables.AT_THE_PEAK_OF)
            if is_equal:
                assert fact["predicted"] <= ways[other]["requested"] == fact["budget_asked"]
    assert sum(tables.AT_THE_PEAK_OF in fact.get("way", "") for fact in found) >= len(models)

    capsys.readouterr()
    tables.show(output)
    assert "remat at the peak of selective checkpoints: " in capsys.readouterr().out


def test_the_least_budget_is_planned(tmp_path: Path) -> None:
    facts_of = measuring.Facts(tmp_path / "facts.jsonl", Place("cpu", is_tiny=True), 600)
    compare(facts_of, "gpt2-medium", plans("100%", LEAST))
    most, least = facts(facts_of.path)
    assert least["predicted"] < most["predicted"] and least["gradient"] == 0


def test_what_takes_too_long_costs_only_itself(tmp_path: Path) -> None:
    facts_of = measuring.Facts(tmp_path / "facts.jsonl", Place("cpu", is_tiny=True), 600)
    began = time.monotonic()
    with facts_of.section(way="slow"), facts_of.progress.limit(0.1):
        time.sleep(30)
    with facts_of.section(way="fast"), facts_of.progress.limit(30):
        pass

    assert time.monotonic() - began < 20
    (fact,) = facts(facts_of.path)
    assert fact["way"] == "slow" and fact["error"].startswith("TimeoutError")


_STUCK = """
import signal, sys, time
from pathlib import Path
from experiments.gpu.progress import Progress

progress = Progress.read(Path(sys.argv[1]))
for section in progress.sections_left(["medium", "vision"]):
    progress.note(section=section)
    for way, in progress.ways_left([("plain",), ("stuck",), ("plan",)]):
        print(section, way, file=open(sys.argv[2], "a"))
        if (section, way) == ("medium", "stuck"):
            progress.note(way=way, until=time.time())
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            time.sleep(600)
    progress.note(way="")
"""


def test_a_process_that_is_stuck_is_replaced_by_one_that_goes_on(tmp_path: Path) -> None:
    """Naive: a call that never returns to Python notices no time limit, and ends its lane."""
    said: list[dict[str, Any]] = []
    progress, ran = tmp_path / "progress", tmp_path / "ran"
    command = [sys.executable, "-c", _STUCK, str(progress), str(ran)]
    lanes.supervise(command, progress, set(), lambda **fact: said.append(fact), grace_s=0.5)

    assert [(fact["section"], fact["way"]) for fact in said] == [("medium", "stuck")]
    assert ran.read_text().splitlines() == [
        "medium plain", "medium stuck",
        "medium plain", "medium plan", "vision plain", "vision stuck", "vision plan",
    ]  # fmt: skip
    assert not progress.exists()


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
