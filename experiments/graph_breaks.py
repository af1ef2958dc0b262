"""Real models that `torch.compile` cuts into pieces, planned as one: equal to plain PyTorch, within the budget?

    python -m experiments.graph_breaks [MODEL ...]

Each model at 100 %, 80 % and 60 % of what keeping everything needs: four steps, of which the first finds the pieces; loss,
gradients, buffers and random stream of all four against plain PyTorch; peak predicted, and measured from outside. Gradients of a tensor
that several pieces read are summed piece by piece, which can round otherwise than plain PyTorch: the table then has the largest
relative difference in place of "equal".

Writes `experiments/results/graph_breaks.json` and `.md`.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

import remat

from .comparison import peak_bytes, state_after_step
from .coverage_models import ARCHITECTURES
from .environment import environment
from .models import Workload

RESULTS = Path(__file__).parent / "results" / "graph_breaks.json"
SEED = 0
_NAMES = ("Wav2Vec2", "DETR", "Nystromformer", "BERT, printing", "GPT, data-dependent")
_TIME_LIMIT_S = 5.0


@dataclass(frozen=True)
class Row:
    """One model at one budget.

    Attributes:
        name: of the model.
        budget: as given to `remat.checkpoint`.
        outcome: "equal", "DIFFERENT" or the error's text.
        num_pieces: runs of compiled pieces in a step.
        num_operators: of the joined graph.
        budget_bytes: what the step may hold.
        predicted_bytes: peak of the schedule in the simulator.
        measured_bytes: of a step after the fourth, from outside.
        plain_bytes: of plain PyTorch's step.
        unplanned_bytes: left to what runs between the pieces.
        overhead: extra compute, as a fraction.
        breaks: where the step is cut, and why.
    """

    name: str
    budget: str
    outcome: str
    num_pieces: int = 0
    num_operators: int = 0
    budget_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    plain_bytes: int = 0
    unplanned_bytes: int = 0
    overhead: float = 0.0
    breaks: tuple[str, ...] = ()


def main(names: list[str]) -> None:
    """Measures the models, writes the results and prints the table."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    for name in names or _NAMES:
        plain = _workload(name)
        rows += [_measure(name, plain, budget) for budget in ("100%", "80%", "60%")]
        print(*(f"{row.name} {row.budget} {row.outcome}" for row in rows[-3:]), sep="\n", file=sys.stderr, flush=True)
    made = {**environment(seed=SEED), "threads": torch.get_num_threads()}
    RESULTS.write_text(json.dumps({"environment": made, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(table(rows) + "\n")
    print(table(rows))


class _Hook:
    """What a forward hook of a user does: it looks at data."""

    def __init__(self, then: Callable[[torch.Tensor], object]) -> None:
        self.then = then

    def __call__(self, module: nn.Module, args: object, result: object) -> None:
        first = result[0] if isinstance(result, tuple) else result
        assert isinstance(first, torch.Tensor)
        self.then(first.detach())


def _branch(tensor: torch.Tensor) -> None:
    if tensor.isnan().any():
        raise ValueError("not a number")


def _workload(name: str) -> Workload:
    torch.manual_seed(SEED)
    if name in ARCHITECTURES:
        return ARCHITECTURES[name].make()
    base, _, kind = name.partition(", ")
    made = ARCHITECTURES[{"GPT": "GPT-2"}.get(base, base)].make()
    layers = [module for module in made.model.modules() if type(module).__name__ in ("BertLayer", "GPT2Block")]
    then: Callable[[torch.Tensor], object] = _branch if kind == "data-dependent" else lambda t: print(float(t.norm()), file=sys.stderr)
    layers[len(layers) // 2].register_forward_hook(_Hook(then))
    return made


def _measure(name: str, plain: Workload, budget: str) -> Row:
    torch._dynamo.reset()
    plain = copy.deepcopy(plain)
    planned = Workload(copy.deepcopy(plain.model), plain.kwargs)
    remat.checkpoint(planned.model, budget, time_limit_s=_TIME_LIMIT_S, costs="roofline")
    try:
        difference = max(_difference(planned, plain, seed) for seed in range(4))
    except remat.RematError as error:
        return Row(name, budget, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    report = remat.report(planned.model)
    return Row(
        name,
        budget,
        "equal" if difference == 0 else f"within {difference:.0e}",
        num_pieces=report.num_pieces,
        num_operators=report.graph.num_operators,
        budget_bytes=report.solution.budget_bytes + report.unplanned_bytes,
        predicted_bytes=report.solution.peak_bytes,
        measured_bytes=peak_bytes(planned),
        plain_bytes=peak_bytes(plain),
        unplanned_bytes=report.unplanned_bytes,
        overhead=report.solution.overhead,
        breaks=report.breaks,
    )


def _difference(one: Workload, other: Workload, seed: int) -> float:
    """The largest difference of loss, gradients, buffers and random state, relative to each tensor's largest entry."""
    ends = [state_after_step(workload, seed) for workload in (one, other)]
    pairs = [(a.double(), b.double()) for a, b in zip(*ends, strict=True) if a.numel() and a.shape == b.shape]
    assert all(a.shape == b.shape for a, b in zip(*ends, strict=True)), "a gradient is missing"
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs)


def table(rows: list[Row]) -> str:
    """Returns the rows as Markdown."""
    titles = ("model", "budget", "outcome", "pieces", "operators", "budget, MiB", "predicted", "measured", "plain", "unplanned", "overhead")
    lines = [f"| {' | '.join(titles)} |", "|---|---|---|" + "---:|" * 8]
    for row in rows:
        sizes = (row.budget_bytes, row.predicted_bytes, row.measured_bytes, row.plain_bytes, row.unplanned_bytes)
        cells = [row.name, row.budget, row.outcome, str(row.num_pieces), str(row.num_operators)]
        lines.append(f"| {' | '.join(cells + [f'{size / 2**20:.3f}' for size in sizes])} | {100 * row.overhead:.1f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
