"""A backward that runs twice or is differentiated: refused with our error, or run plain."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import remat
from tests.support.planned import (
    UNLIMITED,
    Given,
    Steps,
    assert_same,
    call_of,
    keep_all,
    keep_nothing,
    planned,
)

pytestmark = [
    pytest.mark.usefixtures("untimed_guards", "quick_first_step"),
    # torch's own warnings: about what dynamo reads, and how it handles a custom function
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True"),
]


class TwoLosses(nn.Module):
    """Two losses whose graphs share nothing but the input, or a first layer as well."""

    def __init__(self, *, is_shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8) if is_shared else nn.Identity()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x).sin()
        return self.a(hidden).tanh().sum(), self.b(hidden).sigmoid().sum()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("steps_of", [keep_all, keep_nothing])
def test_two_backwards_are_refused(is_shared: bool, steps_of: Steps) -> None:
    """Naive: autograd's own error advises retain_graph=True, which is refused as well."""
    model = planned(TwoLosses(is_shared=is_shared), steps_of)
    for _ in range(2):
        first, second = model(torch.randn(4, 8))
        first.backward()
        with pytest.raises(remat.TraceError, match="add its losses up"):
            second.backward()


def test_two_backwards_through_pieces_are_refused() -> None:
    class Broken(TwoLosses):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.first(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    model = planned(Broken(is_shared=True))
    for _ in range(2):
        first, second = model(torch.randn(4, 8))
        first.backward()
        with pytest.raises(remat.TraceError, match="add its losses up"):
            second.backward()


class Changes(nn.Module):
    """Dropout, batch norm, an activation in place, and a buffer that is changed in place."""

    scale: torch.Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.drop, self.leave = nn.Dropout(0.5), nn.Linear(width, 1)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (self.drop(self.norm(self.enter(x))) + self.scale).sin()
        self.scale.mul_(3)
        loss: torch.Tensor = self.leave(hidden.relu_()).square().sum()
        return loss


class Tied(nn.Module):
    """Reads its weight and its input twice, and scales by a number that changes each time."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear, self.rate = nn.Linear(width, width), 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rate += 0.25
        hidden = (self.linear(x) * self.rate).tanh()
        loss: torch.Tensor = (self.linear(hidden).sin() + x).square().mean()
        return loss


def retained(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The gradient penalty of WGAN-GP, beside a loss that is planned."""
    mixed = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed), mixed, create_graph=True)
    ((slope.norm(2) - 1).square() + model(x)).backward()
    assert mixed.grad is not None
    return mixed.grad


def penalized_within(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The penalty at an input that is itself computed."""
    given = x.clone().requires_grad_()
    mixed = given.sin()
    (slope,) = torch.autograd.grad(model(mixed), mixed, create_graph=True)
    ((slope.norm(2) - 1).square() + model(x)).backward()
    assert given.grad is not None
    return given.grad


def hessian_product(model: nn.Module, x: torch.Tensor) -> Any:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(x), parameters, create_graph=True)
    along = torch.stack([(each * each.detach().cos()).sum() for each in gradients]).sum()
    return torch.autograd.grad(along, parameters, allow_unused=True)


def of_inputs(model: nn.Module, x: torch.Tensor) -> Any:
    """Gradients of the input alone, then of everything."""
    given = x.clone().requires_grad_()
    loss = model(given)
    found = torch.autograd.grad(loss, given, retain_graph=True)
    loss.backward()
    return found, given.grad


def squared_gradient(model: nn.Module, x: torch.Tensor) -> None:
    """The graph goes on into the gradients of the parameters themselves."""
    model(x).backward(create_graph=True)
    sizes = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None  # otherwise the second backward would add to gradients of the first
    torch.stack(sizes).sum().backward()


ASKED = [
    retained,
    penalized,
    penalized_within,
    hessian_product,
    of_inputs,
    squared_gradient,
]


def left_by(model: nn.Module, run: Callable[..., Any], x: torch.Tensor, seed: int) -> list[Any]:
    """Everything that a step leaves."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    returned = run(model, x)
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [returned, gradients, [b.clone() for b in model.buffers()], torch.get_rng_state()]


def plain_where_needed(model: Any, steps_of: Steps = keep_nothing, **options: Any) -> Any:
    options = {"solver": Given(steps_of), "costs": "flops", **options}
    return remat.checkpoint(model, UNLIMITED, on_unsupported="plain", **options)


# where what was asked for ends with the backward of the plan, two plans are tried
@pytest.mark.parametrize(
    ("run", "steps_of"),
    [*((run, keep_nothing) for run in ASKED), (retained, keep_all), (of_inputs, keep_all)],
)
@pytest.mark.parametrize("make", [Changes, Tied])
def test_unsupported_steps_equal_those_of_plain_pytorch(
    make: Callable[[], nn.Module], run: Callable[..., Any], steps_of: Steps
) -> None:
    """Planned steps run in between, and are captured once."""
    model = make()
    plain = copy.deepcopy(model)
    plain_where_needed(model, steps_of)

    num_pieces = []
    for seed, step in enumerate([run, planned_step] * 3):
        x = torch.randn(4, 8)
        assert_same(left_by(model, step, x, seed), left_by(plain, step, x, seed))
        num_pieces.append(len(call_of(model).pieces))
    assert num_pieces[3] == num_pieces[-1]


def planned_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x)
    loss.backward()
    return loss


