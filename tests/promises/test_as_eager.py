"""Steps that dynamo or a joint graph would compute differently from eager PyTorch."""

from __future__ import annotations

import copy
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import remat
from remat.torch_border import dynamo_rewrites
from tests.support.planned import SCHEDULES, assert_same, call_of, planned, state_after

pytestmark = pytest.mark.usefixtures("fresh_torch")

WIDTH = 8


class Step(nn.Module):
    """Two layers, a buffer, and a function of them that returns what the step returns."""

    buffer: torch.Tensor

    def __init__(self, compute: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("buffer", torch.ones(WIDTH))
        self.compute = compute

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(self, x)


def first_of(result: Any) -> torch.Tensor:
    loss: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return loss


def assert_as_eager(compute: Callable[[Any, torch.Tensor], Any], schedule: str) -> nn.Module:
    """Two steps leave what the plain ones leave, NumPy's random state included."""
    torch.manual_seed(0)
    model = Step(compute)
    plain, x = copy.deepcopy(model), torch.randn(6, WIDTH)
    planned(model, SCHEDULES[schedule], differentiate="all")

    states = []
    for one in (model, plain):
        np.random.seed(0)  # noqa: NPY002
        for seed in (1, 2):
            states.append([*state_after(one, x.clone(), seed=seed, loss_of=first_of)])
            states[-1].append(np.random.get_state(legacy=False)["state"]["key"].tolist())  # noqa: NPY002
    assert_same(states[:2], states[2:])
    return model


def mean_over_nothing(step: Any, x: torch.Tensor) -> Any:
    hidden, mask = step.second(step.first(x).tanh()), torch.zeros_like(x)
    return hidden.square().mean(), (hidden * mask).sum() / mask.sum()


def overflowing_metric(step: Any, x: torch.Tensor) -> Any:
    loss = step.second(step.first(x).tanh()).square().sum() * 1e3
    return loss, loss.exp()


def root_of_zero(step: Any, x: torch.Tensor) -> Any:
    hidden = step.first(x)
    return hidden.square().mean(), (hidden * 0).sum().sqrt(), step.second(hidden).sum()


def unused_part(step: Any, x: torch.Tensor) -> Any:
    used, unused = step.second(step.first(x)).chunk(2, dim=1)
    return used.sin().sum(), (unused * 0).norm()


def unused_after_a_break(step: Any, x: torch.Tensor) -> Any:
    hidden = step.first(x).tanh()
    torch._dynamo.graph_break()
    return step.second(hidden).square().mean(), (hidden * 0).sum().sqrt()


UNUSED = [mean_over_nothing, overflowing_metric, root_of_zero, unused_part]
# a piece may not be computed again within another one
IN_PIECES = [name for name in SCHEDULES if name != "anything again"]


@pytest.mark.parametrize(
    ("compute", "schedule"),
    [
        *((compute, schedule) for compute in UNUSED for schedule in SCHEDULES),
        *((unused_after_a_break, schedule) for schedule in IN_PIECES),
    ],
)
def test_a_result_that_no_loss_uses_changes_no_gradient(
    compute: Callable[[Any, torch.Tensor], Any], schedule: str
) -> None:
    """Naive: its gradient is 0, and 0 times infinity is NaN in all parameters behind it."""
    model = assert_as_eager(compute, schedule)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)


def test_losses_may_take_turns() -> None:
    """Each set of losses has a backward of its own, which runs only what it needs."""
    torch.manual_seed(0)
    model = Step(lambda step, x: (step.first(x).sum(), step.second(step.first(x)).sin().sum()))
    plain, x = copy.deepcopy(model), torch.randn(6, WIDTH)
    planned(model)
    for used in ((0,), (1,), (0, 1), (0,)):
        for one in (model, plain):
            one.zero_grad()
            losses = one(x)
            sum(losses[place] for place in used).backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert len(call_of(model).pieces) == 1


def second_moment(step: Any, x: torch.Tensor) -> Any:
    hidden = step.first(x)
    with torch.no_grad():
        step.buffer.mul_(0.9).addcmul_(hidden[0], hidden[1], value=0.1)
    return (hidden * step.buffer).sum()


def ratio(step: Any, x: torch.Tensor) -> Any:
    return torch.addcdiv(step.first(x), x, x.abs() + 1, value=0.3).square().mean()


