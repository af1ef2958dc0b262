"""A rank fails while it plans: the others soon learn why, and a new try starts afresh."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from tests.support.checkout import ROOT
from tests.support.rank_failures import TIMEOUT_S

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="this torch has no gloo"
)


def outcomes(scenario: str) -> list[list[tuple[str, float]]]:
    """What each rank's tries ended with, and after how many seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.rank_failures", scenario, str(rank), str(port)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    return [[tuple(json.loads(line)) for line in text.splitlines()] for text in outputs]


def test_a_failure_is_reported_once_and_tried_again() -> None:
    """Naive: the failure is stored, and every later try gets it."""
    waiting, planning = outcomes("memory")
    assert planning[0][0] == "MemoryError: no room for the model"
    assert waiting[0][0].startswith(
        "SolverError: rank 1 could not plan this step: MemoryError: no room for the model"
    )
    assert [what for what, _ in planning[1:] + waiting[1:]] == ["optimal"] * 4


def test_a_killed_rank_is_noticed_within_the_groups_timeout() -> None:
    """Naive: the others wait for the time limit and ten minutes more."""
    waiting, planning = outcomes("killed")
    assert planning == []
    what, seconds = waiting[0]
    assert "no sign of life" in what and "it was killed" in what
    assert seconds < TIMEOUT_S
    assert [what for what, _ in waiting[1:]] == ["optimal"] * 2


def test_a_rank_that_wakes_up_too_late_runs_no_plan_of_its_own() -> None:
    waiting, planning = outcomes("stopped")
    assert "no sign of life" in waiting[0][0]
    assert planning[0][0].startswith("SolverError: other ranks gave up waiting")
    assert [what for what, _ in planning[1:] + waiting[1:]] == ["optimal"] * 4


def test_a_lost_store_is_named() -> None:
    waiting = outcomes("lost")[1]
    assert len(waiting) == 3
    for what, seconds in waiting:
        assert what.startswith("SolverError: the ranks can't share a plan: the store")
        assert seconds < TIMEOUT_S
