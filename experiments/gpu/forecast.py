"""Plans and batch sizes predicted on a machine without a GPU, and checked on a card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import remat
from experiments.gpu import steps
from experiments.gpu.measuring import Facts, blas_bytes, gradients, measured, step
from experiments.gpu.measuring import told as told_by
from experiments.gpu.steps import STEPS, Place, gpt2, planned

MODELS = ("gpt2-medium", "resnet50", "llama-3-8b, 8 layers")
BATCH_BUDGET = "16GiB"
_SHARE = "60%"
_BATCHES = "batches.json"


def foretell(folder: Path, device: str) -> None:
    """Writes one plan per model for a known device, and the first model's largest batch."""
    write_plans(folder, Place("cpu", is_tiny=False), device)

    model, batch = STEPS[MODELS[0]](Place("cpu", is_tiny=False))
    length = batch["input_ids"].shape[1]

    def loss(ids: torch.Tensor) -> Any:
        return model(input_ids=ids, labels=ids)

    batches = remat.max_batch(
        loss, lambda size: (torch.zeros(size, length, dtype=torch.long),), BATCH_BUDGET,
        device=device, optimizer="none", time_limit_s=5, points=3,
    )  # fmt: skip
    rows = [{"batch": row.batch, **row.fit.record()} for row in batches.rows]
    (folder / _BATCHES).write_text(json.dumps(rows))


def write_plans(folder: Path, place: Place, device: str) -> None:
    """Writes one plan per model for a device that `remat` knows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        model, batch = STEPS[name](place)
        graph = remat.trace(model, (), batch, device=device)
        solution = remat.solve(graph, _SHARE, time_limit_s=steps.PLAN_LIMIT_S)
        solution.save(folder / f"{_file(name)}.json")


def judge(facts: Facts, folder: Path) -> None:
    """Runs a folder's plans, its predicted largest batch, and a batch larger by one."""
    run_plans(facts, folder)
    largest = max(row["batch"] for row in json.loads((folder / _BATCHES).read_text()))
    for size in (largest, largest + 1):
        way = f"batch {size}; {largest} was predicted to be the largest"
        with facts.section(section="foretold", model=MODELS[0], way=way), facts.work():
            model, batch = gpt2(facts.place, batch=size)
            planned(model, BATCH_BUDGET)
            step(model, model, batch, 0)
            facts.say(section="foretold", model=MODELS[0], way=way, **told_by(model))


def run_plans(facts: Facts, folder: Path) -> None:
    """Runs the plans of a folder; a plan that is refused is written as a fact."""
    for name in MODELS:
        way = f"a laptop's plan at {_SHARE}"
        with facts.section(section="foretold", model=name, way=way), facts.turn():
            solution = remat.Solution.load(folder / f"{_file(name)}.json")
            facts.say(section="foretold", model=name, way=way, **_ran(facts, name, solution))


def _ran(facts: Facts, name: str, solution: remat.Solution) -> dict[str, float]:
    """Runs a plan; returns what was predicted and what was measured."""
    blas_bytes(facts.place)
    base = torch.cuda.memory_allocated() if facts.place.has_cuda else 0
    model, batch = STEPS[name](facts.place)
    remat.wrap(model, solution)
    gradients(model, model, batch)

    row = measured(model, model, batch, facts.place)
    told = {"predicted": solution.peak_bytes, "predicted_step_s": solution.cost_s}
    return {"base": base, **told, **row}


def _file(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")