def average(step: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        torch._foreach_lerp_([step.buffer], [step.first.weight[0]], 0.3)
    return (step.first(x) * step.buffer).sum()


def in_bfloat16(step: Any, x: torch.Tensor) -> Any:
    hidden = step.first(x).bfloat16()
    return hidden.clone().addcmul_(hidden, hidden.sin(), value=0.7).float().mean()


def whole_number(step: Any, x: torch.Tensor) -> Any:
    counts = torch.full((WIDTH,), torch.tensor(3))  # type: ignore[call-overload]
    assert counts.dtype is torch.int64
    return (step.first(x) * counts).sum()


@pytest.mark.parametrize("compute", [second_moment, ratio, average, in_bfloat16, whole_number])
def test_operators_are_those_of_eager(compute: Callable[[Any, torch.Tensor], Any]) -> None:
    """Naive: dynamo replaces them by several operators, which round differently."""
    assert_as_eager(compute, "nothing kept")


def larger_loss(step: Any, x: torch.Tensor) -> Any:
    return max(step.first(x).square().mean(), step.second(x).square().mean() + 1)


def smallest_loss(step: Any, x: torch.Tensor) -> Any:
    return min([step.first(x).square().mean(), step.second(x).square().mean() + 1])


def hinge(step: Any, x: torch.Tensor) -> Any:
    return max(step.first(x).mean() - step.first(x).mean(), 0.0) + step.second(x).mean()


@pytest.mark.parametrize("compute", [larger_loss, smallest_loss, hinge])
def test_pythons_max_is_one_of_its_arguments(compute: Callable[[Any, torch.Tensor], Any]) -> None:
    """Naive: it is `torch.maximum`, and the layer behind the other one gets gradients of 0."""
    assert_as_eager(compute, "nothing kept")


def test_max_of_numbers_breaks_no_graph() -> None:
    model = Step(lambda step, x: step.first(x).sum() * max(len(x), 0.5))
    planned(model)
    model(torch.randn(6, WIDTH)).backward()
    assert remat.report(model).num_pieces == 1


def noisy(step: Any, x: torch.Tensor) -> Any:
    noise = torch.from_numpy(np.random.randn(*x.shape).astype(np.float32))  # noqa: NPY002
    return step.second(F.dropout(step.first(x) + noise, 0.3)).square().mean()


@pytest.mark.parametrize("schedule", IN_PIECES)
def test_numpy_draws_from_its_own_generator(schedule: str) -> None:
    """Naive: dynamo draws from torch's generator, and NumPy's state stays as it was."""
    assert_as_eager(noisy, schedule)


def cast_twice(step: Any, x: torch.Tensor) -> Any:
    half = torch.bfloat16
    hidden = F.linear(x.to(half), step.first.weight.to(half)).sin()
    return F.linear(hidden, step.first.weight.to(half)).float().square().mean()


def cast_in_a_region_without_autocast(step: Any, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        inside = step.second(step.second(x)).float()
        with torch.autocast("cpu", enabled=False):
            return cast_twice(step, x) + inside.mean()


@pytest.mark.parametrize("compute", [cast_twice, cast_in_a_region_without_autocast])
def test_casts_are_cached_by_autocast_alone(compute: Callable[[Any, torch.Tensor], Any]) -> None:
    """Naive: the user's own casts are merged, and gradients are added in bfloat16."""
    assert_as_eager(compute, "nothing kept")


def branch_on_a_changed_buffer(step: Any, x: torch.Tensor) -> Any:
    before, hidden = step.buffer.clone(), step.first(x)
    step.buffer.mul_(3)
    return torch.cond(
        hidden.sum() > -1e9,
        lambda h, scale: (h * scale).sin(),
        lambda h, scale: (h * scale).cos(),
        (hidden, before),
    ).sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_branch_reads_a_buffer_as_it_was(schedule: str) -> None:
    """Naive: its backward reads the buffer itself, which has changed."""
    assert_as_eager(branch_on_a_changed_buffer, schedule)


def test_other_compiles_keep_dynamos_operators() -> None:
    """Outside of a capture, dynamo does what it did: one graph, with `torch.maximum`."""
    model = Step(larger_loss)
    planned(model)
    model(torch.randn(6, WIDTH)).backward()
    assert not dynamo_rewrites._is_capturing()
    compiled = torch.compile(Step(larger_loss), backend="eager", fullgraph=True)
    compiled(torch.randn(6, WIDTH)).backward()


ARRAYS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "function": lambda m, h: torch.from_numpy(np.std(h.detach().numpy(), axis=0)),
    "method": lambda m, h: torch.from_numpy(h.detach().numpy().std(0)),
    "list": lambda m, h: torch.from_numpy(
        np.mean([h.detach().numpy(), h.detach().numpy()], axis=0)
    ),
    "keyword": lambda m, h: torch.from_numpy(np.mean(a=h.detach().numpy(), axis=0)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_numpy_computes_its_own_functions(name: str) -> None:
    """Naive: torch's functions round differently."""

    def compute(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.first(x.repeat(40, 1)) * 3
        return first_of((m.second(h) * ARRAYS[name](m, h)).sum())

    assert_as_eager(compute, "nothing kept")


def test_exact_methods_of_an_array_break_no_graph() -> None:
    model = assert_as_eager(
        lambda m, x: (m.first(x) * torch.from_numpy(x.numpy().reshape(-1, WIDTH).copy())).sum(),
        "nothing kept",
    )
    assert call_of(model).piecewise is None


def with_own_generator(step: Any, x: torch.Tensor) -> torch.Tensor:
    return first_of(step.second(step.first(x) * step.generator.random()).sin().mean())


def with_a_bank(step: Any, x: torch.Tensor) -> torch.Tensor:
    h = step.first(x)
    step.bank.append(h.detach().mean(0))
    return first_of(step.second(h * torch.stack(list(step.bank)).mean(0)).sin().mean())


def with_the_newest_first(step: Any, x: torch.Tensor) -> torch.Tensor:
    h = step.first(x)
    step.bank.appendleft(h.detach().mean(0))
    return first_of(step.second(h * step.bank[0] + step.bank[-1]).sin().mean())


def with_a_float_of_numpy(step: Any, x: torch.Tensor) -> torch.Tensor:
    step.weight = step.weight * 0.9
    return first_of(step.weight * step.second(step.first(x)).sin().mean())


@pytest.mark.parametrize(
    "compute", [with_own_generator, with_a_bank, with_the_newest_first, with_a_float_of_numpy]
)
def test_objects_of_the_users_change_as_in_python(compute: Callable[..., torch.Tensor]) -> None:
    """Naive: dynamo draws one number for all steps, fills a deque without end, and makes a
    `numpy.float64` an array.
    """
    model = Step(compute)
    model.generator, model.bank = random.Random(3), deque(maxlen=2)  # type: ignore[assignment]
    model.weight = np.float64(0.3)  # type: ignore[assignment]
    plain = copy.deepcopy(model)
    planned(model, SCHEDULES["nothing kept"])
    for step in range(5):
        x = torch.full((2, WIDTH), step / 5)
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)  # the type too


def reordered(step: Any, x: torch.Tensor) -> torch.Tensor:
    step.known.move_to_end(next(iter(step.known)))
    return first_of(step.first(x).sum())


def given_other_data(step: Any, x: torch.Tensor) -> torch.Tensor:
    """A moving average as in MoCo's code."""
    with torch.no_grad():
        step.buffer.data = step.buffer.data * 0.9 + step.first.bias.data * 0.1
    return first_of((step.first(x) * step.buffer).sum())


@pytest.mark.parametrize(
    ("compute", "told"),
    [(reordered, "move_to_end of an OrderedDict"), (given_other_data, r"`x\.copy_\(new\)`")],
)
def test_what_would_be_lost_or_read_again_is_refused(compute: Any, told: str) -> None:
    """Naive: the order stays; values computed again read the new data, 15 % off."""
    model = Step(compute)
    model.known = OrderedDict(a=1, b=2)  # type: ignore[assignment]
    with pytest.raises(remat.TraceError, match=told):
        planned(model, SCHEDULES["nothing kept"])(torch.ones(2, WIDTH))


class Distilled(nn.Module):
    """Learns from an encoder that is not trained; rows of padding come back as zeros."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.teacher = nn.TransformerEncoder(layer, 1).eval()
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("padding", torch.tensor([[False] * 4 + [True] * 2] * 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = self.teacher(x, src_key_padding_mask=self.padding)
        loss: torch.Tensor = self.head(h.mean(1)).square().sum()
        return loss


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_encoder_takes_its_fast_path(is_frozen: bool) -> None:
    """Naive: dynamo answers that it is compiling, and padding comes back as other rows."""
    plain = Distilled()
    if is_frozen:
        plain.teacher.requires_grad_(False)
    model = planned(copy.deepcopy(plain))
    x = torch.randn(2, 6, WIDTH)
    assert_same(state_after(model, x), state_after(plain, x))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_encoder_whose_gradients_are_needed_is_captured_whole(is_frozen: bool) -> None:
    """Its fast path is only for what is not trained, and is reached by nothing that is."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True).eval()
    encoder.requires_grad_(not is_frozen)
    plain = Step(lambda m, x: x)
    plain.compute = lambda m, x: encoder(
        m.first(x)[None], src_key_padding_mask=torch.zeros(1, 6, dtype=torch.bool)
    ).sum()
    model = planned(plain)
    model(torch.randn(6, WIDTH)).backward()
    assert call_of(model).piecewise is None


@pytest.mark.parametrize("is_on", [False, True])
def test_a_logger_is_asked_before_a_branch(is_on: bool) -> None:
    """Naive: every method of a logger is left out, and returns None."""
    logger = logging.getLogger("tests.as_eager")
    logger.setLevel(logging.DEBUG if is_on else logging.INFO)

    def compute(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.first(x)
        if logger.isEnabledFor(logging.DEBUG):
            m.buffer += h.detach().mean()
        return first_of(h.square().mean())

    model = assert_as_eager(compute, "nothing kept")
    assert bool((model.get_buffer("buffer") != 1).all()) == is_on


def test_a_view_of_another_steps_result_hides_no_missing_gradient() -> None:
    """Naive: the node of the step before is found first, and this step's gives zeros."""

    def compute(m: Any, h: torch.Tensor) -> Any:
        return h[:, :4], m.first(h).sin(), m.second(h).sin()

    for is_planned in (False, True):
        before, after = nn.Linear(WIDTH, WIDTH), Step(compute)
        if is_planned:
            for each in (before, after):
                planned(each, differentiate="all")
        _, used, _ = after(before(torch.randn(4, WIDTH)))
        used.sum().backward()
        assert after.second.weight.grad is None and after.first.weight.grad is not None


def _hidden(m: Any, x: torch.Tensor) -> Any:
    h = m.first(x).tanh()
    return m.second(h).square().mean(), h


HOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "retained": lambda h: h.retain_grad(),
    "hooked": lambda h: h.register_hook(lambda gradient: gradient),
}


@pytest.mark.parametrize("differentiate", ["scalars", "all"])
@pytest.mark.parametrize("on_unsupported", ["error", "plain"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_whole_gradient_of_a_hidden_state_is_refused(
    name: str, on_unsupported: Any, differentiate: str
) -> None:
    """Naive: it is the part that arrives from outside, or None."""
    model = Step(_hidden)
    remat.checkpoint(
        model, "100%", costs="flops", differentiate=differentiate, on_unsupported=on_unsupported
    )
    loss, hidden = model(torch.randn(4, WIDTH))
    HOOKS[name](hidden)
    with pytest.raises(remat.TraceError, match="retain_grad"):
        (loss + hidden.mean() if differentiate == "all" else loss).backward()


def test_what_is_computed_without_gradients_reads_no_hidden_state() -> None:
    """The features' gradient arrives from outside alone, as in plain PyTorch."""
    plain = Step(lambda m, x: (m.second(m.first(x).detach()).sum(), m.first(x)))
    plain.compute = lambda m, x: (lambda h: (m.second(h.detach()).sum(), h))(m.first(x).sin())
    model = planned(copy.deepcopy(plain), differentiate="all")
    gradients = []
    for each in (model, plain):
        loss, hidden = each(torch.ones(4, WIDTH))
        hidden.retain_grad()
        (loss + hidden.mean()).backward()
        gradients.append(hidden.grad)
    assert_same(*gradients)


def test_hooks_of_a_library_are_its_own() -> None:
    """Naive: Fabric hooks everything that a model returns, and each backward is refused."""
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model = Step(_hidden)
    planned(model)
    loss, hidden = fabric.setup(model)(torch.randn(4, WIDTH))
    assert hidden._backward_hooks
    fabric.backward(loss)
    assert model.first.weight.grad is not None


def test_the_whole_gradient_of_a_loss_may_be_kept() -> None:
    model = planned(Step(_hidden), differentiate="all")
    loss, hidden = model(torch.randn(4, WIDTH))
    loss.retain_grad()
    loss.register_hook(lambda gradient: gradient)
    (loss + hidden.sum()).backward()
    assert loss.grad == 1


class BrokenHidden(Step):
    def forward(self, x: torch.Tensor) -> Any:
        loss, hidden = _hidden(self, x)
        torch._dynamo.graph_break()
        return loss * 2, hidden


def test_a_hidden_state_of_a_piece_is_refused_too() -> None:
    model = planned(BrokenHidden(_hidden), differentiate="all")
    for _ in range(2):
        loss, hidden = model(torch.randn(4, WIDTH))
        hidden.retain_grad()
        with pytest.raises(remat.TraceError, match="retain_grad"):
            loss.backward()


class Attention(nn.Module):
    """Attention, and a graph break after it where asked for."""

    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        self.project, self.is_cut = nn.Linear(64, 192), is_cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(2, 128, 3, 4, 16).permute(2, 0, 3, 1, 4)
        result = F.scaled_dot_product_attention(q, k, v)
        if self.is_cut:
            torch._dynamo.graph_break()
        return result.square().sum()


@pytest.mark.parametrize("is_cut", [False, True])
def test_another_attention_kernel_may_be_chosen_after_a_step(is_cut: bool) -> None:
    """Naive: the kernel of the first capture runs for ever."""
    plain, x = Attention(is_cut=is_cut), torch.randn(2, 128, 64)
    model = planned(copy.deepcopy(plain))
    math = [SDPBackend.MATH]
    for kernels in (nullcontext(), sdpa_kernel(math), nullcontext()):
        with kernels:
            got, want = (state_after(each, x) for each in (model, plain))
        assert_same(got, want)
