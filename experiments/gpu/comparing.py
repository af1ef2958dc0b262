"""Runs one model in several ways; compares peaks, times, and gradients with plain's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

import remat
from experiments.gpu import steps
from experiments.gpu.measuring import (
    Facts,
    blas_bytes,
    budget_of,
    gradients,
    largest_difference,
    measured,
    told,
)
from experiments.gpu.steps import STEPS
from experiments.gpu.tables import AT_THE_PEAK_OF

LEAST = "least"
Way = Callable[[Any], Callable[..., Any]]


def plain(model: Any) -> Callable[..., Any]:
    """Returns the model itself."""
    call: Callable[..., Any] = model
    return call


@dataclass(frozen=True)
class AtThePeakOf:
    """A plan whose budget is what another way of the same run requested at its peak.

    Attributes:
        way: the name of the other way.
        executor: what runs the plan.
        then: what is done with the planned model, such as a run under autocast.
    """

    way: str
    executor: str = "eager"
    then: Way = plain

    def within(self, budget_bytes: int) -> Way:
        """Returns the way of running a model within a budget."""

        def prepare(model: Any) -> Callable[..., Any]:
            steps.planned(model, budget_bytes, executor=self.executor)
            return self.then(model)

        return prepare


Named = tuple[str, Way | AtThePeakOf]


def compare(facts: Facts, name: str, ways: Sequence[Named], need_s: float = 30) -> None:
    """Runs one model in each way; compares its gradients with those of the first way."""
    reference: list[torch.Tensor] = []
    for way, prepare in facts.progress.ways_left(ways):
        if facts.left_s < need_s:
            facts.say(model=name, way=way, skipped=f"{facts.left_s:.0f} s left")
            continue

        if isinstance(prepare, AtThePeakOf):
            peak_bytes = facts.progress.requested.get(f"{name}: {prepare.way}")
            if peak_bytes is None:
                facts.say(model=name, way=way, skipped=f"{prepare.way} was not measured")
                continue
            prepare = prepare.within(budget_of(peak_bytes, facts.place))

        facts.clean()
        facts.progress.note(way=way)
        with facts.section(model=name, way=way), fresh_cache():
            _compare_one(facts, name, way, prepare, reference)
    facts.progress.note(way="")
    facts.clean()


def _compare_one(
    facts: Facts, name: str, way: str, prepare: Way, reference: list[torch.Tensor]
) -> None:
    place = facts.place
    with facts.turn():
        blas_bytes(place)
        base = torch.cuda.memory_allocated() if place.has_cuda else 0
        torch.manual_seed(0)
        model, batch = STEPS[name](place)
        call = prepare(model)

    if place.has_cuda:
        torch.cuda.reset_peak_memory_stats()

    # the plan at 100 % measures costs; other plans are made while another process times its steps
    compiles = way.startswith(("remat", "torch.compile")) and way != "remat 100%"
    with facts.work() if compiles else facts.turn():
        began = time.perf_counter()
        found = gradients(call, model, batch)
        until_first_s = time.perf_counter() - began

    first_peak = torch.cuda.max_memory_allocated() if place.has_cuda else 0
    reference.extend(found if not reference else ())

    row: dict[str, Any] = {"base": base, "until_first_s": until_first_s}
    if not way.startswith("remat"):  # a plan resets the peak, and tells its own
        row["first_peak"] = first_peak
    with facts.turn():
        row |= measured(call, model, batch, place)
    row["gradient"] = largest_difference(found, reference)
    facts.progress.requested[f"{name}: {way}"] = int(row["requested"] - base)

    if way.startswith("remat"):
        row |= told(model)
        if place.has_cuda:
            peak = row["kernels_peak"] or row["predicted"]
            row["measured_minus_predicted"] = row["allocated"] - base - peak

    facts.say(model=name, way=way, **row)


TWICE: list[Named] = [("plain", plain), ("plain again", plain)]
CHECKPOINTS: list[Named] = [
    ("checkpoint per block", steps.block_checkpoints),
    ("selective checkpoints", steps.selective_checkpoints),
]


def plans(*budgets: str) -> list[Named]:
    """Returns one plan per budget."""
    return [
        (f"remat {budget}", partial(steps.planned, budget=budget))
        if budget != LEAST
        else ("remat least", at_its_least)
        for budget in budgets
    ]


def at_the_peaks_of(others: Sequence[Named], executor: str = "eager") -> list[Named]:
    """Returns one plan per other way, with its measured peak as the budget."""
    kind = "remat" if executor == "eager" else f"remat {executor}"
    return [(f"{kind}{AT_THE_PEAK_OF}{way}", AtThePeakOf(way, executor)) for way, _ in others]


def in_autocast(ways: Sequence[Named]) -> list[Named]:
    """Returns the ways in float32 under autocast."""

    def made(prepare: Way, model: Any) -> Callable[..., Any]:
        return steps.in_autocast(model, prepare(model))

    found: list[Named] = []
    for way, prepare in ways:
        cast: Way | AtThePeakOf
        if isinstance(prepare, AtThePeakOf):
            cast = replace(prepare, way=f"{prepare.way}, autocast", then=steps.in_autocast)
        else:
            cast = partial(made, prepare)
        found.append((f"{way}, autocast", cast))
    return found


def at_its_least(model: Any) -> Callable[..., Any]:
    """Plans with the least budget, which the error for an impossible budget names."""

    def call(**batch: torch.Tensor) -> Any:
        if not hasattr(call, "is_planned"):
            remat.checkpoint(model, "1%", time_limit_s=steps.PLAN_LIMIT_S)
            try:
                return model(**batch)
            except remat.BudgetError as error:
                remat.unwrap(model)
                steps.planned(model, int(error.minimum_bytes * 1.01))
            call.is_planned = True  # type: ignore[attr-defined]
        return model(**batch)

    return call