def two_backwards(model: nn.Module, x: torch.Tensor) -> Any:
    first, second = model(x)
    first.backward()
    between = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    second.backward()
    return between


class Checkpointed(Changes):
    """A region recomputed in the backward draws there what it drew before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch_checkpoint(self._hidden, x, use_reentrant=False)
        loss: torch.Tensor = self.leave(hidden).square().sum()
        return loss

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.drop(self.enter(x)).tanh()
        return hidden


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[None]
        found, _ = self.attention(x, x, x, need_weights=False)
        loss: torch.Tensor = self.norm(found).square().sum()
        return loss


class InLowPrecision(Tied):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Draws(Tied):
    """Draws noise, and hard samples by Gumbel softmax."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x) * torch.rand(8)
        chosen = F.gumbel_softmax(self.linear(x), hard=True)
        return super().forward(x + noise) + chosen.square().sum()


def spectral() -> nn.Module:
    """The critic of SN-GAN: buffers that the forward changes, and reads."""
    enter, leave = spectral_norm(nn.Linear(8, 8)), spectral_norm(nn.Linear(8, 1))
    return nn.Sequential(enter, nn.LeakyReLU(0.2, inplace=True), leave, Sum())


@pytest.mark.parametrize("make", [Checkpointed, Attends, InLowPrecision, Draws, spectral])
def test_other_models_equal_those_of_plain_pytorch(make: Callable[[], nn.Module]) -> None:
    model = make()
    plain = copy.deepcopy(model)
    plain_where_needed(model)
    for seed, run in enumerate([retained, planned_step, penalized, planned_step]):
        x = torch.randn(4, 8)
        assert_same(left_by(model, run, x, seed), left_by(plain, run, x, seed))


class Field(nn.Module):
    """A function of points, as physics-informed networks are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.layers(x)
        return values


def third_derivatives(model: nn.Module, x: torch.Tensor) -> Any:
    points = x.clone().requires_grad_()
    values = model(points)
    for along in range(3):
        (slope,) = torch.autograd.grad(values.sum(), points, create_graph=True)
        values = slope[:, along]
    values.square().mean().backward()
    return points.grad


def learned_to_learn(model: nn.Module, x: torch.Tensor) -> None:
    """The inner loop of MAML: parameters that are made of parameters."""
    adapted: dict[str, torch.Tensor] = dict(model.named_parameters())
    for _ in range(2):
        loss = functional_call(model, adapted, (x,)).square().mean()
        slopes = torch.autograd.grad(loss, list(adapted.values()), create_graph=True)
        pairs = zip(adapted.items(), slopes, strict=True)
        adapted = {name: value - 0.1 * slope for (name, value), slope in pairs}
    functional_call(model, adapted, (x.flip(0),)).square().mean().backward()


def jacobians(model: nn.Module, x: torch.Tensor) -> Any:
    def total(x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = model(x).sum()
        return values

    return [
        torch.autograd.functional.jacobian(model, x),
        torch.autograd.functional.jacobian(model, x, vectorize=True),
        torch.autograd.functional.hessian(total, x),
        torch.autograd.functional.hessian(total, x, vectorize=True),
    ]


@pytest.mark.parametrize("run", [third_derivatives, jacobians])
def test_other_derivatives_equal_those_of_plain_pytorch(run: Callable[..., Any]) -> None:
    model = Field()
    plain = copy.deepcopy(model)
    plain_where_needed(model)
    for seed in range(2):
        x = torch.randn(4, 8)
        assert_same(left_by(model, run, x, seed), left_by(plain, run, x, seed))


def test_second_derivatives_agree_with_finite_differences() -> None:
    model = plain_where_needed(Field().double())
    x = torch.randn(2, 8, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(model, x)
    assert torch.autograd.gradgradcheck(model, x)


def with_its_slope(model: nn.Module, x: torch.Tensor) -> None:
    points = x.clone().requires_grad_()
    values = model(points)
    (slope,) = torch.autograd.grad(values.sum(), points, create_graph=True)
    (slope.square().sum() + F.softplus(values).sum()).backward()


@pytest.mark.parametrize("run", [with_its_slope, learned_to_learn])
def test_losses_of_a_result_and_its_gradient_agree_up_to_rounding(
    run: Callable[..., Any],
) -> None:
    """Plain PyTorch sums both gradients on the way; here they are summed at the parameters."""
    model = Field()
    plain = copy.deepcopy(model)
    plain_where_needed(model)
    for seed in range(2):
        x = torch.randn(4, 8)
        got, want = left_by(model, run, x, seed), left_by(plain, run, x, seed)
        torch.testing.assert_close(got, want)


def test_many_gradients_at_once_are_refused() -> None:
    """Naive: an error of torch's about the memory of a batched tensor."""
    model = planned(Field())
    with pytest.raises(remat.TraceError, match="is_grads_batched=True"):
        torch.autograd.functional.jacobian(model, torch.randn(4, 8), vectorize=True)


