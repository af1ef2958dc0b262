"""What a quarter of an hour on a GPU shows: one JSON line per fact, written at once.

    python -m experiments.gpu_run [--only SECTION ...] [--seconds 420] [--output FILE]
    python -m experiments.gpu_run --device cpu --tiny          a rehearsal
    python -m experiments.gpu_run --foretell H100              forecasts, on a machine without a GPU
    python -m experiments.gpu_run --expect H100                the allocator's model, without a GPU
    python -m experiments.gpu_run --show                       tables and pictures of the results

An interrupted run loses nothing; what fails or takes too long is written as a fact, and the next
way or section runs.
Sections:

- environment: the card, cuBLAS's bytes, the time of one launch against one of a thousand.
- correct: loss, gradients and random state against plain PyTorch, beside plain against itself.
- medium, vision, large, billions: plain, plans at 100 to 40 % and the least budget, checkpoints per
  block, selective checkpoints, and plans with the measured peaks of both: predicted and measured
  peaks (requested, allocated, reserved), step times.
- autocast, autocast_vision, autocast_billions, autocast_large: the same models in float32 under
  autocast.
- oom: a batch that plain PyTorch can't run in 20 GiB of the card, but a plan can.
- foretold: plans made without a GPU, run on the card; the predicted largest batch, and one larger.
- fused, fused_dropout, fused_vision, pieces: `torch.compile`, `activation_memory_budget` and plans
  through Inductor, also with the measured peaks of the former; `pieces` is a step that
  `torch.compile` cuts.
- operators: the memory of each operator on the card, where it differs from what a plan counts.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import remat
from experiments.command_line import parser_of
from experiments.environment import environment as where
from experiments.gpu import by_operator, expected, forecast, fused, steps, tables
from experiments.gpu.comparing import (
    CHECKPOINTS,
    LEAST,
    TWICE,
    Named,
    at_the_peaks_of,
    compare,
    in_autocast,
    plain,
    plans,
)
from experiments.gpu.lanes import run_side_by_side
from experiments.gpu.measuring import (
    Facts,
    blas_bytes,
    gradients,
    largest_difference,
    measured,
    step,
    told,
)
from experiments.gpu.progress import Progress
from experiments.gpu.steps import Place
from remat.solvers.auto.minimum import minimum
from remat.solvers.core.compiled import is_ready
from remat.solvers.search.annealing import anneal
from remat.tracers.synthetic import random_layered

RESULTS = Path(__file__).parent / "results" / "gpu_run.jsonl"
FORECAST = RESULTS.with_name("gpu_forecast")
EXPECTED = RESULTS.with_name("gpu_allocator.json")
_OOM_BYTES = 20 << 30  # the part of the card that section `oom` may use


def environment(facts: Facts) -> None:
    """The machine, and the memory that it holds besides every step's."""
    place = facts.place
    held = {"blas_bytes": blas_bytes(place), "blas_bytes_again": blas_bytes(place)}
    facts.say(section="environment", device=place.device, **held, **where(seed=0))

    if place.has_cuda:
        x = torch.ones(1 << 20, device="cuda")
        _launches(x, 2000)
        one_us, of_many_us = _launches(x, 1), _launches(x, 1000)
        facts.say(section="clock", one_us=one_us, of_a_thousand_us=of_many_us)

    if place.has_cuda:
        _say_attention_kernels(facts)


def _say_attention_kernels(facts: Facts) -> None:
    """Writes which attention kernel torch chooses here, for plans that are made elsewhere."""
    facts.say(section="attention", priority=list(torch._C._get_sdp_priority_order()))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in (32, 64, 72, 128, 160, 256, 512):
            q = torch.zeros(2, 4, 64, width, dtype=dtype, device="cuda", requires_grad=True)
            mask = torch.zeros(2, 1, 64, 64, dtype=dtype, device="cuda")

            chosen = {
                "plain": torch._fused_sdp_choice(q, q, q),
                "causal": torch._fused_sdp_choice(q, q, q, is_causal=True),
                "dropout": torch._fused_sdp_choice(q, q, q, dropout_p=0.1),
                "mask": torch._fused_sdp_choice(q, q, q, attn_mask=mask),
                "bool mask": torch._fused_sdp_choice(q, q, q, attn_mask=mask > 0),
                "mask, dropout": torch._fused_sdp_choice(q, q, q, attn_mask=mask, dropout_p=0.1),
                "grouped": torch._fused_sdp_choice(q, q[:, :2], q[:, :2], enable_gqa=True),
            }
            facts.say(section="attention", dtype=str(dtype), width=width, **chosen)


