"""A rank fails while it plans: the others soon learn why, and a new try starts afresh."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from tests.support import rank_failures
from tests.support.rank_failures import SCENARIOS, TIMEOUT_S
from tests.support.ranks import start_ranks

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="this torch has no gloo"
)
Outcomes: TypeAlias = Callable[[str], list[list[tuple[str, float]]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """How each rank's tries ended, and after how many seconds.

    All scenarios run at once, since their ranks mostly wait.
    """
    folder = tmp_path_factory.mktemp("outcomes")
    started = [start_ranks(2, rank_failures.main, scenario, folder) for scenario in SCENARIOS]
    for process in [process for context in started for process in context.processes]:
        process.join(120)
        process.kill()  # in case it hangs

    def of(scenario: str) -> list[list[tuple[str, float]]]:
        paths = [folder / f"{scenario}{rank}" for rank in (0, 1)]
        texts = [path.read_text() if path.exists() else "" for path in paths]
        return [[tuple(json.loads(line)) for line in text.splitlines()] for text in texts]

    return of


def test_a_failure_is_reported_once_and_tried_again(outcomes: Outcomes) -> None:
    """Naive: the failure is stored, and every later try gets it."""
    waiting, planning = outcomes("memory")
    assert planning[0][0] == "MemoryError: no room for the model"
    assert waiting[0][0].startswith(
        "SolverError: rank 1 could not plan this step: MemoryError: no room for the model"
    )
    assert [what for what, _ in planning[1:] + waiting[1:]] == ["optimal"] * 4


def test_a_killed_rank_is_noticed_within_the_groups_timeout(outcomes: Outcomes) -> None:
    """Naive: the others wait for the time limit and ten minutes more."""
    waiting, planning = outcomes("killed")
    assert planning == []
    what, seconds = waiting[0]
    assert "no sign of life" in what and "it was killed" in what
    assert seconds < TIMEOUT_S
    assert [what for what, _ in waiting[1:]] == ["optimal"] * 2


def test_a_rank_that_wakes_up_too_late_runs_no_plan_of_its_own(outcomes: Outcomes) -> None:
    waiting, planning = outcomes("stopped")
    assert "no sign of life" in waiting[0][0]
    assert planning[0][0].startswith("SolverError: other ranks gave up waiting")
    assert [what for what, _ in planning[1:] + waiting[1:]] == ["optimal"] * 4


def test_a_lost_store_is_named(outcomes: Outcomes) -> None:
    waiting = outcomes("lost")[1]
    assert len(waiting) == 3
    for what, seconds in waiting:
        assert what.startswith("SolverError: the ranks can't share a plan: the store")
        assert seconds < TIMEOUT_S
