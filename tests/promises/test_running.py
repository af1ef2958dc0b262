"""A planned step equals the plain step.

Outputs, gradients, buffers and random numbers to the bit, whatever the schedule.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import remat
from remat.run import capture, executor
from remat.solvers.core.on_demand import steps_on_demand
from remat.torch_border.modules import get_call
from tests.support.planned import (
    UNLIMITED,
    Given,
    Steps,
    assert_same,
    call_of,
    keep_all,
    keep_nothing,
    planned,
    repeat_anything,
    state_after,
)

pytestmark = pytest.mark.usefixtures("fresh_torch")


def keep_some(seed: int) -> Steps:
    def steps(graph: remat.Graph) -> Sequence[int]:
        chance = random.Random(seed)
        return steps_on_demand(
            graph, [value for value in range(len(graph.values)) if chance.random() < 0.5]
        )

    return steps


SCHEDULES: dict[str, Steps] = {
    "keep all": keep_all,
    "keep nothing": keep_nothing,
    "keep some": keep_some(1),
    "repeat": repeat_anything(3),
}


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor | None = None
    labels: torch.Tensor | None = None


class MLP(nn.Module):
    """Layer norm, GELU and dropout; its output layer is tied to its input layer."""

    def __init__(self, width: int = 8, dropout: float = 0.3) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.middle = nn.Sequential(
            nn.Linear(2 * width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(2 * width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.up(x)))
        hidden = hidden + self.middle(hidden)
        return F.linear(hidden, self.up.weight.t()).pow(2).mean()


class Attention(nn.Module):
    """Attention with dropout, by the fused operator and by hand, over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids)
        query, key, value = self.qkv(x).view(*ids.shape, 3, 2, 4).permute(2, 0, 3, 1, 4)
        fused = F.scaled_dot_product_attention(query, key, value, dropout_p=0.2, is_causal=True)
        by_hand = F.dropout((query @ key.transpose(-1, -2)).softmax(-1), 0.2) @ value
        x = x + (fused + by_hand).transpose(1, 2).reshape(x.shape)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class ConvNet(nn.Module):
    """Convolutions, batch norm, ReLU in place, pooling with indices, dropout of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(2, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3)
        self.dropout = nn.Dropout2d(0.3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(images)), inplace=True)
        x = self.dropout(F.max_pool2d(x, 2))
        x = F.relu(x + self.norm2(self.conv2(x)), inplace=True)
        return x.mean(dim=(2, 3)).pow(2).sum()


class Buffers(nn.Module):
    """Reads a buffer before and after it changes.

    Counts its calls; keeps a moving mean of what it saw.
    """

    mean: torch.Tensor
    scale: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = (self.linear(x) + self.scale + self.mean).sin()
        self.scale.mul_(3)
        self.calls += 1
        after = (before * self.scale).sin()
        self.mean.lerp_(after.detach().mean(0), 0.1)
        loss: torch.Tensor = (after * self.mean * before).sin().sum()
        return loss


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp": lambda: (MLP(), torch.randn(4, 8)),
    "attention": lambda: (Attention(), torch.randint(0, 11, (2, 5))),
    "convolutions": lambda: (ConvNet(), torch.randn(3, 2, 6, 6)),
    "buffers": lambda: (Buffers(), torch.randn(4, 8)),
}


def assert_same_steps(model: nn.Module, plain: nn.Module, *args: Any, **kwargs: Any) -> None:
    for seed in (1, 2, 3):
        assert_same(
            state_after(model, *args, seed=seed, **kwargs),
            state_after(plain, *args, seed=seed, **kwargs),
        )
    assert call_of(model).pieces


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_a_planned_step_equals_the_plain_step_to_the_bit(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where values are computed again, each operator runs as often as the schedule says."""
    count = _Count()
    monkeypatch.setattr(capture, "compile_graph", count.compile)
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


