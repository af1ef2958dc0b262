"""Facts, each written at once as a JSON line, and measurements of a step on the device."""

from __future__ import annotations

import fcntl
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import remat
from experiments.gpu.progress import Progress
from experiments.gpu.steps import Batch, Place
from remat.plan.card import library_bytes

TURN_LIMIT_S = 90.0  # the slowest turn took 27 s on an H100
WORK_LIMIT_S = 240.0  # without a turn; the slowest plan through Inductor took 159 s on an H200
_STEPS = 16
_DEAREST = 25  # number of most expensive operators that are listed
_MOST_ENTRIES = 1 << 16  # about this many of a gradient's entries are compared
Call = Callable[..., Any]


@dataclass
class Facts:
    """The findings, appended to a file line by line, so that an interrupted run loses nothing.

    Attributes:
        path: the file.
        place: where it runs.
        seconds: how long the run may take.
        progress: what runs now.
    """

    path: Path
    place: Place
    seconds: float
    progress: Progress = field(default_factory=Progress)

    @property
    def taken_s(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.progress.began_s

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self.seconds - self.taken_s

    def say(self, **fact: Any) -> None:
        """Writes a fact."""
        fact["at_s"] = round(self.taken_s, 1)
        with self.path.open("a") as file:
            file.write(json.dumps(fact) + "\n")
        print(json.dumps(fact), flush=True)

    @contextmanager
    def section(self, **names: Any) -> Iterator[None]:
        """Runs what is inside; a failure is written as a fact, and memory is freed."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever fails, the next section runs
            where = traceback.format_exc()[-800:]
            self.say(**names, error=f"{type(error).__name__}: {error}"[:600], trace=where)
            # the frames hold the tensors of the failed step
            traceback.clear_frames(error.__traceback__)
        self._try_to_clean()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Runs what is inside while no other process with the same file has its turn.

        Raises `TimeoutError` after `TURN_LIMIT_S`, so that the others get theirs.
        """
        with self.path.with_suffix(".turn").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with self.progress.limit(TURN_LIMIT_S):
                yield

    def work(self) -> AbstractContextManager[None]:
        """Runs what is inside beside other processes, for at most `WORK_LIMIT_S`."""
        return self.progress.limit(WORK_LIMIT_S)

    def _try_to_clean(self) -> None:
        try:
            self.clean()
        except RuntimeError as error:  # after some errors every call of CUDA fails
            self.say(section="clean", error=f"{type(error).__name__}: {error}"[:600])

    def clean(self) -> None:
        """Discards compiled code, frees memory, and resets torch's options."""
        gc.collect()
        torch._dynamo.reset()
        torch._functorch.config.activation_memory_budget = 1.0
        torch._inductor.config.triton.cudagraphs = False
        if self.place.has_cuda:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
            torch.cuda.empty_cache()


def synchronize(place: Place) -> None:
    """Waits for the device."""
    if place.has_cuda:
        torch.cuda.synchronize()


def blas_bytes(place: Place) -> int:
    """Bytes that cuBLAS keeps for the threads of forward and backward, which no plan counts."""
    if not place.has_cuda:
        return 0

    gc.collect()
    before = torch.cuda.memory_allocated()
    a = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    nn.functional.linear(a @ a, a, a[0]).sum().backward()
    del a
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def step(call: Call, owner: nn.Module, batch: Batch, seed: int) -> torch.Tensor:
    """One forward and backward from a seed; returns the loss."""
    torch.manual_seed(seed)
    owner.zero_grad(set_to_none=True)
    result = call(**batch)
    loss: torch.Tensor = result if isinstance(result, torch.Tensor) else result.loss
    loss.backward()
    return loss.detach()


def gradients(call: Call, owner: nn.Module, batch: Batch, seed: int = 0) -> list[torch.Tensor]:
    """The gradients of a step, on the CPU in float32; evenly spaced entries of large tensors."""
    step(call, owner, batch, seed)
    found = (p.grad.flatten() for p in owner.parameters() if p.grad is not None)
    return [g[:: max(1, g.numel() // _MOST_ENTRIES)].float().cpu() for g in found]


def largest_difference(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest entry."""
    scale = torch.stack([t.abs().max() for t in theirs]).max()
    apart = [(a - b).abs().max() for a, b in zip(mine, theirs, strict=True)]
    return float(torch.stack(apart).max() / scale)  # NaN if any of them is


def measured(
    call: Call, owner: nn.Module, batch: Batch, place: Place, steps: int = 0
) -> dict[str, float]:
    """Times of the first step and of later ones; on a GPU also the peaks that torch reports."""
    steps = steps or (2 if place.is_tiny else _STEPS)
    began = time.perf_counter()
    step(call, owner, batch, 0)
    synchronize(place)
    first_s = time.perf_counter() - began

    owner.zero_grad(set_to_none=True)
    if place.has_cuda:
        torch.cuda.empty_cache()  # of the first step, which compiles and tunes
        torch.cuda.reset_peak_memory_stats()
    times = []
    for index in range(steps):
        owner.zero_grad(set_to_none=True)
        synchronize(place)
        began = time.perf_counter()
        step(call, owner, batch, 1 + index)
        synchronize(place)
        times.append(time.perf_counter() - began)

    stats = torch.cuda.memory_stats() if place.has_cuda else {}
    peaks = {
        name: stats.get(f"{name}_bytes.all.peak", 0)
        for name in ("requested", "allocated", "reserved")
    }
    if not place.has_cuda:
        peaks["requested"] = _peak_on_the_cpu(call, owner, batch)
    paces = {"step_s": statistics.median(times), "fastest_s": min(times)}
    return {"first_step_s": first_s, **paces, **peaks}


def _peak_on_the_cpu(call: Call, owner: nn.Module, batch: Batch) -> int:
    """The peak of a step with what it holds throughout."""
    owner.zero_grad(set_to_none=True)
    held = [*owner.parameters(), *owner.buffers(), *batch.values()]
    peak_bytes = remat.measure(lambda: step(call, owner, batch, 0), device="cpu").peak_bytes
    return peak_bytes + sum(tensor.nbytes for tensor in held)


def budget_of(peak_bytes: int, place: Place) -> int:
    """The budget of a plan that requests at most as much as a step that was measured."""
    return peak_bytes + library_bytes(place.device)


def told(model: Any) -> dict[str, Any]:
    """What the plan of a model predicts."""
    report = remat.report(model)
    solution = report.solution
    attention = sorted({op.target for op in report.graph.operators if "attention" in op.target})

    return {
        "predicted": solution.peak_bytes,
        "budget": solution.budget_bytes,
        "predicted_step_s": solution.cost_s,
        "overhead": solution.overhead,
        "gap": solution.gap,
        "techniques": solution.techniques,
        "cut_short": solution.cut_short,
        "planned_s": solution.wall_s,
        "captured_s": report.captured_s,
        "budget_asked": report.budget_bytes,
        "libraries": report.room.library_bytes if report.room else 0,
        "first_peaks": list(astuple(report.cuda_peaks)) if report.cuda_peaks else [],
        "kernels_peak": report.kernels_peak_bytes,
        "executor": report.executor,
        "attention": attention,
        "dearest": [
            (op.target, round(op.cost_s * 1e6), op.module)
            for op in sorted(report.graph.operators, key=lambda op: -op.cost_s)[:_DEAREST]
        ],
    }
