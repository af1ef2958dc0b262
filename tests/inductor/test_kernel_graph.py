"""The graph of a step in kernels: what they move, cost and hold, and what is asked of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import remat
from remat.core.graph import Graph
from remat.core.operators import Operator, Value
from remat.core.schedule import Schedule, simulate
from remat.inductor.kernel_graph import _kernel, fuse
from remat.tracers.traced_step import TracedStep
from tests.support.fused_models import Net, batch
from tests.support.planned import COMPILES

pytestmark = [pytest.mark.usefixtures("fresh_torch"), *COMPILES]


def traced() -> TracedStep:
    from remat.face.api import trace_step

    return trace_step(Net(), (batch(),), costs="roofline")


def test_a_kernel_moves_less_than_its_operators() -> None:
    step = traced()
    fused = fuse(step)
    assert sorted(index for kernel in fused.members for index in kernel) == list(
        range(step.graph.num_operators)
    )
    assert fused.graph.num_operators < step.graph.num_operators
    assert fused.graph.cost_s < step.graph.cost_s
    assert len(fused.graph.values) < len(step.graph.values)

    keep_all = Schedule.keep_all(fused.graph)
    assert sorted(fused.unfused(keep_all).steps) == list(range(step.graph.num_operators))
    assert (
        simulate(fused.graph, keep_all).peak_bytes
        <= simulate(fused.step.graph, Schedule.keep_all(fused.step.graph)).peak_bytes
    )
    assert not any(op.reuses for op in fused.graph.operators)


def test_a_run_of_a_kernel_that_nothing_reads_is_left_out() -> None:
    fused = fuse(traced())
    count, last = fused.graph.num_operators, len(fused.members) - 1
    keep_all = Schedule.keep_all(fused.graph)
    assert not fused.graph.users_of[fused.graph.operators[last].writes[0]]
    twice = Schedule((*keep_all.steps, last), keep_all.num_forward_steps)
    assert len(twice.steps) == count + 1
    assert fused.unfused(twice) == fused.unfused(keep_all)

    first = fused.graph.operators[0].writes[0]
    assert fused.graph.users_of[first]
    read_in_between = Schedule((*keep_all.steps, 0, last), keep_all.num_forward_steps)
    repeated = set(fused.members[0])
    steps = fused.unfused(read_in_between).steps
    assert {index for index in repeated if steps.count(index) == 2} == repeated


@pytest.mark.usefixtures("idle_kernels")
def test_the_traced_kernel_graph_is_the_planned_one() -> None:
    traced_graph = remat.trace(Net(), (batch(),), executor="inductor")
    model = Net()
    remat.checkpoint(
        model, "80%", executor="inductor", costs="roofline", time_limit_s=1.0, plan_cache=False
    )
    model(batch()).backward()

    assert remat.report(model).graph.fingerprint == traced_graph.fingerprint
    assert traced_graph.fingerprint != remat.trace(Net(), (batch(),)).fingerprint


def test_fits_through_inductor_uses_the_kernel_graph() -> None:
    fit = remat.fits(
        Net(), (batch(),), budget="100%", optimizer="none", executor="inductor", time_limit_s=2.0
    )
    assert fit
    graph = remat.trace(Net(), (batch(),), executor="inductor")
    assert fit.budget_bytes == simulate(graph, Schedule.keep_all(graph)).peak_bytes

    with pytest.raises(ValueError, match="this machine has no GPU such as H100"):
        remat.fits(Net(), (batch(),), device="H100", executor="inductor")
    with pytest.raises(ValueError, match='is neither "eager" nor "inductor"'):
        remat.trace(Net(), (batch(),), executor="auto")


def test_the_largest_batch_is_found_for_the_kernels() -> None:
    options: dict[str, Any] = {
        "budget": "1MiB", "optimizer": "none", "time_limit_s": 0.5, "executor": "inductor",
    }  # fmt: skip
    batches = remat.max_batch(Net(), lambda size: (torch.zeros(size, 32),), points=1, **options)

    (row,) = batches.rows
    graph = remat.trace(Net(), (torch.zeros(batches.largest, 32),), executor="inductor")
    assert row.fit.graph.fingerprint == graph.fingerprint
    assert row.fit.planned is not None and row.fit.planned.total <= 1 << 20
    assert not remat.fits(Net(), (torch.zeros(2 * batches.largest, 32),), **options)


def test_a_kernel_that_draws_numbers_costs_at_least_the_drawing() -> None:
    """A mask takes an eighth of its random numbers' bytes, but all the time to draw them."""
    graph = Graph(
        values=(Value("numbers", 8000), Value("mask", 1000)),
        operators=(
            Operator("numbers", 5.0, (), (0,), target="prims.inductor_random.default"),
            Operator("mask", 1.0, (0,), (1,), target="aten.gt.Scalar"),
        ),
        outputs=(1,),
    )

    drawn = _kernel(graph, (0, 1), {1: 0})
    assert drawn.cost_s == pytest.approx(5.0 + 1.0 / 9)
    assert drawn.writes == (0,) and not drawn.reads