def _launches(x: torch.Tensor, count: int) -> float:
    """Microseconds per launch, of `count` launches between two events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        x + 1
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count * 1e3


def correct(facts: Facts) -> None:
    """Plans against plain PyTorch, beside plain PyTorch against itself."""
    place = facts.place
    for budget in ("100%", "70%"):
        torch.manual_seed(0)
        model, batch = steps.gpt2(place, layers=12, width=768, heads=12, batch=4)
        plain = copy.deepcopy(model)
        steps.planned(model, budget)

        runs = []
        for one in (model, plain, plain):
            with facts.work():
                found = gradients(one, one, batch, seed=3)
                state = torch.cuda.get_rng_state() if place.has_cuda else torch.get_rng_state()
                runs.append((found, state, step(one, one, batch, 3).item()))

        facts.say(
            section="correct",
            budget=budget,
            gradient=largest_difference(runs[0][0], runs[1][0]),
            plain_twice=largest_difference(runs[2][0], runs[1][0]),
            loss=runs[0][2] - runs[1][2],
            same_random=bool(torch.equal(runs[0][1], runs[1][1])),
            recomputed=remat.report(model).solution.overhead,
        )


def medium(facts: Facts) -> None:
    """GPT-2 medium."""
    ways = [*TWICE, *plans("100%", "60%"), *CHECKPOINTS, *plans("40%", LEAST, "80%")]
    compare(facts, "gpt2-medium", [*ways, *at_the_peaks_of(CHECKPOINTS)])


def vision(facts: Facts) -> None:
    """ResNet-50."""
    fragmented: list[Named] = [("remat 60%, expandable segments", _in_expandable_segments)]
    ways = [*TWICE, *plans("100%", "80%", "60%", "40%", LEAST), *fragmented]
    compare(facts, "resnet50", [*ways, *CHECKPOINTS, *at_the_peaks_of(CHECKPOINTS)])


def _in_expandable_segments(model: Any) -> Callable[..., Any]:
    if torch.cuda.is_available():
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    return steps.planned(model, "60%")


def large(facts: Facts) -> None:
    """GPT-2 XL."""
    ways = [*TWICE, *plans("100%", "60%", "40%"), *CHECKPOINTS, *at_the_peaks_of(CHECKPOINTS)]
    compare(facts, "gpt2-xl", [*ways, *plans(LEAST, "80%")], need_s=60)


def billions(facts: Facts) -> None:
    """Eight layers of Llama-3-8B's size."""
    ways = [*TWICE, *plans("100%", "60%", LEAST), *CHECKPOINTS, *at_the_peaks_of(CHECKPOINTS)]
    compare(facts, "llama-3-8b, 8 layers", [*ways, *plans("80%", "40%")], need_s=60)


def autocast(facts: Facts, name: str = "gpt2-medium, 4 sequences") -> None:
    """A model in float32 under autocast to bf16."""
    ways = [*TWICE[:1], *plans("100%", "60%"), *CHECKPOINTS[:1], *at_the_peaks_of(CHECKPOINTS[:1])]
    ways += [*plans("40%", LEAST, "80%"), *CHECKPOINTS[1:], *at_the_peaks_of(CHECKPOINTS[1:])]
    compare(facts, name, in_autocast(ways))


def oom(facts: Facts) -> None:
    """Plans with a budget that a user would choose, where plain PyTorch runs out of memory."""
    if not facts.place.has_cuda:
        return

    # plain PyTorch needs about 36 GB for this batch
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, _OOM_BYTES / total_bytes))
    try:
        for way in ("plain", "remat"):
            with facts.section(section="oom", way=way), facts.work():
                _in_little_memory(facts, way)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _in_little_memory(facts: Facts, way: str) -> None:
    model, batch = steps.gpt2(facts.place, batch=16)
    budget = _OOM_BYTES - blas_bytes(facts.place) - (1 << 30)
    call = steps.planned(model, budget) if way == "remat" else plain(model)
    row = measured(call, model, batch, facts.place, 3)
    row |= told(model) if way == "remat" else {}
    facts.say(section="oom", way=way, limit=_OOM_BYTES, **row)


def foretold(facts: Facts) -> None:
    """Plans and batch sizes predicted without a GPU, beside what the card does."""
    forecast.judge(facts, FORECAST)


