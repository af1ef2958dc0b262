"""Plans through Inductor beside `torch.compile` alone, and beside PyTorch's own
`activation_memory_budget`, at the same peak.

    python -m experiments.inductor [--device cuda] [--layers N] [--batch N] [--rounds N]

A GPT with dropout. `torch.compile` alone first; then PyTorch's knapsack at several of its budgets,
and for each the plan whose budget in bytes is the peak that the knapsack was measured at; and plans
at 80 %, 65 % and 50 % of the peak of `torch.compile`. Each: measured peak; seconds a step, the
median of rounds in which every way takes one step in turn; the largest relative difference of the
loss and of a gradient from those of `torch.compile` alone under the same seed, and of a gradient
without dropout. Where the loss is the same, and a gradient is only without dropout, the backward
drew its masks anew: that gradient is of another function than the loss.

Writes `experiments/results/inductor.json` and `.md`.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch._functorch import config as functorch_config

import remat
from remat.face.capturing import compile_call

from .environment import environment
from .models import GPT

RESULTS = Path(__file__).parent / "results" / "inductor.json"
SEED = 0
_KNAPSACK = (0.75, 0.5, 0.25)
_SHARES = (0.8, 0.65, 0.5)

Step = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One way to run the step.

    Attributes:
        way: who decided what is kept.
        asked: the budget it was given.
        peak_bytes: measured, everything that the step holds.
        seconds: of a step, forward and backward; the median.
        loss_difference: from `torch.compile` alone, relative.
        gradient_difference: of a gradient from `torch.compile` alone, relative to the gradient's
            largest entry.
        without_dropout: the same for a model without dropout.
        overhead: predicted extra compute of a plan.
        outcome: empty, or why there is no number.
    """

    way: str
    asked: str
    peak_bytes: int = 0
    seconds: float = 0.0
    loss_difference: float = 0.0
    gradient_difference: float = 0.0
    without_dropout: float = 0.0
    overhead: float = 0.0
    outcome: str = ""


class Bench:
    """A model, its batch, and what `torch.compile` alone makes of them."""

    def __init__(self, device: str, layers: int, batch: int, dropout: float) -> None:
        torch.manual_seed(SEED)
        self.device = device
        self.model = GPT(num_layers=layers, dropout=dropout).to(device)
        self.ids = torch.randint(0, 512, (batch, 128), device=device)
        self.expected = self.state(*self.prepared(_compiled))

    def prepared(self, prepare: Callable[[nn.Module], Step]) -> tuple[nn.Module, Step]:
        """Returns a copy of the model and its step, compiled.

        A plan whose kernels held too much is made again in the second step.
        """
        model = copy.deepcopy(self.model)
        step = prepare(model)
        for _ in range(2):
            self.state(model, step)
        return model, step

    def state(self, model: nn.Module, step: Step) -> list[torch.Tensor]:
        """Loss and gradients of one step."""
        model.zero_grad()
        torch.manual_seed(SEED)
        loss = step(self.ids)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    def differences(self, model: nn.Module, step: Step) -> tuple[float, float]:
        """The largest relative difference of the loss, and of a gradient, from `torch.compile`
        alone.
        """
        pairs = zip(self.state(model, step), self.expected, strict=True)
        loss, *gradients = [
            float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs
        ]
        return loss, max(gradients)

    def seconds(self, model: nn.Module, step: Step) -> float:
        """Of one step."""
        model.zero_grad()
        self._synchronize()
        start = time.perf_counter()
        step(self.ids).backward()
        self._synchronize()
        return time.perf_counter() - start

    def peak_bytes(self, model: nn.Module, step: Step) -> int:
        """Measured, parameters, buffers and inputs included."""
        model.zero_grad()
        held = sum(
            t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers(), self.ids)
        )
        return (
            held + remat.measure(lambda: step(self.ids).backward(), device=self.device).peak_bytes
        )

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


