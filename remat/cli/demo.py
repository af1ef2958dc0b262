"""The demo: a GPT trains on the Python documentation, with and without plans.

The same training runs four times from the same seeds, with dropout: plain, with a checkpoint per
block, planned for half of the plain step's activations, and planned for the measured peak of the
checkpointed step. The demo compares the measured peak, the step time, the loss of the last step,
and the largest difference of the first step's gradients from the plain ones.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as checkpoint_block

from remat.core.budget import format_bytes
from remat.core.files import write_whole
from remat.face.api import checkpoint, report, unwrap
from remat.look.plot import Timeline, plot_memory, save
from remat.look.plot_schedule import plot_schedule
from remat.look.report import Report
from remat.look.tables import progress
from remat.run.measure import Measurement, measure

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 6, 128, 4, 128, 16
DROPOUT, LEARNING_RATE, SEED = 0.1, 1e-3, 0
_RECORDINGS = 3  # of a step's memory; the fastest one is used, since it was disturbed least
VOCABULARY = 128  # ASCII
_WAYS = "plain PyTorch", "checkpoint per block", "remat, half", "remat, peak of blocks"


class Block(nn.Module):
    """A transformer block with attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.register_buffer(
            "future", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies attention and a feed-forward layer, each with its residual.

        Input and output are (batch, length, width).
        """
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, HEADS, width // HEADS)
            .permute(2, 0, 3, 1, 4)
        )

        scores = (q @ k.transpose(-1, -2) / (width // HEADS) ** 0.5).masked_fill(
            self.future, float("-inf")
        )
        heads = self.dropout(scores.softmax(-1)) @ v

        x = x + self.dropout(self.out(heads.transpose(1, 2).reshape(batch, length, width)))
        fed: torch.Tensor = self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))
        return x + fed


class GPT(nn.Module):
    """A character-level language model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.dropout = nn.Dropout(DROPOUT)
        self.is_checkpointed = False

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Returns the cross-entropy of next characters; `text` is (batch, length + 1) integers."""
        x, target = text[:, :-1], text[:, 1:]
        x = self.dropout(self.embed(x) + self.position.weight)
        for block in self.blocks:
            x = (
                checkpoint_block(block, x, use_reentrant=False)
                if self.is_checkpointed
                else block(x)
            )

        loss: torch.Tensor = functional.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), target.flatten()
        )
        return loss


@dataclass(frozen=True)
class Run:
    """The results of one of the four training runs.

    Attributes:
        name: its name in the table.
        peak_bytes: measured in one step, with parameters, buffers and inputs.
        step_s: median time of forward and backward.
        step_ratio: median over the steps of its time divided by the plain step's.
        loss: the loss of the last step.
        gradient_difference: largest absolute difference of the first step's gradients from the
            plain ones.
        timeline: memory over the measured step.
    """

    name: str
    peak_bytes: int
    step_s: float
    step_ratio: float
    loss: float
    gradient_difference: float
    timeline: Measurement


@dataclass
class _Trained:
    """What is noted while a model trains: step times, the last loss, the first gradients."""

    times_s: list[float] = field(default_factory=list)
    loss: float = 0.0
    first: list[torch.Tensor] = field(default_factory=list)


def run_demo(output: Path, steps: int = 20) -> None:
    """Trains four ways, prints a table, and writes two pictures and the numbers into `output`."""
    output.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console()
    console.print(
        f"A GPT with {LAYERS} layers trains on the Python documentation: {steps} steps of {BATCH} "
        f"x {LENGTH} characters on {device}."
    )

    text = _text()
    sample = next(_batches(text, device))
    plain, blocks, half, equal = (_model(device) for _ in range(4))
    blocks.is_checkpointed = True

    held = _resident_bytes(plain, sample)
    budgets = _budgets(held, plain, blocks, sample)
    for model, budget_bytes in zip((half, equal), budgets, strict=True):
        with progress(f"planning for {format_bytes(budget_bytes)}"):
            _measure(checkpoint(model, budget_bytes), sample)
    reports = [report(model) for model in (half, equal)]

    with progress("training four ways, one step of each in turn"):
        ways = zip(_WAYS, (plain, blocks, half, equal), strict=True)
        runs = _train(list(ways), steps, device, text)

    console.print(_table(runs, budgets))
    for planned in reports:
        console.print(_plan_line(planned))

    pictures = output / "memory.png", output / "schedule.png"
    _draw(runs, held, reports[0], pictures)
    numbers = output / "demo.json"
    record = json.dumps(_record(runs, reports, device, steps), indent=1)
    write_whole(numbers, f"{record}\n".encode())
    console.print(f"Pictures: {pictures[0]}, {pictures[1]}. Numbers: {numbers}.")

    for model in (half, equal):
        unwrap(model)


def _budgets(held: int, plain: GPT, blocks: GPT, sample: torch.Tensor) -> tuple[int, int]:
    """Measures a plain and a checkpointed step, and returns the budgets of the two plans."""
    with progress("measuring the plain step, and one with a checkpoint per block"):
        half = held + _measure(plain, sample).peak_bytes // 2
        return half, held + _measure(blocks, sample).peak_bytes


def _plan_line(planned: Report) -> str:
    solution = planned.solution
    return (
        f"Within {format_bytes(solution.budget_bytes)}, the plan computes "
        f"{100 * solution.overhead:.1f} % more. In this order of operators, every schedule "
        f"computes at least {100 * solution.overhead_bound:.1f} % more ({solution.bound_source}). "
        f"Planned in {solution.wall_s:.1f} s."
    )


def _draw(runs: list[Run], held: int, planned: Report, pictures: tuple[Path, Path]) -> None:
    """Draws memory over time, and the schedule of the first plan."""
    budget_bytes = planned.solution.budget_bytes
    memory = plot_memory(
        [_timeline(run, held) for run in runs],
        budget_bytes=budget_bytes,
        x_label="time",
        title="One training step, four ways",
    )
    save(memory, pictures[0])

    schedule = plot_schedule(
        planned.graph, planned.schedule, budget_bytes=budget_bytes, title="The schedule that ran"
    )
    save(schedule, pictures[1])


def _record(runs: list[Run], reports: list[Report], device: str, steps: int) -> dict[str, object]:
    """Returns the content of `demo.json`: machine, plans and runs."""
    plans = [
        {
            "budget_bytes": planned.solution.budget_bytes,
            "predicted_peak_bytes": planned.solution.peak_bytes,
            "overhead": planned.solution.overhead,
            "gap": planned.solution.gap,
            "planned_s": planned.solution.wall_s,
        }
        for planned in reports
    ]
    rows = [{key: value for key, value in asdict(run).items() if key != "timeline"} for run in runs]

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "steps": steps,
        "seed": SEED,
        "plans": plans,
        "runs": rows,
    }


def _text() -> torch.Tensor:
    """Returns Python's documentation for `help()` as ASCII codes; shape (num_characters,)."""
    from pydoc_data import topics

    characters = "".join(topics.topics.values()).encode("ascii", "replace")
    return torch.from_numpy(np.frombuffer(characters, np.uint8).astype(np.int64))


def _batches(text: torch.Tensor, device: str) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    while True:
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
        yield torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()]).to(
            device
        )


