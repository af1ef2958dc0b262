"""Lower precision: autocast, loss scaling, parameters in bfloat16, products in float8.

Plans recompute casts before anything else.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from tests.support.planned import assert_same, call_of, keep_nothing, planned, repeat_anything

pytestmark = pytest.mark.usefixtures("fresh_torch")


class Net(nn.Module):
    """Attention, a convolution and norms, with dropout.

    One weight is used twice. Returns its loss.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.conv, self.norm = nn.Conv1d(width, width, 3, padding=1), nn.LayerNorm(width)
        self.batch_norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.dropout(self.out(F.scaled_dot_product_attention(query, key, value)))
        x = x + self.out(F.gelu(self.batch_norm(self.conv(x.mT)).mT))
        loss: torch.Tensor = F.mse_loss(x.float(), torch.ones_like(x, dtype=torch.float32))
        return loss


AUTOCASTS: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16},
    {"dtype": torch.bfloat16, "cache_enabled": False},
]


def train(model: nn.Module, x: torch.Tensor, **autocast: Any) -> list[torch.Tensor]:
    """Three steps under autocast, with loss scaling in float16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(
        "cpu", enabled=autocast.get("dtype") is torch.float16, init_scale=2.0**24, growth_interval=1
    )

    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", **autocast):
            loss = model(x)

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses += [loss.detach(), torch.tensor(scaler.get_scale())]
    return losses


@pytest.mark.parametrize(
    ("autocast", "schedule"),
    [*((autocast, "keep nothing") for autocast in AUTOCASTS), (AUTOCASTS[0], "repeat")],
    ids=str,
)
def test_autocast_training_equals_plain_training(autocast: dict[str, Any], schedule: str) -> None:
    """In float16 the first scale overflows: a step is skipped and the scale halved, by both."""
    plain, x = Net(), torch.randn(2, 6, 16)
    steps_of = keep_nothing if schedule == "keep nothing" else repeat_anything(3)
    model = planned(copy.deepcopy(plain), steps_of)

    ends = []
    for each in (model, plain):
        torch.manual_seed(1)
        losses = train(each, x, **autocast)
        ends.append([losses, dict(each.state_dict()), torch.get_rng_state()])
        assert bool(losses[1] == losses[-1]) == (autocast["dtype"] is not torch.float16)

    assert_same(*ends)
    assert len(call_of(model).pieces) == 1


class Regions(nn.Module):
    """One weight read in several regions of autocast.

    Twice in one, once in another, and twice where nothing is cached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for cache_enabled, readers in ((True, 2), (True, 1), (False, 2)):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
                for _ in range(readers):
                    x = x + self.linear(x).sin()
        x = x + self.linear(x).sin()
        return x.float().pow(2).mean()


def test_autocast_casts_a_weight_once_per_region() -> None:
    """Naive: each reader casts, as AOTAutograd traces it.

    The gradients of all are then summed in another precision.
    """
    plain, x = Regions(), torch.randn(8, 16)
    model = planned(copy.deepcopy(plain))
    ends = []
    for each in (model, plain):
        each(x).backward()
        ends.append({name: p.grad for name, p in each.named_parameters()})
    assert_same(*ends)


def assert_same_gradients(
    plain: nn.Module, x: torch.Tensor, steps_of: Any = keep_nothing
) -> nn.Module:
    model = planned(copy.deepcopy(plain), steps_of)
    ends = []
    for each in (model, plain):
        torch.manual_seed(1)
        each(x).backward()
        ends.append(
            [
                {name: p.grad for name, p in each.named_parameters()},
                dict(each.state_dict()),
                torch.get_rng_state(),
            ]
        )

    assert_same(*ends)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_parameters_of_another_type_have_the_plain_gradients(dtype: torch.dtype) -> None:
    assert_same_gradients(Net().to(dtype), torch.randn(2, 6, 16, dtype=dtype))


