"""Plans and batches foretold on a machine without a GPU, and what a card makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import remat
from experiments.gpu.measuring import Facts, blas_bytes, gradients, measured, step
from experiments.gpu.measuring import told as told_by
from experiments.gpu.steps import STEPS, Place, gpt2, planned

MODELS = ("gpt2-medium", "resnet50", "llama-3-8b, 8 layers")
BATCH_BUDGET = "16GiB"
_SHARE = "60%"
_BATCHES = "batches.json"


def foretell(folder: Path, device: str, *, is_tiny: bool = False) -> None:
    """Writes a plan per model for a device of the table, and the largest batch of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    place = Place("cpu", is_tiny)
    for name in MODELS:
        model, batch = STEPS[name](place)
        graph = remat.trace(model, (), batch, device=device)
        remat.solve(graph, _SHARE, time_limit_s=10).save(folder / f"{_file(name)}.json")

    model, batch = STEPS[MODELS[0]](place)
    length = batch["input_ids"].shape[1]

    def of(size: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(size, length, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    class ByName(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: torch.Tensor) -> Any:
            return self.inner(input_ids=ids, labels=ids)

    batches = remat.max_batch(
        ByName(), lambda size: (of(size)["input_ids"],), BATCH_BUDGET,
        device=device, optimizer="none", time_limit_s=5, points=3,
    )  # fmt: skip
    rows = [{"batch": row.batch, **row.fit.record()} for row in batches.rows]
    (folder / _BATCHES).write_text(json.dumps(rows))


def judge(facts: Facts, folder: Path) -> None:
    """Runs what was foretold in a folder; a plan that is not the card's step is said so."""
    for name in MODELS:
        way = f"a laptop's plan at {_SHARE}"
        with facts.section(section="foretold", model=name, way=way), facts.turn():
            solution = remat.Solution.load(folder / f"{_file(name)}.json")
            blas_bytes(facts.place)
            base = torch.cuda.memory_allocated() if facts.place.has_cuda else 0
            model, batch = STEPS[name](facts.place)
            remat.wrap(model, solution)
            gradients(model, model, batch)
            row = measured(model, model, batch, facts.place)
            told = {"predicted": solution.peak_bytes, "predicted_step_s": solution.cost_s}
            facts.say(section="foretold", model=name, way=way, base=base, **told, **row)

    largest = max(row["batch"] for row in json.loads((folder / _BATCHES).read_text()))
    for size in (largest, largest + 1):
        way = f"batch {size}, of which {largest} was foretold to be the largest"
        with facts.section(section="foretold", model=MODELS[0], way=way):
            model, batch = gpt2(facts.place, batch=size)
            planned(model, BATCH_BUDGET)
            step(model, model, batch, 0)
            facts.say(section="foretold", model=MODELS[0], way=way, **told_by(model))


def _file(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")
