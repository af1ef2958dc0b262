"""Are models that `torch.compile` cuts into pieces planned right, and within budget?

    python -m experiments.graph_breaks [MODEL ...]

Each model runs four steps at 100 %, 80 % and 60 % of what keeping everything needs; the first step
finds the pieces, which are planned as one step. Loss, gradients, buffers and random state of all
four are compared with plain PyTorch, and with the same pieces compiled by PyTorch's own
`aot_eager`, which keeps everything. The peak is predicted, and measured from outside.

If several pieces read a tensor, its gradient is summed piece by piece; plain PyTorch sums it reader
by reader: `(residual + value) + key` or `residual + (value + key)`. The two round differently, in
every backend that runs those pieces. So a planned step is right if it equals `aot_eager` to the
bit. In float64 the difference of `aot_eager` from plain PyTorch is 2^29 times smaller: it is
rounding alone. A wrong mask or a stale value would make the same difference in float64.

Writes `experiments/results/graph_breaks.json` and `.md`.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

import remat
from remat.face.capturing import compile_call
from remat.torch_border.dynamo import capture_settings

from .command_line import add_names, parser_of
from .comparison import peak_bytes, state_after_step
from .coverage_models import ARCHITECTURES
from .environment import environment
from .models import Workload

RESULTS = Path(__file__).parent / "results" / "graph_breaks.json"
SEED = 0
_NAMES = ("Wav2Vec2", "DETR", "Nystromformer", "BERT, printing", "GPT, data-dependent")
_TIME_LIMIT_S = 5.0
_EQUAL = "equal"
_DIFFERENT = "DIFFERENT"


@dataclass(frozen=True)
class Row:
    """One model at one budget.

    Attributes:
        name: the model's name.
        budget: as given to `remat.checkpoint`.
        outcome: "equal" to plain PyTorch to the bit, "equal to aot_eager" to the bit, "DIFFERENT"
            from both, or the error's text.
        num_rounded: tensors of a step that differ from plain PyTorch's.
        num_tensors: loss, gradients and buffers.
        difference: the largest difference from plain PyTorch, relative to its tensor's largest
            entry.
        difference_in_float64: the same for `aot_eager` in float64.
        num_pieces: runs of compiled pieces in a step.
        num_operators: operators of the joined graph.
        budget_bytes: the limit of the step.
        predicted_bytes: peak of the schedule in the simulator.
        measured_bytes: peak of a step after the fourth, measured from outside.
        plain_bytes: the same for plain PyTorch's step.
        unplanned_bytes: reserved for the code between the pieces.
        overhead: extra compute, as a fraction.
        breaks: where the step is cut, and why.
    """

    name: str
    budget: str
    outcome: str
    num_rounded: int = 0
    num_tensors: int = 0
    difference: float = 0.0
    difference_in_float64: float = 0.0
    num_pieces: int = 0
    num_operators: int = 0
    budget_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    plain_bytes: int = 0
    unplanned_bytes: int = 0
    overhead: float = 0.0
    breaks: tuple[str, ...] = ()


def main() -> None:
    """Measures the models, writes the results and prints the table."""
    parser = parser_of(__doc__)
    add_names(parser, _NAMES, "MODEL")
    names = parser.parse_args().names

    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    rows: list[Row] = []
    for name in names:
        plain = _workload(name)
        exact = _difference_in_float64(plain)
        rows += [
            replace(_measure(name, plain, budget), difference_in_float64=exact)
            for budget in ("100%", "80%", "60%")
        ]

        print(
            *(f"{row.name} {row.budget} {row.outcome}" for row in rows[-3:]),
            sep="\n",
            file=sys.stderr,
            flush=True,
        )

    made = {**environment(seed=SEED), "threads": torch.get_num_threads()}
    RESULTS.write_text(
        json.dumps({"environment": made, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
    )
    RESULTS.with_suffix(".md").write_text(table(rows) + "\n")
    print(table(rows))


class _Hook:
    """A user's forward hook that looks at data."""

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
        made = ARCHITECTURES[name].make()
        # with smaller images, plans save no memory
        images = {key: torch.randn(8, 3, 64, 64) for key in made.kwargs if key == "pixel_values"}
        return Workload(made.model, {**made.kwargs, **images})

    base, _, kind = name.partition(", ")
    made = ARCHITECTURES[{"GPT": "GPT-2"}.get(base, base)].make()
    layers = [
        module
        for module in made.model.modules()
        if type(module).__name__ in ("BertLayer", "GPT2Block")
    ]

    then: Callable[[torch.Tensor], object] = (
        _branch if kind == "data-dependent" else lambda t: print(float(t.norm()), file=sys.stderr)
    )
    layers[len(layers) // 2].register_forward_hook(_Hook(then))
    return made


def _measure(name: str, plain: Workload, budget: str) -> Row:
    torch._dynamo.reset()
    planned = Workload(_checkpointed(plain.model, budget), plain.kwargs)
    try:
        found = compare(planned, copy.deepcopy(plain), in_pieces(plain))
    except remat.RematError as error:
        also = "" if _is_compiled_by_torch(plain) else "; torch.compile alone fails as well"
        return Row(
            name, budget, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}{also}"
        )

    report = remat.report(planned.model)

    return Row(
        name,
        budget,
        found.outcome,
        num_rounded=found.num_rounded,
        num_tensors=found.num_tensors,
        difference=found.largest,
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


def _checkpointed(model: nn.Module, budget: str) -> nn.Module:
    return remat.checkpoint(
        copy.deepcopy(model), budget, time_limit_s=_TIME_LIMIT_S, costs="roofline"
    )


class _Compiled(nn.Module):
    """A model in the pieces that planning finds, run by another backend."""

    def __init__(self, model: nn.Module, backend: str) -> None:
        super().__init__()
        self.model, self.run = model, compile_call(model, backend, is_whole=False)

    def forward(self, **batch: Any) -> Any:
        with capture_settings():
            return self.run(**batch)


def _is_compiled_by_torch(plain: Workload) -> bool:
    """True if dynamo can run the model, in pieces of its choice."""
    torch._dynamo.reset()
    try:
        torch.compile(copy.deepcopy(plain.model), backend="eager")(**plain.kwargs)
    except TorchDynamoException:
        return False
    return True


def in_pieces(plain: Workload) -> Workload:
    """Returns a copy of a workload that `aot_eager` runs, in the pieces that planning finds."""
    return Workload(_Compiled(copy.deepcopy(plain.model), "aot_eager"), plain.kwargs)


def _difference_in_float64(plain: Workload) -> float:
    """Returns the difference of `aot_eager` from plain PyTorch when rounding hardly matters.

    0.0 if `aot_eager` can't run the model.
    """
    torch._dynamo.reset()
    kwargs = {
        name: value.double() if _is_float(value) else value for name, value in plain.kwargs.items()
    }
    doubled = Workload(copy.deepcopy(plain.model).double(), kwargs)

    try:
        pieces = in_pieces(doubled)
        return max(_difference(a, b) for seed in range(2) for a, b in _pairs(pieces, doubled, seed))
    except TorchDynamoException:
        return 0.0


def _pairs(one: Workload, other: Workload, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs the tensors of both steps, without gradients that only one has.

    `aot_eager` returns zeros for gradients that nothing asks for.
    """
    ends = zip(state_after_step(one, seed), state_after_step(other, seed), strict=True)
    return [(a, b) for a, b in ends if a.numel() and a.shape == b.shape]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@dataclass(frozen=True)
class Comparison:
    """The results of four planned steps, compared with plain ones.

    Attributes:
        outcome: "equal", "equal to aot_eager" or "DIFFERENT".
        num_rounded: tensors that differ from plain PyTorch's.
        num_tensors: all tensors.
        largest: the largest relative difference.
    """

    outcome: str
    num_rounded: int
    num_tensors: int
    largest: float


def compare(planned: Workload, plain: Workload, in_pieces: Workload) -> Comparison:
    """Runs four steps of each and compares their results, tensor by tensor."""
    rounded: set[int] = set()
    is_same, largest, num_tensors = True, 0.0, 0

    for seed in range(4):
        ours, theirs, pieces = (
            state_after_step(workload, seed) for workload in (planned, plain, in_pieces)
        )

        num_tensors = len(ours)
        for place, (a, b, c) in enumerate(zip(ours, theirs, pieces, strict=True)):
            assert a.shape == b.shape, "a gradient is missing"
            # aot_eager returns zeros for a gradient that nothing asks for
            is_same &= torch.equal(a, c) or (not a.numel() and not c.any())
            if not torch.equal(a, b):
                rounded.add(place)
                largest = max(largest, _difference(a, b))

    outcome = _EQUAL if not rounded else "equal to aot_eager" if is_same else _DIFFERENT
    return Comparison(outcome, len(rounded), num_tensors, largest)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest entry (at least 1e-3).

    Some gradients are zero apart from rounding, such as that of a bias before a softmax.
    """
    return float(
        (one.double() - other.double()).abs().max() / other.double().abs().max().clamp_min(1e-3)
    )


def table(rows: list[Row]) -> str:
    """Returns the rows as Markdown."""
    titles = [
        "model", "budget", "outcome", "rounded differently from plain", "difference", "in float64",
        "pieces", "operators", "budget, MiB", "predicted",
        "measured", "plain", "unplanned", "overhead",
    ]  # fmt: skip

    lines = [f"| {' | '.join(titles)} |", "|---|---|---|" + "---:|" * 11]
    for row in rows:
        sizes = (
            row.budget_bytes,
            row.predicted_bytes,
            row.measured_bytes,
            row.plain_bytes,
            row.unplanned_bytes,
        )

        if not row.num_pieces:
            lines.append(f"| {row.name} | {row.budget} | {row.outcome} |{' |' * 11}")
            continue

        rounded = [
            f"{row.num_rounded} of {row.num_tensors} tensors",
            f"{row.difference:.0e}",
            f"{row.difference_in_float64:.0e}",
        ]

        cells = [
            row.name,
            row.budget,
            row.outcome,
            *rounded,
            str(row.num_pieces),
            str(row.num_operators),
        ]

        lines.append(
            f"| {' | '.join(cells + [f'{size / 2**20:.3f}' for size in sizes])} | "
            f"{100 * row.overhead:.1f} % |"
        )

    return "\n".join(lines)


if __name__ == "__main__":
    main()
