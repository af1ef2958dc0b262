"""Ranks train as without a plan: by one plan, solved once, within a budget per rank.

The checks themselves are in `distributed_checks.py`, which torchrun starts once for 2 ranks and
once for 4."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch

from tests.support.checkout import ROOT

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="this torch has no gloo"
)


def launch(num_ranks: int, *args: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
        *args,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def of(num_ranks: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        done = launch(num_ranks, "-m", "tests.support.distributed_checks", str(folder))
        results = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
        return results if done.returncode == 0 else {**results, "failure": done.stderr[-4000:]}

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
        # four ranks' gradients are summed in an order that depends on their place in a bucket,
        # which is another place here
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
    done = launch(2, "-m", "experiments.distributed_training", "--layers", "2", "--steps", "3")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "step 2: loss 5." in done.stdout and "measured peak" in done.stdout
