"""Runs one model in several ways; compares peaks, times, and gradients with plain's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

import remat
from experiments.gpu import steps
from experiments.gpu.measuring import (
    Facts,
    blas_bytes,
    gradients,
    largest_difference,
    measured,
    told,
)
from experiments.gpu.steps import STEPS

LEAST = "least"
Way = Callable[[Any], Callable[..., Any]]


def compare(facts: Facts, name: str, ways: Sequence[tuple[str, Way]], need_s: float = 30) -> None:
    """Runs one model in each way; compares its gradients with those of the first way."""
    reference: list[torch.Tensor] = []
    for way, prepare in ways:
        if facts.left_s < need_s:
            facts.say(model=name, way=way, skipped=f"{facts.left_s:.0f} s left")
            continue

        facts.clean()
        with facts.section(model=name, way=way), fresh_cache():
            _compare_one(facts, name, way, prepare, reference)
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
    with nullcontext() if compiles else facts.turn():
        began = time.perf_counter()
        found = gradients(call, model, batch)
        until_first_s = time.perf_counter() - began

    first_peak = torch.cuda.max_memory_allocated() if place.has_cuda else 0
    reference.extend(found if not reference else ())

    row: dict[str, Any] = {"base": base, "until_first_s": until_first_s, "first_peak": first_peak}
    with facts.turn():
        row |= measured(call, model, batch, place)
    row["gradient"] = largest_difference(found, reference)

    if way.startswith("remat"):
        row |= told(model)
        if place.has_cuda:
            peak = row["kernels_peak"] or row["predicted"]
            row["measured_minus_predicted"] = row["allocated"] - base - peak

    facts.say(model=name, way=way, **row)


def plain(model: Any) -> Callable[..., Any]:
    """Returns the model itself."""
    call: Callable[..., Any] = model
    return call


def plans_and(budgets: Sequence[str], *others: tuple[str, Way]) -> list[tuple[str, Way]]:
    """Returns plain twice, one plan per budget, and the others."""
    plans = [
        (f"remat {budget}", partial(steps.planned, budget=budget))
        if budget != LEAST
        else ("remat least", at_its_least)
        for budget in budgets
    ]
    return [("plain", plain), ("plain again", plain), *plans, *others]


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