class Comparison:
    """Rows, and the steps that they are timed by."""

    def __init__(self, device: str, layers: int, batch: int) -> None:
        self.bench, self.plain = (Bench(device, layers, batch, dropout) for dropout in (0.1, 0.0))
        self.rows: list[Row] = []
        self.steps: dict[int, tuple[nn.Module, Step]] = {}

    def add(self, way: str, asked: str, prepare: Callable[[nn.Module], Step]) -> Row:
        """Measures all of one way but its time."""
        try:
            model, step = self.bench.prepared(prepare)
            without = self.plain.differences(*self.plain.prepared(prepare))[1]
        except remat.BudgetError as error:
            self.rows.append(
                Row(
                    way,
                    asked,
                    outcome="can't be met: the least known to do is "
                    f"{error.minimum_bytes / 2**20:.1f} MiB",
                )
            )
            return self.rows[-1]
        loss, gradient = self.bench.differences(model, step)
        overhead = remat.report(model).solution.overhead if way == "remat" else 0.0
        self.steps[len(self.rows)] = (model, step)
        peak_bytes = self.bench.peak_bytes(model, step)
        self.rows.append(Row(way, asked, peak_bytes, 0.0, loss, gradient, without, overhead))
        return self.rows[-1]

    def time(self, rounds: int) -> None:
        """Times the steps in turn, so that whatever else the machine does meets them all."""
        found: dict[int, list[float]] = {place: [] for place in self.steps}
        for _ in range(rounds):
            for place, (model, step) in self.steps.items():
                found[place].append(self.bench.seconds(model, step))
        for place, seconds in found.items():
            self.rows[place] = replace(self.rows[place], seconds=statistics.median(seconds))


def main() -> None:
    """Measures, writes the results and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    found = Comparison(asked.device, asked.layers, asked.batch)
    first = found.add("torch.compile", "", _compiled)
    for share in _KNAPSACK:
        with functorch_config.patch(activation_memory_budget=share):
            row = found.add("activation_memory_budget", str(share), _compiled)
        found.add("remat", f"{row.peak_bytes / 2**20:.1f} MiB", _planned(row.peak_bytes))
    for share in _SHARES:
        found.add("remat", f"{share:.0%} of torch.compile", _planned(int(share * first.peak_bytes)))
    found.time(asked.rounds)
    made = {
        **environment(seed=SEED),
        "device": asked.device,
        "layers": asked.layers,
        "batch": asked.batch,
        "rounds": asked.rounds,
    }
    made["threads"] = torch.get_num_threads()
    RESULTS.write_text(
        json.dumps({"environment": made, "rows": [asdict(row) for row in found.rows]}, indent=1)
        + "\n"
    )
    RESULTS.with_suffix(".md").write_text(table(found.rows) + "\n")
    print(table(found.rows))


def _compiled(model: nn.Module) -> Step:
    """A frame of its own for each model: dynamo would run the first one's code for all."""
    return compile_call(model, "inductor")


def _planned(budget_bytes: int) -> Callable[[nn.Module], Step]:
    def prepare(model: nn.Module) -> Step:
        return remat.checkpoint(
            model,
            budget_bytes,
            executor="inductor",
            costs="roofline",
            time_limit_s=20.0,
            plan_cache=False,
        )

    return prepare


def table(rows: list[Row]) -> str:
    """Returns the rows as Markdown."""
    first = rows[0]
    titles = (
        "decided by",
        "asked",
        "measured peak",
        "step",
        "loss",
        "gradient",
        "gradient without dropout",
        "predicted overhead",
    )
    lines = [f"| {' | '.join(titles)} |", "|---|---|" + "---:|" * 6]
    for row in rows:
        if row.outcome:
            lines.append(f"| {row.way} | {row.asked} | {row.outcome} | | | | | |")
            continue
        peak = f"{row.peak_bytes / 2**20:.1f} MiB, {row.peak_bytes / first.peak_bytes:.0%}"
        step = f"{1e3 * row.seconds:.0f} ms, {row.seconds / first.seconds:.2f} x"
        differs = " | ".join(
            f"{d:.0e}" for d in (row.loss_difference, row.gradient_difference, row.without_dropout)
        )
        lines.append(
            f"| {row.way} | {row.asked} | {peak} | {step} | {differs} | "
            f"{100 * row.overhead:.1f} % |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
