"""The parts of the figure scripts whose right answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import remat
from experiments.all import add_environment
from experiments.attention import TILE, error_ulp, fused, tiled, written_out
from experiments.checkmate_figures import at_batch
from experiments.depth_growth import exponents, laws
from experiments.environment import environment
from experiments.figures import leanest, table
from experiments.lecture_chain import by_hand, chain
from experiments.side_by_side import INDUCTOR, judged
from remat.core.schedule import Schedule, simulate
from remat.tracers.synthetic import transformer


def test_the_lectures_chain_has_the_lectures_counts() -> None:
    counted = {row["name"]: (row["matrices"], row["products"]) for row in by_hand(chain())}
    assert counted == {
        "everything kept": (11, 30),
        "checkpoint at layer 5, by segment": (6, 38),
        "checkpoint at layer 5, by layer": (4, 50),
        "nothing kept": (3, 75),
    }

    assert 75 - 30 == sum(range(10))
    assert 50 - 30 == 2 * sum(range(5))


@pytest.mark.parametrize("matrices", [8, 10])
def test_the_least_number_of_products_is_proved(matrices: int) -> None:
    solution = remat.solve(chain(), matrices, gap=0.0, time_limit_s=20)
    assert solution.status is remat.Status.OPTIMAL
    assert round(solution.cost_s) == 41 - matrices


@pytest.mark.parametrize("tokens", [TILE // 2, TILE, 3 * TILE + 5])
def test_tiled_attention_is_attention(tokens: int) -> None:
    assert error_ulp(tiled, tokens) < 4 * max(8.0, error_ulp(written_out, tokens))
    assert error_ulp(fused, tokens) < 4 * max(8.0, error_ulp(written_out, tokens))


def test_tiled_attention_survives_scores_whose_exponentials_overflow() -> None:
    q = torch.full((1, 2 * TILE, 4), 100.0)
    out = tiled(q, q, torch.ones(1, 2 * TILE, 4))
    assert torch.allclose(out, torch.ones_like(out))


def test_a_graph_between_two_batches_matches_the_traced_one() -> None:
    def traced(batch: int) -> remat.Graph:
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1), torch.nn.Flatten(0)
        )
        return remat.trace(model, (torch.randn(batch, 8),), costs="flops", differentiate="all")

    between, real = at_batch(traced(64), traced(256), (64, 256), 128), traced(128)
    assert [v.size_bytes for v in between.values] == [v.size_bytes for v in real.values]
    assert (
        simulate(between, Schedule.keep_all(between)).peak_bytes
        == simulate(real, Schedule.keep_all(real)).peak_bytes
    )
    assert between.cost_s == pytest.approx(real.cost_s)


def test_the_leanest_schedule_of_a_heuristic_has_the_least_peak() -> None:
    graph = transformer(6, width=2**12)
    best = leanest("chen-greedy", graph)
    assert best.is_solved
    for percent in range(20, 101, 10):
        budget = simulate(graph, Schedule.keep_all(graph)).peak_bytes * percent // 100
        other = remat.solvers.make_solver("chen-greedy").solve(graph, budget_bytes=budget)
        assert not other.is_solved or other.peak_bytes >= 0.99 * best.peak_bytes


def test_known_growth_gives_its_exponent() -> None:
    powers = {
        "no optimization": 1.0,
        "in place": 1.0,
        "sharing": 1.0,
        "drop cheap": 1.0,
        "sublinear": 0.5,
        "ours, same price": 0.5,
        "ours, least": 0.0,
    }

    rows = [
        {"size": n, "ways": {way: {"bytes": 7 * n**power} for way, power in powers.items()}}
        for n in (4, 8, 16, 32)
    ]
    assert exponents(rows) == pytest.approx(powers, abs=1e-9)
    assert laws(rows) == {
        way: {1.0: "linear", 0.5: "square root", 0.0: "constant"}[power]
        for way, power in powers.items()
    }


def test_a_table_is_markdown() -> None:
    assert table([["a", "1"]], ["x", "y"]) == "| x | y |\n| --- | ---: |\n| a | 1 |"


def test_inductors_rounding_is_the_gradients_tolerance() -> None:
    def row(family: str, label: str, off: float) -> dict[str, object]:
        return {"model": "m", "family": family, "label": label, "gradient_difference": off}

    rows = [
        row("plain PyTorch", "plain", 0.0),
        row(INDUCTOR, "1", 1e-7),
        row(INDUCTOR, "0", 1e-2),
        row("remat, run by Inductor", "60%", 2e-7),
    ]
    refused = {"model": "m", "family": "remat", "label": "1%", "refused": "too little"}

    assert [r.get("gradients") for r in judged([*rows, refused])] == [
        "equal",
        "close",
        "wrong",
        "close",
        None,
    ]


def test_the_demos_numbers_say_where_they_were_made(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    path.write_text('{"seed": 0, "runs": []}')
    add_environment(path, environment())
    record = json.loads(path.read_text())
    assert {"commit", "processor"} <= {*record["environment"]}
    assert (record["seed"], record["runs"]) == (0, [])
