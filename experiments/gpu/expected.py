"""What the model of CUDA's allocator expects for measured steps, without a GPU.

The step at 100 % is the measured one, to the operator. The other plans have the same budget, but
costs that were computed here, not measured there, so they can differ: the blocks beyond what was
requested, and the reserved bytes beyond the blocks, are compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import remat
from experiments.environment import environment
from experiments.gpu import steps
from experiments.gpu.steps import STEPS, Place
from experiments.gpu.tables import Fact
from remat.analysis.cuda_allocator import expected_peaks
from remat.core.graph import Graph
from remat.core.schedule import Schedule

_AUTOCAST = "gpt2-medium, 4 sequences"
MODELS = ("gpt2-medium", "resnet50", "llama-3-8b, 8 layers", "gpt2-xl", _AUTOCAST)
_BUDGETS = ("100%", "60%", "40%")


def expect(rows: Sequence[Fact], output: Path, device: str) -> None:
    """Writes the expected peaks beside the measured ones, for plans that were measured."""
    of_way = {(row["model"], row["way"]): row for row in rows if "predicted" in row}
    found = [fact for name in MODELS for fact in _of_model(name, device, of_way)]
    output.write_text(json.dumps({"run": environment(seed=0), "rows": found}, indent=1) + "\n")


def _of_model(name: str, device: str, of_way: dict[tuple[str, str], Fact]) -> Iterator[Fact]:
    graph = _graph(name, device)
    for budget in _BUDGETS:
        row = of_way.get((name, f"remat {budget}{', autocast' if name == _AUTOCAST else ''}"))
        if row is None:
            continue

        schedule = (
            Schedule.keep_all(graph)
            if budget == "100%"
            else remat.solve(graph, budget, time_limit_s=steps.PLAN_LIMIT_S).schedule
        )
        if schedule is not None:
            counts = ("requested", "allocated", "reserved")
            measured = {f"{count}_bytes": row[count] - row["base"] for count in counts}
            expected = asdict(expected_peaks(graph, schedule))
            yield {"model": name, "budget": budget, "expected": expected, "measured": measured}


def _graph(name: str, device: str) -> Graph:
    model, batch = STEPS[name](Place("meta", is_tiny=False))
    options: dict[str, Any] = {"device": device}
    if name == _AUTOCAST:
        model.float()
        options["autocast"] = torch.bfloat16
    return remat.trace(model, (), batch, **options)
