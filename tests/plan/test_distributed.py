"""Ranks train as without a plan: by one plan, solved once, within a budget per rank.

The checks themselves are in `distributed_checks.py`, which runs once on 2 ranks and once on 4."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from tests.support import distributed_checks
from tests.support.checkout import ROOT
from tests.support.ranks import start_ranks

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="this torch has no gloo"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def of(num_ranks: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        ranks, failure = start_ranks(num_ranks, distributed_checks.main, folder), {}
        try:
            while not ranks.join():
                pass
        except (ProcessRaisedException, ProcessExitedException) as error:
            failure = {"failure": str(error)}
        return failure | {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}

    return of


@pytest.mark.parametrize(
    ("num_ranks", "name", "tolerance"),
    [
        (2, "ddp_from_outside", 0.0),
        (2, "ddp_blocks", 0.0),
        (2, "fsdp", 0.0),
        (2, "tensor_parallel", 0.0),
        (2, "a_collective_runs_once", 0.0),
        (2, "a_function_over_several_ddps", 0.0),
        (2, "ddp_through_inductor", 0.0),
        (2, "fsdp_through_inductor", 0.0),
        # the order in which gradients of four ranks are summed depends on their place in a
        # bucket, which differs here
        (4, "ddp", 1e-4),
        (4, "fsdp_sharded_first", 0.0),
    ],
)
def test_ranks_train_as_without_a_plan(
    found: Any, num_ranks: int, name: str, tolerance: float
) -> None:
    results = found(num_ranks)
    assert name in results, results["failure"]
    result = results[name]
    assert result["difference"] <= tolerance
    assert result["plans"] == 1, "every rank runs the same plan"
    assert result["overhead"] > 0
    # gloo frees what it sends in its own threads, some time later
    in_flight = 0.25 if name == "tensor_parallel" else 0.1
    assert result["measured"] <= 1 + in_flight


def test_a_plan_is_solved_on_one_rank(found: Any) -> None:
    assert found(2)["ddp_from_outside"]["solved"] == 1
    assert found(4)["ddp"]["solved"] == 1


def test_a_collective_is_never_computed_again(found: Any) -> None:
    assert found(2)["a_collective_runs_once"]["collectives"] == [1, 1]


def test_a_rank_with_a_smaller_batch_keeps_no_rank_waiting(found: Any) -> None:
    result = found(2)["a_smaller_last_batch_on_one_rank"]
    assert result["difference"] == 0.0
    assert result["solved"] == [0, 1]


def test_a_budget_that_cannot_be_met_is_an_error_on_every_rank(found: Any) -> None:
    messages = found(2)["a_budget_that_cannot_be_met"]["messages"]
    assert len(messages) == 2 and all(
        m.startswith("BudgetError: no schedule fits in the budget 10 KiB") for m in messages
    )
    assert "DDP's buckets" in messages[0]


def test_sharded_parameters_are_planned_block_by_block_or_refused(found: Any) -> None:
    assert "blocks=model.layers" in found(2)["fsdp_whole_is_refused"]["message"]


def test_the_example_for_a_cluster_trains() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "-m", "experiments.distributed_training"]
    done = subprocess.run(
        [*command, "--layers", "2", "--steps", "3"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "step 2: loss 5." in done.stdout and "measured peak" in done.stdout