def example_batch() -> torch.Tensor:
    """Returns one batch of the demo's text; shape (batch, length + 1), integers."""
    return next(_batches(_text(), "cpu"))


def _model(device: str) -> GPT:
    torch.manual_seed(SEED)
    return GPT().to(device)


def _train(ways: list[tuple[str, GPT]], steps: int, device: str, text: torch.Tensor) -> list[Run]:
    """Trains all models, one step of each in turn, so that other load affects them equally."""
    optimizers = [torch.optim.AdamW(model.parameters(), LEARNING_RATE) for _, model in ways]
    trained = [_Trained() for _ in ways]
    batches = _batches(text, device)

    for step in range(steps):
        batch = next(batches)
        for (_, model), one, optimizer in zip(ways, trained, optimizers, strict=True):
            torch.manual_seed(SEED + step)  # the same dropout for all models
            start = time.perf_counter()
            one.loss = _step(model, batch, device)
            one.times_s.append(time.perf_counter() - start)
            if step == 0:
                one.first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()

    return [
        _run(name, model, batch, one, trained[0])
        for (name, model), one in zip(ways, trained, strict=True)
    ]


def _run(name: str, model: GPT, batch: torch.Tensor, trained: _Trained, plain: _Trained) -> Run:
    """Returns a training's results, compared with the plain one; measures one more step."""
    measured = min(
        (_measure(model, batch) for _ in range(_RECORDINGS)), key=lambda one: one.times_s[-1]
    )
    pairs = zip(trained.times_s, plain.times_s, strict=True)
    gradients = zip(trained.first, plain.first, strict=True)
    return Run(
        name=name,
        peak_bytes=_resident_bytes(model, batch) + measured.peak_bytes,
        step_s=statistics.median(trained.times_s),
        step_ratio=statistics.median(mine / other for mine, other in pairs),
        loss=trained.loss,
        gradient_difference=max((a - b).abs().max().item() for a, b in gradients),
        timeline=measured,
    )


def _step(model: GPT, batch: torch.Tensor, device: str) -> float:
    model.zero_grad(set_to_none=True)
    loss = model(batch)
    loss.backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return float(loss.detach())


def _measure(model: GPT, batch: torch.Tensor) -> Measurement:
    """Measures the memory of one step, after a step in which the model may be planned."""
    torch.manual_seed(SEED)
    _step(model, batch, batch.device.type)
    model.zero_grad(set_to_none=True)
    measured = measure(lambda: model(batch).backward(), device=batch.device.type)
    model.zero_grad(set_to_none=True)
    return measured


def _resident_bytes(model: nn.Module, batch: torch.Tensor) -> int:
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*model.parameters(), *model.buffers(), batch)
    }
    return sum(storages.values())


def _table(runs: list[Run], budgets: tuple[int, int]) -> Table:
    table = Table(
        title=(
            f"budgets {format_bytes(budgets[0])}, half of the plain step's activations, and "
            f"{format_bytes(budgets[1])}, the peak with a checkpoint per block"
        ),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )

    table.add_column("")
    for heading in ("measured peak", "step", "loss", "gradient difference"):
        table.add_column(heading, justify="right")

    for run in runs:
        share = f"{format_bytes(run.peak_bytes)}, {100 * run.peak_bytes / runs[0].peak_bytes:.0f} %"
        pace = f"{1000 * run.step_s:.0f} ms, {run.step_ratio:.2f} x"
        table.add_row(
            run.name,
            share,
            pace,
            f"{run.loss:.6f}",
            "-" if run is runs[0] else f"{run.gradient_difference:g}",
        )

    return table


def _timeline(run: Run, held: int) -> Timeline:
    edges = np.array([*run.timeline.times_s, run.timeline.times_s[-1] * 1.001])
    return Timeline(run.name, edges, np.array(run.timeline.bytes_held, np.int64) + held, None, held)