def _operators(facts: Facts) -> None:
    if facts.place.has_cuda:
        with facts.turn():
            by_operator.compare(facts)


SECTIONS: dict[str, tuple[Callable[[Facts], None], float]] = {
    "environment": (environment, 0),
    "correct": (correct, 20),
    "medium": (medium, 60),
    "vision": (vision, 40),
    "oom": (oom, 60),
    "foretold": (foretold, 30),
    "autocast": (autocast, 40),
    "billions": (billions, 90),
    "fused": (fused.gpt, 60),
    "fused_dropout": (fused.dropout, 60),
    "fused_vision": (fused.vision, 60),
    "pieces": (fused.pieces, 60),
    "large": (large, 90),
    "operators": (_operators, 20),
    "autocast_vision": (partial(autocast, name="resnet50, autocast"), 60),
    "autocast_billions": (partial(autocast, name="llama-3-8b, 8 layers, autocast"), 90),
    "autocast_large": (partial(autocast, name="gpt2-xl, autocast"), 90),
}


_SIDE_BY_SIDE = (
    "one process per group of sections; the processes share the cores, and one plans while "
    "another's steps are timed"
)


def _command(asked: argparse.Namespace, *sections: str, progress: Path) -> list[str]:
    where = ["--device", asked.device, "--output", str(asked.output), "--progress", str(progress)]
    where += ["--seconds", str(asked.seconds), *(["--tiny"] if asked.tiny else [])]
    return [sys.executable, "-m", "experiments.gpu_run", *where, "--only", *sections]


def _run(facts: Facts, names: Sequence[str]) -> None:
    for name in names:
        run, need_s = SECTIONS[name]
        facts.progress.note(section=name)
        if facts.left_s < need_s:
            facts.say(section=name, skipped=f"{facts.left_s:.0f} s left, {need_s:.0f} needed")
            continue
        with facts.section(section=name):
            run(facts)


def _output_of(device: str) -> Path:
    if device == "cpu":
        return Path(tempfile.gettempdir()) / "gpu_run_rehearsal.jsonl"
    return RESULTS.with_name(f"gpu_run_{torch.cuda.get_device_name().replace(' ', '_')}.jsonl")


def _refuse_another_device(asked: argparse.Namespace) -> None:
    """Ends the program if the file has facts of another device; they must not be mixed."""
    device = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
    lines = asked.output.read_text().splitlines() if asked.output.exists() else []
    for fact in map(json.loads, lines):
        found = (fact.get("gpus") or ["cpu"])[0] if fact.get("section") == "environment" else device
        if device not in found:
            sys.exit(f"gpu_run: {asked.output} has facts of {found}; give another --output")


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    log, handler = logging.getLogger("remat"), logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(name)s %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)

    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a rehearsal")
    parser.add_argument("--output", type=Path, help="by default, a file named after the device")
    parser.add_argument("--show", action="store_true", help="only show tables and pictures")
    parser.add_argument("--foretell", metavar="DEVICE", help="write forecasts for this device")
    parser.add_argument("--expect", metavar="DEVICE", help="compare its peaks with a model's")
    parser.add_argument("--side-by-side", action="store_true", help=_SIDE_BY_SIDE)
    parser.add_argument("--progress", type=Path, help="a file that says what runs; continues there")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the sections for which there is time, or shows the results."""
    asked = _parser().parse_args(arguments)

    if asked.show:
        tables.show(asked.output or RESULTS)
        return

    if asked.foretell:
        forecast.foretell(FORECAST, asked.foretell)
        return

    if asked.expect:
        expected.expect(tables.compared(tables.read(RESULTS)), EXPECTED, asked.expect)
        return

    if asked.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_run: torch sees no CUDA device here; rehearse with --device cpu --tiny")

    asked.output = asked.output or _output_of(asked.device)
    _refuse_another_device(asked)
    if not is_ready(anneal):
        minimum(random_layered(8, seed=0))  # compiles the search, before plans have time limits

    progress = Progress.read(asked.progress) if asked.progress else Progress()
    facts = Facts(asked.output, Place(asked.device, asked.tiny), asked.seconds, progress)
    if asked.side_by_side:
        run_side_by_side(asked.only, partial(_command, asked), asked.output, facts.say)
        return

    with _logging_to(asked.output.with_suffix(".log")):
        _run(facts, progress.sections_left(asked.only))
    facts.say(section="end", seconds=round(facts.taken_s, 1))


if __name__ == "__main__":
    main()