class Many(nn.Module):
    """Several outputs.

    Scalars, tensors, an integer tensor, an input, a view of an input, a constant and None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden, other = self.linear(x).tanh().sin() * scale, self.other(x).sin()
        return {
            "hidden": hidden,
            # at most two gradients meet in a tensor: the order of adding three is not defined
            "part": other[0],
            "best": hidden.argmax(-1),
            "input": x,
            "view": x[:, :4],
            "detached": hidden.detach(),
            "nothing": None,
            "number": 3,
            "norm": other.norm(),
        }


@pytest.mark.parametrize("schedule", ["keep all", "repeat"])
def test_several_outputs_are_those_of_the_plain_module(schedule: str) -> None:
    model, x = Many(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    planned(model, SCHEDULES[schedule], differentiate="all")

    got, want = model(x, scale=2.0), plain(x, scale=2.0)
    assert_same(got, want)
    assert list(got) == list(want)
    assert {k: got[k].requires_grad for k in ("hidden", "part", "view", "detached", "best")} == {
        k: want[k].requires_grad for k in ("hidden", "part", "view", "detached", "best")
    }
    assert got["view"].data_ptr() == x.data_ptr()

    def loss(out: dict[str, Any]) -> torch.Tensor:
        return out["hidden"].pow(2).sum() + out["part"].sum() * out["norm"] + out["view"].sum()  # type: ignore[no-any-return]

    assert_same_steps(model, plain, x, loss_of=loss)


class WithLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        logits = self.linear(x).sin().cos()
        loss = logits.pow(2).mean() if labels is None else F.cross_entropy(logits, labels)
        return Output(loss, logits, labels)


def test_keywords_go_in_and_a_dataclass_comes_out() -> None:
    model, x, labels = WithLogits(), torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    plain = copy.deepcopy(model)
    planned(model)
    assert_same_steps(model, plain, x=x, labels=labels, loss_of=lambda out: out.loss)
    assert isinstance(model(x, labels), Output)
    assert_same(model(x, labels=labels).logits, plain(x, labels=labels).logits)


def test_a_gradient_for_the_logits_beside_a_loss_is_refused_with_advice() -> None:
    model, x = planned(WithLogits()), torch.randn(4, 8)
    out = model(x)
    with pytest.raises(remat.TraceError, match='differentiate="all"'):
        (out.loss + out.logits.sum()).backward()
    model = planned(WithLogits(), differentiate="all")
    plain = copy.deepcopy(model)
    assert_same_steps(model, plain, x, loss_of=lambda out: out.loss + out.logits.sum())


def test_logits_beside_a_loss_may_be_read() -> None:
    out = planned(WithLogits())(torch.randn(4, 8))
    assert out.logits.argmax(-1).shape == (4,)
    assert out.logits.detach().sum().item() == pytest.approx(out.logits.sum().item())


def test_frozen_parameters_stay_without_gradient() -> None:
    model, x = MODELS["mlp"]()
    model.get_submodule("middle.0").requires_grad_(False)
    plain = copy.deepcopy(model)
    planned(model)
    assert_same_steps(model, plain, x)
    assert model.get_parameter("middle.0.weight").grad is None


def test_a_parameter_frozen_later_gets_no_gradient() -> None:
    model, x = MODELS["mlp"]()
    planned(model)(x).backward()
    model.get_submodule("middle.0").requires_grad_(False)
    assert_same_steps(model, copy.deepcopy(model), x)
    assert model.get_parameter("middle.0.weight").grad is None


def test_inputs_have_the_plain_gradients() -> None:
    model, x = MODELS["mlp"]()
    plain, inputs = copy.deepcopy(model), [x.clone().requires_grad_(), x.clone().requires_grad_()]
    planned(model)
    assert_same(state_after(model, inputs[0], seed=1), state_after(plain, inputs[1], seed=1))
    assert_same(inputs[0].grad, inputs[1].grad)


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = (self.linear(x.sin()) + x).sin()
        x.mul_(2).add_(1)
        loss: torch.Tensor = (before * x).cos().sum()
        return loss


@pytest.mark.parametrize("schedule", ["keep all", "keep nothing", "repeat"])
def test_an_input_that_the_step_changes_is_changed(schedule: str) -> None:
    model, inputs = ChangesItsInput(), [torch.ones(4, 8), torch.ones(4, 8)]
    plain = copy.deepcopy(model)
    planned(model, SCHEDULES[schedule])

    for seed in (1, 2):
        assert_same(
            state_after(model, inputs[0], seed=seed), state_after(plain, inputs[1], seed=seed)
        )
        assert_same(inputs[0], inputs[1])


class Noting(MLP):
    """Notes whether its last run was compiled."""

    is_compiled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_compiled = torch.compiler.is_compiling()
        return super().forward(x)


def test_evaluation_and_no_grad_run_the_plain_module() -> None:
    """Naive: what needs no gradient is compiled too."""
    model, x = Noting(), torch.randn(4, 8)
    plain = copy.deepcopy(model).eval()
    planned(model)
    model(x).backward()
    assert model.is_compiled

    model.eval()
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert_same(model(x), plain(x))
        assert not model.is_compiled

    assert_same_steps(model, plain, x)
    assert model.is_compiled
    assert len(call_of(model).pieces) == 2  # with gradients, evaluation is a step of its own


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


class Hooked:
    """Hooks a module, a submodule and a parameter, and counts the calls of the module's hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: Counter[str] = Counter()
        model.register_forward_pre_hook(lambda *_: self.calls.update(["before"]))
        model.register_forward_hook(lambda *_: self.calls.update(["after"]))
        model.get_submodule("middle").register_forward_hook(lambda _, __, out: out * 2)
        model.get_parameter("up.weight").register_hook(lambda gradient: gradient * 3)