@pytest.mark.filterwarnings("default")
def test_callbacks_pass_the_option_on() -> None:
    pytest.importorskip("lightning.pytorch")
    integration = pytest.importorskip("remat.lightning")
    body = nn.Module()
    body.model = Field()
    trainer = SimpleNamespace(optimizers=[], accumulate_grad_batches=1)
    options = {"costs": "flops", "module": "model"}

    callback = integration.RematCallback(UNLIMITED, **options, on_unsupported="plain")
    callback.on_train_start(trainer, body)
    assert call_of(body.model).on_unsupported == "plain"

    callback = integration.RematCallback(UNLIMITED, **options, on_unsupported="plane")
    with pytest.raises(ValueError, match="neither"):
        callback.on_train_start(trainer, body)


class WithLogits(Tied):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.linear(x)


def test_logits_beside_the_loss_are_passed_on() -> None:
    """They are unchanged, and have no gradient unless that is asked for."""

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss, logits = model(x)
        loss.backward(retain_graph=True)
        loss.backward()
        found: torch.Tensor = logits.detach()
        return found

    def with_logits(model: nn.Module, x: torch.Tensor) -> None:
        loss, logits = model(x)
        (loss + logits.sum()).backward(retain_graph=True)
        logits.sum().backward()

    x = torch.randn(4, 8)
    for runs, differentiate in (([run], "scalars"), ([run, with_logits], "all")):
        model = WithLogits()
        plain = copy.deepcopy(model)
        plain_where_needed(model, differentiate=differentiate)
        for each in runs:
            assert_same(left_by(model, each, x, 0), left_by(plain, each, x, 0))


def test_two_losses_with_graphs_of_their_own_have_the_plain_gradients() -> None:
    """A parameter that the first loss does not reach has no gradient, rather than zeros."""
    model = TwoLosses()
    plain = copy.deepcopy(model)
    plain_where_needed(model)

    for seed in range(3):
        x = torch.randn(4, 8)
        got = left_by(model, two_backwards, x, seed)
        assert_same(got, left_by(plain, two_backwards, x, seed))
        assert None in got[0]


def test_two_losses_with_a_shared_graph_have_the_gradients_of_retain_graph() -> None:
    """Plain PyTorch refuses without retain_graph=True; these are the gradients it has with it."""
    model = TwoLosses(is_shared=True)
    plain = copy.deepcopy(model)
    plain_where_needed(model)
    x = torch.randn(4, 8)

    with pytest.raises(RuntimeError, match="second time"):
        two_backwards(plain, x)
    plain.zero_grad()
    first, second = plain(x)
    first.backward(retain_graph=True)
    second.backward()

    left_by(model, two_backwards, x, 0)
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_one_loss_has_one_backward_as_in_plain_pytorch() -> None:
    model = plain_where_needed(Changes())
    loss = model(torch.randn(4, 8))
    loss.backward()
    with pytest.raises(remat.TraceError, match="retain_graph=True"):
        loss.backward()
    planned_step(model, torch.randn(4, 8))


