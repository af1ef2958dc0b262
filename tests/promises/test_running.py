"""A planned step equals the plain step.

Outputs, gradients, buffers and random numbers to the bit, whatever the schedule.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import remat
from remat.run import capture, executor, tangents
from tests.support.planned import (
    UNLIMITED,
    Given,
    assert_same,
    call_of,
    keep_nothing,
    planned,
    repeat_anything,
    state_after,
)
from tests.support.small_models import MLP, MODELS, SCHEDULES, assert_same_steps

pytestmark = pytest.mark.usefixtures("fresh_torch")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_a_planned_step_equals_the_plain_step_to_the_bit(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where values are computed again, each operator runs as often as the schedule says."""
    count = _Count()
    for place in (capture, tangents):
        monkeypatch.setattr(place, "compile_graph", count.compile)
    model, x = MODELS[name]()
    plain = copy.deepcopy(model)
    assert_same_steps(planned(model, SCHEDULES[schedule]), plain, x)

    piece = call_of(model).pieces[0]
    solved = piece.solution.schedule
    assert solved is not None
    assert (solved.num_recomputations > 0) == (schedule != "keep all")
    if schedule == "repeat":
        assert len(set(solved.steps[: solved.num_forward_steps])) < solved.num_forward_steps
        assert max(Counter(solved.steps).values()) >= 3

    if schedule in ("keep nothing", "repeat"):
        model.zero_grad()
        count.is_counting = True
        model(x).backward()
        expected = expected_runs(piece, solved.steps)
        assert {operator: count.runs[operator] for operator in expected} == dict(expected)


class _Count(TorchDispatchMode):
    """Counts the operators that really run in planned steps, in place or not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.runs: Counter[str] = Counter()
        self.is_counting = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[func._schema.name.rstrip("_")] += 1
        return func(*args, **(kwargs or {}))

    def compile(self, graph: torch.fx.GraphModule) -> executor.BoxedFunction:
        """Compiles half of a step, whose operators are counted while `is_counting`."""
        run = executor.compile_graph(graph)

        def counted(args: list[Any]) -> Any:
            if not self.is_counting:
                return run(args)
            with self:
                return run(args)

        return counted


def expected_runs(piece: capture.PlannedStep, steps: Sequence[int]) -> Counter[str]:
    """How often each of torch's operators runs in a step."""
    expected: Counter[str] = Counter()
    repeated = {op for op, times in Counter(steps).items() if times > 1}

    for index in steps:
        op = piece.step.graph.operators[index]
        if op.target == "snapshot" and (
            not op.is_snapshot
            or any(u in repeated for v in op.writes for u in piece.step.graph.users_of[v])
        ):
            expected["aten::clone"] += 1
        elif op.target not in ("snapshot", "tangent", "generator_state"):
            target: Any = piece.step.nodes[index].target
            is_redrawn = index in repeated and target is torch.ops.aten.native_dropout.default

            expected.update(
                ["aten::bernoulli", "aten::mul", "aten::mul"]
                if is_redrawn
                else [target._schema.name.rstrip("_")]
            )

    return expected


def test_operators_run_in_the_schedules_order() -> None:
    model, x = MODELS["mlp"]()
    planned(model, repeat_anything(5))(x).backward()
    piece = call_of(model).pieces[0]
    assert piece.solution.schedule is not None

    nodes = [*piece.split.forward.graph.nodes, *piece.split.backward.graph.nodes]
    ran = [
        node.args[0] if node.target.__name__ in ("draw", "replay") else node.target
        for node in nodes
        if node.op == "call_function"
    ]
    names = [
        target._schema.name.rstrip("_")
        for target in ran
        if isinstance(target, torch._ops.OpOverload)
    ]

    steps = [
        piece.step.nodes[i].target
        for i in piece.solution.schedule.steps
        if i in piece.step.operator_of.values()
    ]
    wanted = [
        target._schema.name.rstrip("_")
        for target in steps
        if isinstance(target, torch._ops.OpOverload)
    ]

    assert [name for name in names if name in set(wanted)] == wanted


def test_dropout_is_replayed_however_often() -> None:
    model, x = MODELS["mlp"]()
    plain = copy.deepcopy(model)
    planned(model, repeat_anything(6))
    assert_same_steps(model, plain, x)

    solution = call_of(model).pieces[0].solution
    assert solution.schedule is not None
    graph = call_of(model).pieces[0].step.graph
    repeats = Counter(solution.schedule.steps)

    assert (
        max(
            repeats[i]
            for i, op in enumerate(graph.operators)
            if "dropout" in op.target or "bernoulli" in op.target
        )
        >= 2
    )


class Noise(nn.Module):
    """Draws from a generator that may be None, as libraries do."""

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(8, 8), generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x).tanh()
        hidden = hidden * torch.randn(hidden.shape, generator=self.generator)
        kept = torch.bernoulli(torch.full(hidden.shape, 0.5), generator=self.generator)
        loss: torch.Tensor = (hidden.tanh() * kept).tanh().square().mean()
        return loss


@pytest.mark.parametrize("is_own", [False, True])
def test_a_generator_may_be_none_or_the_users_own(*, is_own: bool) -> None:
    plain, planned = (Noise(torch.Generator().manual_seed(1) if is_own else None) for _ in range(2))
    planned.load_state_dict(plain.state_dict())
    remat.checkpoint(planned, UNLIMITED, solver=Given(keep_nothing), costs="flops")

    for seed in (1, 2):
        ends = []
        for model in (plain, planned):
            model.zero_grad()
            torch.manual_seed(seed)
            model(torch.ones(4, 8)).backward()
            ends.append([p.grad for p in model.parameters()] + [torch.get_rng_state()])
        assert_same(*ends)


def test_batch_norm_statistics_are_updated_once_a_step() -> None:
    model, x = MODELS["convolutions"]()
    plain = copy.deepcopy(model)
    planned(model)

    for seed in range(3):
        state_after(model, x, seed=seed)
        state_after(plain, x, seed=seed)
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert int(model.get_buffer("norm1.num_batches_tracked")) == 3


def test_steps_that_overlap_accumulate_the_plain_gradients() -> None:
    ends = []
    for is_planned in (True, False):
        torch.manual_seed(0)
        model, x = MODELS["mlp"]()
        if is_planned:
            planned(model)

        torch.manual_seed(1)
        first, second = model(x), model(2 * x)
        second.backward()
        first.backward()
        ends.append([p.grad for p in model.parameters()])

    assert_same(*ends)


def test_autocast_is_part_of_the_step() -> None:
    """Without dropout.

    In bfloat16 on the CPU, torch's fused dropout, which is traced, and the unfused one round the
    scale differently.
    """
    model, x = MLP(dropout=0.0), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    planned(model)

    ends = []
    for each in (model, plain):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(x)
        loss.backward()
        ends.append([loss.detach(), *(p.grad for p in each.parameters())])
    assert_same(*ends)


def test_a_new_shape_gets_its_own_plan_and_old_shapes_keep_theirs() -> None:
    model, x = MODELS["mlp"]()
    plain = copy.deepcopy(model)
    planned(model)
    for batch in (x, torch.randn(6, 8), x):
        assert_same(state_after(model, batch, seed=1), state_after(plain, batch, seed=1))
    assert [piece.step.graph.num_operators > 0 for piece in call_of(model).pieces] == [True, True]


class InnerCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = MLP()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = torch_checkpoint(self.block, self.linear(x).sin(), use_reentrant=False)
        return loss


def test_a_model_that_checkpoints_already_equals_the_plain_one() -> None:
    model, x = InnerCheckpoint(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    assert_same_steps(planned(model), plain, x)