@pytest.mark.parametrize("when", ["before the first step", "after it"])
def test_hooks_still_run(when: str) -> None:
    model, x = MODELS["mlp"]()
    plain = copy.deepcopy(model)
    planned(model)
    if when == "after it":
        model(x).backward()

    hooked = [Hooked(model), Hooked(plain)]
    assert_same_steps(model, plain, x)
    assert hooked[0].calls == hooked[1].calls


def test_a_copy_is_a_plain_module_and_the_original_keeps_its_plan() -> None:
    model, x = MODELS["mlp"]()
    planned(model)(x).backward()
    twin = copy.deepcopy(model)
    assert get_call(twin) is None
    assert_same_steps(model, twin, x)


def test_a_checkpointed_module_pickles() -> None:
    model, x = MODELS["mlp"]()
    planned(model)(x).backward()
    again: nn.Module = pickle.loads(pickle.dumps(model))
    assert get_call(again) is None
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert_same_steps(model, again, x)


class Guarded(MLP):
    """Leaves one attribute out of its pickle, as modules of users do, and keeps all others."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}


def test_a_module_with_its_own_getstate_has_plain_copies() -> None:
    """Naive: the plan is copied too, and runs the original module.

    Nor can the module be pickled.
    """
    model, x = Guarded(), torch.randn(4, 8)
    planned(model)(x).backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert get_call(twin) is None
        assert_same_steps(model, twin, x)


def test_unwrap_gives_the_plain_module_back() -> None:
    model, x = MODELS["mlp"]()
    planned(model)(x).backward()
    assert remat.unwrap(model) is model
    assert get_call(model) is None
    assert model(x).requires_grad


@pytest.mark.parametrize("schedule", ["keep all", "keep nothing"])
def test_a_graph_that_is_kept_is_refused(schedule: str) -> None:
    """The first backward may overwrite what is saved.

    A second one that reads it must never go unnoticed.
    """
    model, x = MODELS["mlp"]()
    loss = planned(model, SCHEDULES[schedule])(x)
    with pytest.raises(remat.TraceError, match="retain_graph"):
        loss.backward(retain_graph=True)

    model(x).backward()
    loss = model(x)
    loss.backward()
    with pytest.raises(remat.TraceError, match="second backward runs through one planned step"):
        loss.backward()


def test_a_gradient_of_a_gradient_is_refused() -> None:
    model, x = MODELS["mlp"]()
    planned(model)
    x.requires_grad_()
    loss = model(x)
    with pytest.raises(remat.TraceError, match="create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_parameter_changed_between_forward_and_backward_is_noticed() -> None:
    model, x = MODELS["mlp"]()
    loss = planned(model)(x)
    with torch.no_grad():
        model.get_parameter("up.weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def solution_for(model: nn.Module, x: torch.Tensor) -> remat.Solution:
    return remat.solve(remat.trace(model, (x,)), "100%")


def test_a_plan_for_another_shape_is_refused() -> None:
    model, x = MODELS["mlp"]()
    remat.wrap(model, solution_for(model, x))
    with pytest.raises(remat.ScheduleError, match=r"another step.*an input has another size"):
        model(torch.randn(5, 8))


def test_a_plan_for_another_model_is_refused() -> None:
    model, x = MODELS["mlp"]()
    other = nn.Sequential(MLP(8, 0.0), nn.Identity())
    remat.wrap(other, solution_for(model, x))
    with pytest.raises(remat.ScheduleError, match="another step"):
        other(x)


def test_a_plan_runs_the_model_it_was_made_for() -> None:
    model, x = MODELS["attention"]()
    plain = copy.deepcopy(model)
    graph = remat.trace(model, (x,))
    solution = Given(keep_some(7)).solve(graph, budget_bytes=UNLIMITED)
    assert_same_steps(remat.wrap(model, solution), plain, x)
    assert call_of(model).pieces[0].solution == solution


def test_a_step_with_nothing_to_differentiate_is_refused() -> None:
    model, x = MODELS["mlp"]()
    model.requires_grad_(False)
    with pytest.raises(remat.TraceError, match="nothing to differentiate"):
        planned(model)(x)
    with pytest.raises(remat.TraceError, match="nothing to differentiate"):
        remat.trace(model, (x,))


class Argmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best: torch.Tensor = self.linear(x).argmax(-1)
        return best


def test_a_step_whose_outputs_have_no_gradient_is_refused() -> None:
    with pytest.raises(remat.TraceError, match="nothing to differentiate"):
        planned(Argmax())(torch.randn(4, 8))


def test_a_budget_that_cant_be_met_says_what_can() -> None:
    model, x = MODELS["mlp"]()
    plain = copy.deepcopy(model)
    with pytest.raises(remat.BudgetError) as caught:
        remat.checkpoint(model, 1000, time_limit_s=5.0)(x)

    minimum = caught.value.minimum_bytes
    assert minimum > 1000
    assert_same_steps(remat.checkpoint(model, minimum, time_limit_s=5.0), plain, x)
    assert remat.report(model).solution.peak_bytes <= minimum


@pytest.mark.parametrize("budget", ["8 bananas", "-1GiB", "0%", -3, 1.5])
def test_a_malformed_budget_is_refused_at_once(budget: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        remat.checkpoint(MLP(), budget)


def test_only_modules_and_functions_are_planned() -> None:
    number: Any = 3
    with pytest.raises(TypeError, match="Module or a function is needed, and int was given"):
        remat.checkpoint(number, "1GiB")
    with pytest.raises(TypeError, match="Module or a function"):
        remat.trace(number, (torch.randn(2),))


def test_tracing_leaves_the_model_unchanged() -> None:
    model, x = MODELS["buffers"]()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    parameters = dict(model.named_parameters())
    remat.trace(model, (x,))
    assert_same(dict(model.state_dict()), dict(before))
    assert_same(torch.get_rng_state(), state)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_of_a_trace_is_the_plan_of_the_step(name: str) -> None:
    model, x = MODELS[name]()
    graph = remat.trace(model, (x,), costs="flops")
    planned(model)(x).backward()
    assert call_of(model).pieces[0].step.graph.fingerprint == graph.fingerprint


@pytest.mark.parametrize("schedule", ["keep all", "keep some"])
@pytest.mark.parametrize("name", MODELS)
def test_the_simulated_peak_is_the_allocators(name: str, schedule: str) -> None:
    model, x = MODELS[name]()
    # tensors so large that the 5,056 bytes of a generator's state do not show
    x = x.repeat(64, *[1] * (x.dim() - 1))
    planned(model, SCHEDULES[schedule])(x).backward()

    model.zero_grad(set_to_none=True)
    measured = remat.measure(lambda: model(x).backward(), device="cpu").peak_bytes

    tensors = [*model.parameters(), *model.buffers(), x]
    resident = sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )
    assert measured + resident == call_of(model).pieces[0].solution.peak_bytes


class _Registers(nn.Module):
    """Keeps a table that its first forward makes, and one that no forward reads."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("unread", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(256, 16), persistent=False)
        out: torch.Tensor = (self.linear(x) + self.table).tanh().mean()
        return out


def test_a_buffer_that_a_forward_registers_is_held_from_then_on() -> None:
    """With x-transformers' ALiBi, the predicted peak left such a buffer out."""
    model, x = _Registers(), torch.randn(256, 16)
    remat.checkpoint(model, "100%", costs="roofline", plan_cache=False)
    for _ in range(3):
        model.zero_grad()
        model(x).backward()

    model.zero_grad()
    held = (*model.parameters(), *model.buffers(), x)
    measured = remat.measure(lambda: model(x).backward(), device="cpu").peak_bytes
    resident = sum(tensor.nbytes for tensor in held)
    assert measured + resident == remat.report(model).solution.peak_bytes
