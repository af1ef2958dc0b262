"""Damaged files for every reader and command; `experiments/fuzz.py` tries many more."""

from __future__ import annotations

import json
import logging
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments import damage
from experiments.fuzz import RESULT, Fuzzer
from remat.core import limits
from remat.core.errors import RematError
from remat.core.solution import Solution
from tests.support.checkout import ROOT

FILES = 150
SEED = 1  # the files that `experiments/results/fuzz.json` counts have seed 0


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    return Fuzzer(tmp_path_factory.mktemp("fuzz"), SEED)


@pytest.mark.usefixtures("quiet")
def test_no_damaged_file_is_trusted_or_ends_in_a_traceback(fuzzer: Fuzzer) -> None:
    outcome = fuzzer.run(range(FILES))
    assert not outcome.wrong, "\n".join(outcome.wrong)

    for kind in ("plain", "graph", "schedule", "plan", "curve"):
        assert outcome.counts[f"{kind} accepted"] > 0
        assert outcome.counts[f"{kind} refused"] > 0
    assert outcome.counts["exit status 0"] > 0
    assert outcome.counts["exit status 2"] > 0


def wrong_one_by_one(fuzzer: Fuzzer, num_files: int) -> Iterator[str]:
    """What the fuzzer finds wrong, file by file: a search for one mistake ends with it."""
    for number in range(num_files):
        yield from fuzzer.run(range(number, number + 1)).wrong


@pytest.mark.usefixtures("quiet")
def test_the_fuzzer_finds_a_trusting_reader(
    fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Solution, "on", lambda self, graph: self)
    assert any("believed" in line for line in wrong_one_by_one(fuzzer, 100))


@pytest.mark.usefixtures("quiet")
def test_the_fuzzer_finds_a_missing_rule(fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch) -> None:
    for rule in ("size_fault", "cost_fault", "texts_fault"):
        monkeypatch.setattr(limits, rule, lambda value: "")
    assert any(wrong_one_by_one(fuzzer, 150))


@pytest.mark.usefixtures("quiet")
def test_the_fuzzer_finds_an_error_of_several_lines(
    fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> Solution:
        raise RematError("two\nlines")

    monkeypatch.setattr(Solution, "load", fail)
    monkeypatch.setattr(Fuzzer, "_check_cache", lambda *_: None)
    assert any("lines" in line for line in wrong_one_by_one(fuzzer, 30))


def test_damage_to_a_file_is_reproducible(fuzzer: Fuzzer) -> None:
    for kind, content in fuzzer.seeds.items():
        both = [damage.damaged(content, random.Random(f"{SEED}:{kind}")) for _ in range(2)]
        assert both[0] == both[1]


def test_the_documents_state_how_many_files_were_tried() -> None:
    result = json.loads(RESULT.read_text())
    assert (result["wrong"], result["cases"]) == (0, [])
    for kind in damage.KINDS:
        tried = [n for end, n in result["counts"].items() if end.startswith(f"{kind} ")]
        assert sum(tried) > 3000

    page = ROOT / "docs" / "promises.md"
    assert f"{result['files']:,}" in " ".join(page.read_text().split())