def test_accumulation_goes_on_across_an_unsupported_micro_step() -> None:
    model = Changes()
    plain = copy.deepcopy(model)
    plain_where_needed(model)

    for seed in range(2):
        for each in (model, plain):
            torch.manual_seed(seed)
            each.zero_grad()
            for step in (planned_step, retained, planned_step, penalized, planned_step):
                step(each, torch.randn(4, 8))
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def gan_losses(critic: nn.Module, generator: nn.Module) -> list[float]:
    """WGAN-GP, with the critic's loss kept while the generator's step runs through it as well."""
    rates: Any = {"lr": 0.01, "betas": (0.5, 0.9)}
    for_critic = torch.optim.Adam(critic.parameters(), **rates)
    for_generator = torch.optim.Adam(generator.parameters(), **rates)

    torch.manual_seed(0)
    found = []
    for _ in range(4):
        real, made = torch.randn(4, 8), generator(torch.randn(4, 8))
        mixed = torch.lerp(real, made.detach(), torch.rand(4, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed), mixed, create_graph=True)
        loss = critic(made.detach()) - critic(real) + (slope.norm(2, 1) - 1).square().mean()

        for_critic.zero_grad()
        loss.backward()
        for_critic.step()

        loss_of_made = -critic(made)
        for_generator.zero_grad()
        loss_of_made.backward()
        for_generator.step()
        found += [loss.item(), loss_of_made.item()]
    return found


def test_a_gan_trains_as_in_plain_pytorch() -> None:
    critic, generator = Changes(), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    plain = copy.deepcopy(critic)
    plain_where_needed(critic)
    losses = gan_losses(critic, copy.deepcopy(generator))
    assert losses == gan_losses(plain, generator)
    assert_same([*critic.parameters()], [*plain.parameters()])


class Penalty:
    """A step function that returns two losses, of which one is differentiated twice."""

    def __init__(self) -> None:
        self.model = Changes()

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model(x), x.square().sum() * self.model.enter.weight.sum()


def test_a_step_function_runs_plain_where_needed() -> None:
    own, plain = Penalty(), Penalty()
    plain.model.load_state_dict(own.model.state_dict())
    step = plain_where_needed(own)

    def run(call: Any, model: Changes) -> list[Any]:
        def both(_: nn.Module, x: torch.Tensor) -> None:
            loss, other = call(x)
            (slope,) = torch.autograd.grad(other, model.enter.weight, create_graph=True)
            (loss + slope.square().sum()).backward(retain_graph=True)
            loss.backward()

        return left_by(model, both, torch.ones(4, 8), 0)

    for _ in range(2):
        assert_same(run(step, own.model), run(plain, plain.model))


def test_a_plan_from_a_file_runs_plain_where_needed() -> None:
    model, x = Changes(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    solution = remat.solve(remat.trace(model, (x,), costs="flops"), UNLIMITED)
    remat.wrap(model, solution, costs="flops", on_unsupported="plain")
    for seed in range(2):
        assert_same(left_by(model, retained, x, seed), left_by(plain, retained, x, seed))


def test_the_backend_of_torch_compile_runs_plain_where_needed() -> None:
    model, x = Changes(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    options: Any = {"budget": UNLIMITED, "costs": "flops", "on_unsupported": "plain"}
    compiled: Any = torch.compile(model, backend="remat", options=options)
    for seed in range(2):
        assert_same(left_by(compiled, penalized, x, seed), left_by(plain, penalized, x, seed))


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def penalized_once(model: nn.Module, x: torch.Tensor) -> Any:
    given = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(given), given, create_graph=True)
    slope.square().sum().backward()
    return given.grad


def test_autocast_is_as_it_was_in_the_forward() -> None:
    """Naive: the forward runs again in float32.

    Or it casts the weight for each reader, and rounds differently.
    """
    model = Tied()
    plain = copy.deepcopy(model)
    plain_where_needed(model)

    def run(model: nn.Module, x: torch.Tensor) -> Any:
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(given)
        (slope,) = torch.autograd.grad(loss, given, create_graph=True)
        slope.square().sum().backward(retain_graph=True)
        loss.backward()
        return given.grad

    for seed in range(2):
        x = torch.randn(4, 8)
        assert_same(left_by(model, run, x, seed), left_by(plain, run, x, seed))


def test_outputs_need_not_be_scalars() -> None:
    """An output may be changed in place, and its gradient need not be an expanded scalar."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    plain_where_needed(model)

    def run(model: nn.Module, x: torch.Tensor) -> None:
        loss = model(x).mul_(2).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    for seed in range(2):
        x = torch.randn(4, 8)
        assert_same(left_by(model, run, x, seed), left_by(plain, run, x, seed))


def test_hooks_of_parameters_run_once() -> None:
    """Naive: a leaf that is differentiated in the node's backward runs its hooks there too."""
    model = Tied()
    plain = copy.deepcopy(model)
    plain_where_needed(model)
    for each in (model, plain):
        each.linear.weight.register_hook(lambda gradient: gradient * 2)

    x = torch.randn(4, 8)
    for run in (retained, penalized_once, hessian_product, planned_step):
        got, want = left_by(model, run, x, 0), left_by(plain, run, x, 0)
        torch.testing.assert_close(got, want)  # a leaf's gradients are summed before its hooks run


def test_an_input_may_be_made_with_a_parameter_of_the_model() -> None:
    """Naive: the weight's gradient counts twice, once through the graph of the input."""
    model = Tied()
    plain = copy.deepcopy(model)
    plain_where_needed(model)

    def run(model: nn.Module, x: torch.Tensor) -> Any:
        given = model.linear(x)  # type: ignore[operator]
        (slope,) = torch.autograd.grad(model(given), given, create_graph=True)
        slope.square().sum().backward()

    x = torch.randn(4, 8)
    for seed in range(2):
        got, want = left_by(model, run, x, seed), left_by(plain, run, x, seed)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)  # sums in another order


