"""Plans through Inductor beside `torch.compile` alone, and beside PyTorch's own `activation_memory_budget`, at the same peak.

    python -m experiments.inductor [--device cuda] [--layers N] [--batch N]

A GPT with dropout. `torch.compile` alone first; then PyTorch's knapsack at several of its budgets, and for each the plan whose
budget in bytes is the peak that the knapsack was measured at; and plans at 80 %, 60 % and 45 % of the peak of `torch.compile`.
Each: measured peak, seconds a step (median), and the largest relative difference of a gradient from that of `torch.compile` alone.

Writes `experiments/results/inductor.json` and `.md`.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch._functorch import config as functorch_config

import remat

from .environment import environment
from .models import GPT

RESULTS = Path(__file__).parent / "results" / "inductor.json"
SEED = 0
_STEPS = 7
_KNAPSACK = (0.75, 0.5, 0.25)
_SHARES = (0.8, 0.6, 0.45)


@dataclass(frozen=True)
class Row:
    """One way to run the step.

    Attributes:
        way: who decided what is kept.
        asked: the budget it was given.
        peak_bytes: measured, everything that the step holds.
        seconds: of a step, forward and backward; the median.
        largest_difference: of a gradient from `torch.compile` alone, relative to the gradient's largest entry.
        overhead: predicted extra compute of a plan.
        outcome: empty, or why there is no number.
    """

    way: str
    asked: str
    peak_bytes: int = 0
    seconds: float = 0.0
    largest_difference: float = 0.0
    overhead: float = 0.0
    outcome: str = ""


class Bench:
    """A model, its batch, and what `torch.compile` alone makes of them."""

    def __init__(self, device: str, layers: int, batch: int) -> None:
        torch.manual_seed(SEED)
        self.device = device
        self.model = GPT(num_layers=layers, dropout=0.1).to(device)
        self.ids = torch.randint(0, 512, (batch, 128), device=device)
        self.expected: list[torch.Tensor] = []

    def row(self, way: str, asked: str, prepare: Callable[[nn.Module], Callable[..., torch.Tensor]]) -> Row:
        """Measures one way: its gradients, its peak, its time."""
        torch._dynamo.reset()
        model = copy.deepcopy(self.model)
        try:
            step = prepare(model)
            gradients = self._gradients(model, step)
            gradients = self._gradients(model, step)  # a plan that held too much is made again at the second step
        except remat.BudgetError as error:
            return Row(way, asked, outcome=f"BudgetError: {str(error)[:100]}")
        self.expected = self.expected or gradients
        pairs = zip(gradients, self.expected, strict=True)
        difference = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs)
        seconds = statistics.median(self._seconds(model, step) for _ in range(_STEPS))
        planned = remat.report(model).solution.overhead if way == "remat" else 0.0
        return Row(way, asked, self._peak_bytes(model, step), seconds, difference, planned)

    def _gradients(self, model: nn.Module, step: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(SEED)
        step(self.ids).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def _seconds(self, model: nn.Module, step: Callable[..., torch.Tensor]) -> float:
        model.zero_grad()
        self._synchronize()
        start = time.perf_counter()
        step(self.ids).backward()
        self._synchronize()
        return time.perf_counter() - start

    def _peak_bytes(self, model: nn.Module, step: Callable[..., torch.Tensor]) -> int:
        model.zero_grad()
        held = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers(), self.ids))
        return held + remat.measure(lambda: step(self.ids).backward(), device=self.device).peak_bytes

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    """Measures, writes the results and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    asked = parser.parse_args()
    bench = Bench(asked.device, asked.layers, asked.batch)
    rows = [bench.row("torch.compile", "", torch.compile)]
    for share in _KNAPSACK:
        with functorch_config.patch(activation_memory_budget=share):
            rows.append(bench.row("activation_memory_budget", str(share), torch.compile))
        rows.append(bench.row("remat", f"{rows[-1].peak_bytes} B", _planned(rows[-1].peak_bytes)))
    for share in _SHARES:
        rows.append(bench.row("remat", f"{share:.0%} of torch.compile", _planned(int(share * rows[0].peak_bytes))))
    made = {**environment(seed=SEED), "device": asked.device, "layers": asked.layers, "batch": asked.batch}
    RESULTS.write_text(json.dumps({"environment": made, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(table(rows) + "\n")
    print(table(rows))


def _planned(budget_bytes: int) -> Callable[[nn.Module], Callable[..., torch.Tensor]]:
    def prepare(model: nn.Module) -> Callable[..., torch.Tensor]:
        return remat.checkpoint(model, budget_bytes, executor="inductor", costs="roofline", time_limit_s=20.0, plan_cache=False)

    return prepare


def table(rows: list[Row]) -> str:
    """Returns the rows as Markdown."""
    first = rows[0]
    lines = [
        "| decided by | asked | measured peak | step | largest gradient difference | predicted overhead |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        if row.outcome:
            lines.append(f"| {row.way} | {row.asked} | {row.outcome} | | | |")
            continue
        peak = f"{row.peak_bytes / 2**20:.1f} MiB, {row.peak_bytes / first.peak_bytes:.0%}"
        step = f"{1e3 * row.seconds:.0f} ms, {row.seconds / first.seconds:.2f} x"
        lines.append(f"| {row.way} | {row.asked} | {peak} | {step} | {row.largest_difference:.1e} | {100 * row.overhead:.1f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
