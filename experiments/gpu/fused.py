"""Plans through Inductor beside `torch.compile` and `activation_memory_budget`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from experiments.gpu import steps
from experiments.gpu.comparing import TWICE, Named, Way, at_the_peaks_of, compare, plans
from experiments.gpu.measuring import Facts

_NAME = "torch.compile, activation_memory_budget"
PLAIN = TWICE[:1]


def gpt(facts: Facts) -> None:
    """GPT-2 medium, 12 layers, without dropout."""
    ways = [_compiled(1.0), _inductor("100%"), _inductor("60%"), _compiled(0.5), _inductor("40%")]
    ways += [_compiled(0.0), _inductor("80%"), _compiled(0.25), _compiled(0.75)]
    graphs = [("remat inductor 60%, CUDA graphs", partial(_in_cuda_graphs, _inductor("60%")[1]))]
    graphs += [("torch.compile, CUDA graphs", partial(_in_cuda_graphs, steps.compiled))]
    equal = _at_the_peaks_of(0.5, 1.0, 0.0, 0.25, 0.75)
    eager = at_the_peaks_of([_compiled(1.0), _compiled(0.5)])
    compare(facts, "gpt2-medium, 12 layers, no dropout", [*PLAIN, *ways, *graphs, *equal, *eager])


def dropout(facts: Facts) -> None:
    """The same with dropout; `torch.compile` and Inductor draw their own masks."""
    ways = [_compiled(1.0), _inductor("100%"), _inductor("60%"), _inductor("40%")]
    eager = ("remat auto 60%", partial(steps.planned, budget="60%", executor="auto"))
    equal = [*_at_the_peaks_of(1.0), _compiled(0.5), *_at_the_peaks_of(0.5)]
    compare(facts, "gpt2-medium, 12 layers", [*PLAIN, *ways, eager, *equal])


def vision(facts: Facts) -> None:
    """ResNet-50."""
    ways = [_compiled(1.0), _inductor("100%"), _inductor("60%"), _inductor("40%"), _compiled(0.5)]
    compare(facts, "resnet50", [*PLAIN, *ways, *_at_the_peaks_of(0.5, 1.0)])


def pieces(facts: Facts) -> None:
    """A step that logs a number, so `torch.compile` cuts it."""
    ways = [*plans("100%", "60%"), _compiled(1.0), _inductor("100%"), _inductor("60%")]
    compare(facts, "gpt2-medium, 12 layers, logged", [*PLAIN, *ways, *_at_the_peaks_of(1.0)])


def _at_the_peaks_of(*shares: float) -> list[Named]:
    """Plans through Inductor with the measured peaks of shares as `activation_memory_budget`."""
    return at_the_peaks_of([_compiled(share) for share in shares], "inductor")


def _inductor(budget: str) -> tuple[str, Way]:
    way = partial(steps.planned, budget=budget, executor="inductor")
    return f"remat inductor {budget}", way


def _compiled(share: float) -> tuple[str, Way]:
    return f"{_NAME} {share}", partial(steps.compiled, share=share)


def _in_cuda_graphs(way: Way, model: Any) -> Callable[..., Any]:
    """Launches a way's kernels from CUDA graphs; `Facts.clean` switches this off again."""
    settings: Any = torch._inductor.config
    settings.triton.cudagraphs = True
    return way(model)