class Float8(torch.autograd.Function):
    """A product in float8, forward and backward, with a scale for each tensor.

    What is saved is in float8 too.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        (x8, x_scale), (w8, w_scale) = in_float8(x), in_float8(weight)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        result: torch.Tensor = torch._scaled_mm(
            x8, w8.t(), scale_a=x_scale, scale_b=w_scale, out_dtype=torch.bfloat16
        )
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = in_float8(gradients[0])

        to_x = torch._scaled_mm(
            g8, w8.t().contiguous().t(), scale_a=g_scale, scale_b=w_scale, out_dtype=torch.bfloat16
        )
        to_w = torch._scaled_mm(
            g8.t().contiguous(),
            x8.t().contiguous().t(),
            scale_a=g_scale,
            scale_b=x_scale,
            out_dtype=torch.bfloat16,
        )

        return to_x, to_w


def in_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().max().float() / 448 + 1e-12
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


class Float8Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(32, 32, dtype=torch.bfloat16) / 8 for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            product: Any = Float8.apply(x, weight)  # type: ignore[no-untyped-call]
            x = F.dropout(F.gelu(product), 0.1)
        return x.float().pow(2).mean()


def has_float8() -> bool:
    x = torch.zeros(16, 16, dtype=torch.float8_e4m3fn)
    try:
        torch._scaled_mm(
            x, x.t(), scale_a=torch.ones(()), scale_b=torch.ones(()), out_dtype=torch.bfloat16
        )
    except (RuntimeError, NotImplementedError):
        return False
    return True


class ThroughFloat8(torch.autograd.Function):
    """Rounds to float8 forward, and its gradient to float8's other type."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x8, scale = in_float8(x)
        return x8.to(x.dtype) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        scale = gradients[0].abs().max() / 57344 + 1e-12
        return (gradients[0] / scale).to(torch.float8_e5m2).to(gradients[0].dtype) * scale


class Float8CastsNet(nn.Module):
    """Casts alone: activations rounded to float8, and trained weights plus a float8 one."""

    frozen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(32, 32) / 8 for _ in range(3))
        self.register_buffer("frozen", torch.randn(32, 32).to(torch.float8_e4m3fn))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            rounded: Any = ThroughFloat8.apply(x)  # type: ignore[no-untyped-call]
            x = F.dropout(F.gelu(rounded @ (weight + self.frozen.float())), 0.1)
        return x.float().pow(2).mean()


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function:DeprecationWarning")  # dynamo's
@pytest.mark.parametrize(
    "steps_of", [keep_nothing, repeat_anything(3)], ids=["keep nothing", "repeat"]
)
def test_casts_to_float8_have_the_plain_gradients(steps_of: Any) -> None:
    model = assert_same_gradients(Float8CastsNet(), torch.randn(32, 32), steps_of)
    values = call_of(model).pieces[0].step.graph.values
    assert {value.size_bytes for value in values if value.dtype.startswith("float8")} == {32 * 32}


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function:DeprecationWarning")  # dynamo's
@pytest.mark.skipif(not has_float8(), reason="no float8 products in this torch on this CPU")
def test_products_in_float8_have_the_plain_gradients() -> None:
    model = assert_same_gradients(Float8Net(), torch.randn(32, 32, dtype=torch.bfloat16))
    targets = [op.target for op in call_of(model).pieces[0].step.graph.operators]
    assert targets.count("aten._scaled_mm.default") == 8  # the first input needs no gradient


class Attentive(nn.Module):
    """Layer norms in float32 around products in bfloat16; returns its loss."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(norm(x).softmax(-1))
        return x.float().pow(2).mean()


def test_casts_of_the_forward_are_computed_again_before_anything_else() -> None:
    """They are the cheapest, and their sources are held anyway.

    A source is a parameter, or what a softmax saves for its backward.
    """
    model, x = Attentive(), torch.randn(1024, 256)
    with torch.autocast("cpu", torch.bfloat16):
        graph = remat.trace(model, (x,))

    casts = [op.target == "aten._to_copy.default" for op in graph.operators]
    graph = graph.with_costs([1.0 if is_cast else 2.0 for is_cast in casts])
    steps = remat.solve(graph, "85%", time_limit_s=5.0, gap=1e-4).schedule
    assert steps is not None
    repeated = [graph.operators[i] for i, times in Counter(steps.steps).items() if times > 1]
    assert {op.target for op in repeated if op.phase is remat.Phase.FORWARD} == {
        "aten._to_copy.default"
    }