@pytest.mark.parametrize("run", [retained, penalized_once])
def test_a_tensor_changed_in_between_is_noticed(run: Callable[..., Any]) -> None:
    """As in plain PyTorch, and also where the plan saved a copy."""
    model = plain_where_needed(Changes())

    def changing(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)
        with torch.no_grad():
            model.get_parameter("enter.weight").mul_(2)
        return loss

    with pytest.raises(remat.TraceError, match="modified by an inplace operation"):
        run(changing, torch.randn(4, 8))


def test_an_optimizer_may_step_between_losses_with_graphs_of_their_own() -> None:
    """Naive: a parameter that the second loss does not read is treated as changed."""
    model = TwoLosses()
    plain = copy.deepcopy(model)
    plain_where_needed(model)

    def run(model: nn.Module, x: torch.Tensor) -> None:
        first, second = model(x)
        first.backward()
        with torch.no_grad():
            for parameter in model.get_submodule("a").parameters():
                parameter.sub_(0.1)
        second.backward()

    for seed in range(2):
        x = torch.randn(4, 8)
        assert_same(left_by(model, run, x, seed), left_by(plain, run, x, seed))


def test_running_plain_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    model = plain_where_needed(Changes())
    x = torch.randn(4, 8)
    planned_step(model, x)
    assert "plain" not in caplog.text

    for _ in range(2):
        retained(model, x)
        penalized(model, x)
        retained(model, torch.randn(2, 8))

    (said,) = [record.getMessage() for record in caplog.records if "plain" in record.getMessage()]
    assert "Changes" in said
    assert "retain_graph=True" in said
    assert "not held to the budget" in said


def deep() -> nn.Module:
    """Layers that draw and count, and a loss."""
    layers = [
        nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.5))
        for _ in range(4)
    ]
    return nn.Sequential(*layers, Sum())


def peak_of(model: nn.Module, x: torch.Tensor) -> int:
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
    model.zero_grad(set_to_none=True)
    return held + remat.measure(lambda: planned_step(model, x), device="cpu").peak_bytes


def test_planned_steps_stay_within_the_budget() -> None:
    """The budget includes copies of buffers and random state, which only the option makes."""
    x = torch.randn(256, 32)
    graph = remat.trace(deep(), (x,), costs="flops")
    budget_bytes = remat.simulate(graph, remat.Schedule.keep_all(graph)).peak_bytes * 8 // 10

    for_plans = []
    for on_unsupported in ("error", "plain"):
        model = deep()
        remat.checkpoint(model, budget_bytes, costs="flops", on_unsupported=on_unsupported)
        planned_step(model, x)
        if on_unsupported == "plain":
            retained(model, x)
            penalized(model, x)

        assert peak_of(model, x) <= budget_bytes
        for_plans.append(call_of(model).pieces[0].solution.budget_bytes)

    kept_bytes = 5056 + sum(buffer.nbytes for buffer in deep().buffers())
    assert for_plans == [budget_bytes, budget_bytes - kept_bytes]


