"""Plans through Inductor beside `torch.compile`, PyTorch's knapsack and eager plans.

    python -m experiments.inductor [--models NAME ...] [--knapsack SHARE ...] [--device cuda]

Each model runs in these ways:

- `torch.compile` alone;
- PyTorch's `activation_memory_budget` in tenths, and for each peak measured there a plan with that
  budget;
- plans at shares of the peak of `torch.compile`, and at the smallest budget found that both a plan
  and its kernels keep;
- the eager executor at the same shares, and at its least budget.

For each way: the peak of the kernels, predicted before the first step and measured; seconds per
step, the median of rounds in which every way takes one step in turn; seconds until the first step
was done, with an empty cache of kernels (not for the knapsack's settings and the plans beside them,
which share a cache); the largest relative difference of the loss and of a
gradient from those of `torch.compile` alone with the same seed. The eager executor and Inductor
draw different random numbers, so eager gradients are not compared if the model has dropout.

"GPT" has four layers, 16 x 128 tokens and dropout; "GPT, no dropout" is the same without dropout.
"U-Net" has a quarter of the published widths, 4 images of 96 x 96. The others are those of
`experiments.models`, unchanged.

Writes `experiments/results/inductor.json` and `.md` after each model; a model that is named is
measured again, and rows of another commit are dropped.
"""

from __future__ import annotations

import copy
import ctypes
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_cache

import remat
from remat.face.capturing import compile_call

from .bench_rows import warm_up
from .command_line import parser_of
from .environment import environment
from .inductor_tables import COMPILE, EAGER, INDUCTOR, PYTORCH, SHARES, WAYS, Row, pages
from .large_models import UNet
from .models import GPT, MODELS, Workload, make

RESULTS = Path(__file__).parent / "results" / "inductor.json"
SEED = 0
NAMES = (
    "GPT", "GPT, no dropout", "U-Net",
    *(name for name in MODELS if name not in ("GPT", "Llama, tied")),
)  # fmt: skip
_KNAPSACK = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)  # 1 is `torch.compile` alone
_ZERO = 1e-7  # of the largest entry of all gradients: smaller ones are rounding
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's `mallopt`
_ATTEMPTS = 3  # at the least budget: only compiling shows what kernels need beyond a plan

Step = Callable[..., Any]
_LOG = logging.getLogger(__name__)


class Comparison:
    """Rows of one model, and the steps to be timed."""

    def __init__(self, name: str, device: str) -> None:
        torch._dynamo.reset()  # not between ways: their steps would be compiled again when timed
        self.device, self.workload = device, workload(name)
        self.model = self.workload.model.to(device)

        self.kwargs = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value
            for key, value in self.workload.kwargs.items()
        }
        self.is_random = self._is_random()

        self.rows: list[Row] = []
        self.steps: dict[int, tuple[nn.Module, Step]] = {}
        self.expected: list[torch.Tensor] = []

    def _is_random(self) -> bool:
        """Says whether the loss depends on the seed, as it does with dropout."""
        model, losses = copy.deepcopy(self.model), []
        for seed in (SEED, SEED + 1):
            torch.manual_seed(seed)
            with torch.no_grad():
                losses.append(_loss(model(**self.kwargs)))
        return not torch.equal(*losses)

    def add(
        self, row: Row, prepare: Callable[[nn.Module], Step], *, is_compile_timed: bool = True
    ) -> Row:
        """Measures everything of one way except its time."""
        start = time.perf_counter()
        with fresh_cache() if is_compile_timed else nullcontext():
            row = self._add(row, prepare)
        if not is_compile_timed:
            row = self.rows[-1] = replace(row, compile_s=0.0)
        seconds = time.perf_counter() - start
        _LOG.info("%s %s: %.0f s %s", row.way, row.asked, seconds, row.outcome)
        return row

    def _add(self, row: Row, prepare: Callable[[nn.Module], Step]) -> Row:
        model = copy.deepcopy(self.model)
        step = prepare(model)

        start = time.perf_counter()
        try:
            state = self.state(model, step)
        except remat.BudgetError as error:
            least = f"can't be met: {error.minimum_bytes / 2**20:.1f} MiB are known to suffice"
            self.rows.append(replace(row, outcome=least, minimum_bytes=error.minimum_bytes))
            return self.rows[-1]

        row = replace(row, compile_s=time.perf_counter() - start)
        if row.way in (INDUCTOR, EAGER):
            report = remat.report(model)
            row = replace(
                row,
                predicted_bytes=report.kernels_peak_bytes or report.solution.peak_bytes,
                first_bytes=report.measured_peak_bytes or 0,
                overhead=report.solution.overhead,
                search_s=report.solution.wall_s,
            )

        state = self.state(model, step)
        self.expected = self.expected or state
        loss, *gradients = _differences(state, self.expected)
        is_comparable = row.way != EAGER or not self.is_random

        self.steps[len(self.rows)] = (model, step)
        self.rows.append(
            replace(
                row,
                peak_bytes=self.peak_bytes(model, step),
                loss_difference=loss,
                gradient_difference=max(gradients) if is_comparable else None,
            )
        )

        return self.rows[-1]

    def add_least(self, way: str, executor: str) -> None:
        """Adds a row at the least budget found, starting with the one that an error names."""
        budget_bytes = 1
        for _ in range(_ATTEMPTS):
            row = self.add(Row(way, "least", budget_bytes), planned(budget_bytes, executor))
            if not row.outcome:
                return
            budget_bytes = max(budget_bytes + 1, self.rows.pop().minimum_bytes)
        self.rows.append(replace(row, outcome=f"not found in {_ATTEMPTS} attempts"))

    def state(self, model: nn.Module, step: Step) -> list[torch.Tensor]:
        """Loss and gradients of one step."""
        model.zero_grad()
        torch.manual_seed(SEED)
        loss = _loss(step(**self.kwargs))
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    def seconds(self, model: nn.Module, step: Step) -> float:
        """Returns the seconds of one step."""
        model.zero_grad()
        self._synchronize()
        start = time.perf_counter()
        _loss(step(**self.kwargs)).backward()
        self._synchronize()
        return time.perf_counter() - start

    def peak_bytes(self, model: nn.Module, step: Step) -> int:
        """Returns the measured peak, including parameters, buffers and inputs."""
        model.zero_grad()
        inputs = (value for value in self.kwargs.values() if isinstance(value, torch.Tensor))
        tensors = (*model.parameters(), *model.buffers(), *inputs)
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}

        def run() -> None:
            _loss(step(**self.kwargs)).backward()

        return sum(storages.values()) + remat.measure(run, device=self.device).peak_bytes

    def time(self, rounds: int) -> None:
        """Times the steps in turn, so that other load on the machine affects all of them.

        A step that would be compiled again, without the settings of its way, is an error.
        """
        found: dict[int, list[float]] = {place: [] for place in self.steps}
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(rounds):
                for place, (model, step) in self.steps.items():
                    found[place].append(self.seconds(model, step))

        for place, seconds in found.items():
            self.rows[place] = replace(self.rows[place], seconds=statistics.median(seconds))

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def workload(name: str) -> Workload:
    """Returns a model with its batch, the same each time."""
    if name in MODELS and name != "GPT":
        return make(name, seed=SEED)
    torch.manual_seed(SEED)
    if name == "U-Net":
        labels = torch.randint(0, 2, (4, 96, 96))
        return Workload(UNet(width=16), {"images": torch.randn(4, 3, 96, 96), "labels": labels})
    model = GPT(num_layers=4, dropout=0.0 if "no dropout" in name else 0.1)
    return Workload(model, {"ids": torch.randint(0, 512, (16, 128))})