def test_only_the_option_adds_an_autograd_node() -> None:
    x = torch.randn(4, 8)
    name = "CompiledFunctionBackward"
    assert planned(Tied())(x).grad_fn.name() == name
    assert plain_where_needed(Tied())(x).grad_fn.name() == "_WatchedBackward"


def test_nothing_is_kept_after_the_only_backward() -> None:
    """Naive: the batch lives as long as its loss, beside the next batch."""
    model = plain_where_needed(Changes())
    x = torch.randn(4, 8)
    batch = weakref.ref(x)
    loss = model(x)
    loss.backward()

    del x
    assert batch() is None
    assert loss.requires_grad


def test_unknown_values_are_refused() -> None:
    solution = remat.solve(remat.trace(Tied(), (torch.randn(4, 8),), costs="flops"), "100%")
    options: Any = {"budget": UNLIMITED, "on_unsupported": "plane"}
    compiled = torch.compile(Tied(), backend="remat", options=options)
    unknown: Any = "plane"
    known = r'neither "error".* nor "plain"'

    with pytest.raises(ValueError, match=known):
        remat.checkpoint(Tied(), UNLIMITED, on_unsupported=unknown)
    with pytest.raises(ValueError, match=known):
        remat.wrap(Tied(), solution, on_unsupported=unknown)
    with pytest.raises(Exception, match=known):
        compiled(torch.randn(4, 8))


def test_blocks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="leave one of them out"):
        remat.checkpoint(model, UNLIMITED, blocks=[model[0]], on_unsupported="plain")


def test_a_plan_from_a_file_without_room_for_copies_is_refused() -> None:
    x = torch.randn(4, 8)
    graph = remat.trace(Changes(), (x,), costs="flops")
    solution = remat.solve(graph, remat.solve(graph, "100%").peak_bytes)
    model = remat.wrap(Changes(), solution, costs="flops", on_unsupported="plain")
    with pytest.raises(remat.BudgetError, match="buffers that the step changes"):
        model(x)


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.linear(x.mul_(2).sin()).sum()
        return loss


class ReturnsViews(ChangesItsInput):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.linear(x).sin()
        return hidden, hidden[0]


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = x**3
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        x, result = ctx.saved_tensors
        gradient: torch.Tensor = gradients[0] * 3 * result / x
        return gradient


_cubed: Any = Cubed.apply


class Custom(ChangesItsInput):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = _cubed(self.linear(x)).sum()
        return loss


def test_steps_that_cannot_run_plain_say_why() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    changing = plain_where_needed(ChangesItsInput())
    with pytest.raises(remat.TraceError, match="changes an input that needs a gradient"):
        changing(x * 1).backward(retain_graph=True)

    views = plain_where_needed(ReturnsViews(), differentiate="all")
    with pytest.raises(remat.TraceError, match="tensors that share memory"):
        views(x)[0].sum().backward(retain_graph=True)

    custom = plain_where_needed(Custom())
    with pytest.raises(remat.TraceError, match=r"custom torch\.autograd\.Function"):
        torch.autograd.grad(custom(x), x, create_graph=True)

    planned_step(changing, x * 1)
    views(x)[0].sum().backward()


def test_a_custom_function_runs_twice_where_nothing_is_differentiated_twice() -> None:
    model = Custom()
    plain = copy.deepcopy(model)
    plain_where_needed(model)
    x = torch.randn(4, 8)
    assert_same(left_by(model, retained, x, 0), left_by(plain, retained, x, 0))


def test_steps_in_pieces_are_refused_and_say_why() -> None:
    class Broken(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    model = plain_where_needed(Broken())
    for _ in range(2):
        with pytest.raises(remat.TraceError, match="runs in pieces"):
            model(torch.randn(4, 8)).backward(retain_graph=True)


def test_inductor_runs_unsupported_steps_plain_too() -> None:
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1), Sum())
    plain = copy.deepcopy(model)
    options: Any = {"costs": "flops", "plan_cache": False, "on_unsupported": "plain"}
    remat.checkpoint(model, "100%", executor="inductor", **options)

    for run in (planned_step, retained, penalized, hessian_product, planned_step):
        x = torch.randn(4, 8)
        got, want = left_by(model, run, x, 0), left_by(plain, run, x, 0)
        torch.testing.assert_close(got, want)