def compare(name: str, device: str, rounds: int, knapsack: Sequence[float]) -> list[Row]:
    """Returns the rows of a model."""
    found = Comparison(name, device)
    whole = found.add(Row(COMPILE, ""), _compiled).peak_bytes

    for way, executor in ((INDUCTOR, "inductor"), (EAGER, "eager")):
        for share in SHARES:
            row = Row(way, f"{share:.0%}", int(share * whole))
            found.add(row, planned(row.budget_bytes, executor))
        found.add_least(way, executor)

    with fresh_cache():  # shared, which halves the time of all this
        peaks = []
        for share in knapsack:
            with functorch_config.patch(activation_memory_budget=share):
                row = found.add(Row(PYTORCH, str(share)), _compiled, is_compile_timed=False)
                peaks.append(row.peak_bytes)
        for peak in dict.fromkeys(peaks):
            row = Row(INDUCTOR, f"{peak / whole:.0%}", peak)
            found.add(row, planned(peak, "inductor"), is_compile_timed=False)

    found.time(rounds)
    return sorted(found.rows, key=lambda row: WAYS.index(row.way))


def planned(budget_bytes: int, executor: str) -> Callable[[nn.Module], Step]:
    """Returns a function that plans a module."""

    def prepare(model: nn.Module) -> Step:
        return remat.checkpoint(
            model,
            budget_bytes,
            executor=executor,
            costs="roofline",
            time_limit_s=20.0,
            plan_cache=False,
        )

    return prepare


def _compiled(model: nn.Module) -> Step:
    """Compiles a model in its own frame; else dynamo would run the first model's code."""
    return compile_call(model, "inductor")


def _loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


def _differences(got: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """Returns each tensor's largest difference, relative to its largest expected entry.

    If that entry is zero apart from rounding (the bias of attention's keys, or one before a batch
    norm), the difference is relative to the largest entry of all gradients.
    """
    largest = [float(tensor.abs().max()) for tensor in expected]
    of_all = max(largest[1:])  # the first is the loss
    return [
        float((one - other).abs().max()) / (size if size > _ZERO * of_all else of_all)
        for one, other, size in zip(got, expected, largest, strict=True)
    ]


def _warm_up_inductor() -> None:
    """Compiles a small step, so that the first model's time does not include imports."""
    with fresh_cache():
        _compiled(nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()


def _keep_freed_memory() -> None:
    """Makes glibc keep freed memory, as CUDA's allocator does.

    Otherwise page faults make a step up to a fifth slower or faster, depending on the order of
    allocations.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            libc.mallopt(option, 2**31 - 1)  # the largest


def main() -> None:
    """Measures, writes the results and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--knapsack", nargs="*", type=float, default=_KNAPSACK, metavar="SHARE")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args()

    logging.basicConfig(format="%(message)s")
    _LOG.setLevel(logging.INFO)
    _keep_freed_memory()
    warm_up()
    _warm_up_inductor()

    made = {**environment(seed=SEED), "device": asked.device, "rounds": asked.rounds}
    made["threads"] = torch.get_num_threads()
    models = _kept(asked.output, made)

    for name in asked.models:
        rows = compare(name, asked.device, asked.rounds, asked.knapsack)
        models[name] = [asdict(row) for row in rows]

        asked.output.write_text(
            json.dumps({"environment": made, "models": models}, indent=1) + "\n"
        )
        asked.output.with_suffix(".md").write_text(pages(models) + "\n")

    print(pages(models))


def _kept(path: Path, made: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Returns the models that were already measured at this commit."""
    if not path.exists():
        return {}
    known = json.loads(path.read_text())
    is_same = known["environment"]["commit"] == made["commit"]
    models: dict[str, list[dict[str, Any]]] = known.get("models", {}) if is_same else {}
    return models


if __name__ == "__main__":
    main()
