"""The workspace of every operator that real models train with, against the allocator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map_only

import remat
from remat.tracers import replay, workspace
from remat.tracers.calls import Call, TensorSpec
from remat.tracers.counts import bytes_moved, flop_of
from remat.tracers.cpu_workspace import formula_bytes
from remat.tracers.workspace import workspace_bytes

pytestmark = pytest.mark.usefixtures("own_measurements")

aten = torch.ops.aten
VOCABULARY = 211


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, length))


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=96,
        n_layer=1,
        n_head=4,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids(3, 40), "labels": ids(3, 40)}


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=192,
    )
    return transformers.BertForMaskedLM(config), {"input_ids": ids(3, 40), "labels": ids(3, 40)}


def t5() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=96, d_kv=24, d_ff=160, num_layers=1, num_heads=4
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": ids(3, 40),
        "labels": ids(3, 24),
    }


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": ids(3, 40), "labels": ids(3, 40)}


def vit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.ViTConfig(
        image_size=64,
        hidden_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=192,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.randn(3, 3, 64, 64),
        "labels": torch.tensor([0, 1, 0]),
    }


def resnet50() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Bottlenecks of ResNet-50, one per stage, in two stages."""
    config = transformers.ResNetConfig(hidden_sizes=[256, 512], depths=[1, 1])
    return transformers.ResNetForImageClassification(config), {
        "pixel_values": torch.randn(3, 3, 64, 64),
        "labels": torch.tensor([0, 1, 0]),
    }


class InvertedResidual(nn.Sequential):
    """The block of MobileNetV2 (Sandler et al. 2018)."""

    def __init__(self, width: int, expansion: int, out: int, stride: int) -> None:
        inner = width * expansion
        super().__init__(
            *(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()),
            *(
                nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
                nn.BatchNorm2d(inner),
                nn.ReLU6(),
            ),
            *(nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)),
        )


def mobilenet_v2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    layers = (
        nn.Conv2d(3, 32, 3, 2, 1),
        InvertedResidual(32, 6, 24, 2),
        InvertedResidual(24, 6, 40, 1),
    )
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(40, 10)
    ), {"input": torch.randn(3, 3, 64, 64)}


class Captured(Exception):
    """Carries the joint graph out of AOTAutograd."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph


def joint_graph(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.fx.Graph:
    """The joint forward and backward graph of a training step."""

    def step(state: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        out = torch.func.functional_call(model, state, (), inputs)
        loss: torch.Tensor = out if isinstance(out, torch.Tensor) else out.loss
        return loss

    def keep(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return gm

    def partition(module: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        raise Captured(module.graph)

    state = dict(model.train().named_parameters()) | dict(model.named_buffers())
    with pytest.raises(Captured) as captured:
        aot_function(step, fw_compiler=keep, bw_compiler=keep, partition_fn=partition)(
            state, inputs
        )
    return captured.value.graph


def distinct_calls(graph: torch.fx.Graph) -> dict[Call, torch.fx.Node]:
    return {
        call: node
        for node in graph.nodes
        if node.op == "call_function" and (call := Call.of(node)).computes
    }


def allocated(run: Callable[[], Any]) -> tuple[int, tuple[int, ...]]:
    """The most bytes held beyond those at the end, and the bytes of each output's storage."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        outputs = run()

    changes: list[tuple[int, int]] = []
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())

    while pending:
        event = pending.pop()
        if event.tag == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
        pending.extend(event.children)

    held = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        held += change
        peak = max(peak, held)
    return peak - held, storages(outputs)


def storages(outputs: Any) -> tuple[int, ...]:
    return tuple(
        leaf.untyped_storage().nbytes()
        for leaf in tree_leaves(outputs)
        if isinstance(leaf, torch.Tensor)
    )


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
@pytest.mark.parametrize(
    ("make", "dtype", "memory_format"),
    [
        (gpt2, torch.float32, torch.contiguous_format),
        (bert, torch.float32, torch.contiguous_format),
        (t5, torch.float32, torch.contiguous_format),
        (llama, torch.float32, torch.contiguous_format),
        (llama, torch.bfloat16, torch.contiguous_format),
        (vit, torch.float32, torch.contiguous_format),
        (resnet50, torch.float32, torch.contiguous_format),
        (mobilenet_v2, torch.float32, torch.contiguous_format),
        (mobilenet_v2, torch.float32, torch.channels_last),
        (mobilenet_v2, torch.bfloat16, torch.contiguous_format),
    ],
)
def test_every_operator_of_these_models_holds_what_is_predicted(
    make: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]],
    dtype: torch.dtype,
    memory_format: torch.memory_format,
) -> None:
    model, inputs = make()
    model = model.to(dtype=dtype, memory_format=memory_format)  # type: ignore[call-overload]

    inputs = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    inputs = {
        name: value.to(memory_format=memory_format) if value.dim() == 4 else value
        for name, value in inputs.items()
    }

    wrong = []
    for call, node in distinct_calls(joint_graph(model, inputs)).items():
        run = replay._run_of(call)
        with torch.no_grad():
            held, real_storages = allocated(run)

        if workspace_bytes(call, "cpu") != held:
            wrong.append(f"{call}: {workspace_bytes(call, 'cpu')} was predicted, {held} was held")
        if real_storages != storages(node.meta["val"]) and "batch_norm" not in str(call.target):
            wrong.append(
                f"{call}: storages of {real_storages} bytes, fake ones of "
                f"{storages(node.meta['val'])}"
            )

    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("shape", [(4, 10), (64, 16), (8, 4, 6, 6)])
@pytest.mark.parametrize("has_weight", [True, False])
def test_batch_norm_workspace_is_predicted(shape: tuple[int, ...], *, has_weight: bool) -> None:
    """It depends on the machine's kernels if there is no weight, or one number per channel."""
    norm = {
        2: nn.BatchNorm1d(shape[1], affine=has_weight),
        4: nn.BatchNorm2d(shape[1], affine=has_weight),
    }[len(shape)]
    scale = nn.Linear(1, 1)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.scale = norm, scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.norm(x * self.scale.weight.sum()).pow(2).sum()
            return out

    calls = list(distinct_calls(joint_graph(Scaled(), {"x": torch.randn(shape)})))
    assert any("batch_norm" in str(call.target) for call in calls)
    for call in calls:
        with torch.no_grad():
            held, _ = allocated(replay._run_of(call))
        assert workspace_bytes(call, "cpu") == held, call


def test_batch_norm_in_bfloat16_saves_half_of_what_its_fake_says() -> None:
    """The only operator of these models whose outputs and fake outputs differ in size (2.13)."""
    one = torch.ones(16, dtype=torch.bfloat16)
    image = torch.ones(2, 16, 4, 4, dtype=torch.bfloat16)
    real = aten._native_batch_norm_legit_functional(image, one, one, one, one, True, 0.1, 1e-5)
    fake = aten._native_batch_norm_legit_functional(
        image.to("meta"), *[one.to("meta")] * 4, True, 0.1, 1e-5
    )

    assert [t.nbytes for t in fake[1:3]] == [64, 64]
    assert [t.nbytes for t in real[1:3]] == [32, 32]


FLOAT, HALF, INDEX = torch.float32, torch.bfloat16, torch.int64


def call_of(target: Any, *args: Any) -> Call:
    """The call of `target` where `tensor` specs stand for tensors.

    Its outputs are those of the fake kernels.
    """
    fakes = tree_map_only(TensorSpec, on_meta, args)
    outputs = [TensorSpec.of(t) for t in tree_leaves(target(*fakes)) if isinstance(t, torch.Tensor)]
    return Call(target, args, (), tuple(replace(spec, device_type="cpu") for spec in outputs))


def on_meta(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")


def tensor(*shape: int, dtype: torch.dtype = FLOAT, order: tuple[int, ...] = ()) -> TensorSpec:
    """A tensor of `shape` whose memory lies in the `order` of its dimensions."""
    made = torch.empty(
        shape if not order else [shape[i] for i in order], dtype=dtype, device="meta"
    )
    spec = TensorSpec.of(
        made if not order else made.permute([order.index(i) for i in range(len(order))])
    )
    return replace(spec, device_type="cpu")


ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
OPERATORS: dict[str, tuple[Any, ...]] = {
    "scalar": (aten.mul.Tensor, tensor(64, 48), 2.5),
    "integer scalar": (aten.add.Tensor, tensor(64, dtype=INDEX), 1),
    "mixed types": (aten.add.Tensor, tensor(64, 48, dtype=HALF), tensor(64, 48)),
    "mask": (aten.mul.Tensor, tensor(64, 48), tensor(64, 48, dtype=torch.bool)),
    "mixed where": (
        aten.where.self,
        tensor(64, 48, dtype=torch.bool),
        tensor(64, 48),
        tensor(64, 48, dtype=HALF),
    ),
    "comparison": (aten.eq.Tensor, tensor(64, 48), tensor(64, 48, dtype=HALF)),
    "softmax of a permuted tensor": (
        aten._softmax.default,
        tensor(8, 48, 64, order=(2, 0, 1)),
        -1,
        False,
    ),
    "mean in bfloat16": (aten.mean.dim, tensor(8, 48, 64, dtype=HALF), (-1,), True),
    "mean of all": (aten.mean.default, tensor(8, 48, 640)),
    "logsumexp": (aten.logsumexp.default, tensor(64, 48), (-1,)),
    "product of a strided matrix": (
        aten.mm.default,
        replace(tensor(64, 48), stride=(96, 2)),
        tensor(48, 32),
    ),
    "batch of strided matrices": (
        aten.bmm.default,
        tensor(8, 48, 64, order=(2, 1, 0)),
        tensor(8, 64, 32),
    ),
    "layer norm of a permuted tensor": (
        aten.native_layer_norm.default,
        tensor(8, 64, 48, order=(2, 0, 1)),
        (48,),
        tensor(48),
        tensor(48),
        1e-5,
    ),
    "group norm backward": (
        *(aten.native_group_norm_backward.default, tensor(4, 32, 8, 8), tensor(4, 32, 8, 8)),
        *(tensor(4, 8), tensor(4, 8), tensor(32), 4, 32, 64, 8, (True, True, True)),
    ),
    "attention": (ATTENTION.default, *[tensor(2, 4, 200, 32)] * 3),
    "long attention": (ATTENTION.default, tensor(1, 2, 800, 32), *[tensor(1, 2, 600, 32)] * 2),
    "attention backward": (
        ATTENTION_BACKWARD.default,
        *[tensor(2, 4, 200, 32)] * 5,
        tensor(2, 4, 200),
        0.0,
        True,
    ),
    "attention backward by rows": (
        *(
            ATTENTION_BACKWARD.default,
            tensor(2, 4, 200, 32, order=(0, 2, 1, 3)),
            *[tensor(2, 4, 200, 32)] * 4,
        ),
        *(tensor(2, 4, 200), 0.0, False),
    ),
    "random mask": (aten.bernoulli.p, tensor(64, 48), 0.15),
    "random mask in bfloat16": (aten.bernoulli.p, tensor(64, 48, dtype=HALF), 0.15),
    "dropout": (aten.native_dropout.default, tensor(64, 48), 0.15, True),
    "dropout in bfloat16": (aten.native_dropout.default, tensor(64, 48, dtype=HALF), 0.15, True),
    "no formula": (
        aten.upsample_bilinear2d.default,
        tensor(2, 8, 16, 16),
        (32, 32),
        False,
        2.0,
        2.0,
    ),
    "convolution": (
        aten.convolution.default,
        tensor(4, 32, 16, 16),
        tensor(64, 32, 3, 3),
        None,
        (1, 1),
        (1, 1),
        (1, 1),
        False,
        (0, 0),
        1,
    ),
    "product in bfloat16": (
        aten.mm.default,
        tensor(64, 48, dtype=HALF),
        tensor(48, 32, dtype=HALF),
    ),
}


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operators_workspace_is_the_allocators(name: str, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        call = call_of(*OPERATORS[name])
        assert workspace_bytes(call, "cpu") == allocated(replay._run_of(call))[0]
    finally:
        torch.set_num_threads(before)


def test_only_onednn_and_rare_operators_are_run() -> None:
    without = {
        name for name, arguments in OPERATORS.items() if formula_bytes(call_of(*arguments)) is None
    }
    assert without == {"no formula", "convolution", "product in bfloat16"}


@pytest.mark.parametrize("mask", [None, (True, True, False), (False, True, True)])
@pytest.mark.parametrize("limit", ["_MOST_FLOP", "_MOST_BYTES"])
def test_large_convolutions_are_extrapolated_from_smaller_batches(
    mask: tuple[bool, ...] | None, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # each thread works from some 12 images on
    images, weight = tensor(96, 32, 16, 16), tensor(64, 32, 3, 3)
    options = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    call = (
        call_of(aten.convolution.default, images, weight, None, *options)
        if mask is None
        else call_of(
            aten.convolution_backward.default,
            tensor(96, 64, 16, 16), images, weight, [64], *options, list(mask),
        )
    )  # fmt: skip
    held = workspace_bytes(call, "cpu")

    workspace._store.cache_clear()
    size_of = {"_MOST_FLOP": flop_of, "_MOST_BYTES": bytes_moved}[limit]
    monkeypatch.setattr(workspace, limit, size_of(call) / 3)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _: tmp_path / "other")
    assert workspace_bytes(call, "cpu") == pytest.approx(held, rel=0.02)


def test_most_operators_have_no_workspace_of_ours_on_cuda() -> None:
    assert workspace_bytes(call_of(*OPERATORS["attention"]), "cuda") == 0
    assert workspace_bytes(call_of(*OPERATORS["product in bfloat16"]), "cuda") == 0


@pytest.mark.parametrize(
    ("width", "heads_of_keys", "is_in_rows", "width_in_float32"),
    [
        (64, 4, True, 64),
        (40, 4, True, 64),
        (136, 4, True, 192),
        (64, 2, True, 64),
        (64, 4, False, 64),
    ],
)
def test_the_backward_of_flash_attention_holds_a_gradient_in_float32(
    width: int, heads_of_keys: int, width_in_float32: int, *, is_in_rows: bool
) -> None:
    """Naive: its workspace counts as 0, as that of every operator on CUDA did."""
    in_rows = (0, 2, 1, 3)
    query = tensor(2, 4, 200, width, dtype=HALF, order=in_rows)
    key = tensor(2, heads_of_keys, 300, width, dtype=HALF, order=in_rows)
    gradient = query if is_in_rows else tensor(2, 4, 200, width, dtype=HALF)
    held, no_lengths, seed = tensor(2, 4, 200), tensor(0, dtype=INDEX), tensor(2, dtype=INDEX)
    call = call_of(
        aten._scaled_dot_product_flash_attention_backward.default,
        gradient, query, key, key, query, held, no_lengths, no_lengths, 200, 300, 0.0, False,
        seed, seed,
    )  # fmt: skip

    expected = 4 * (2 * 4 * 256) * (width_in_float32 + 1)
    if heads_of_keys != 4:
        expected += 2 * (2 * 4 * 300 * width) * 2
    if not is_in_rows:
        expected += (2 * 4 * 200 * width) * 2
    assert workspace_bytes(call, "cuda") == expected


def test_a_plan_for_a_card_counts_the_workspace_of_flash_attention() -> None:
    class Attention(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = super().forward(x).view(2, 128, 2, 32).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(heads, heads, heads).float().sum()

    model, x = Attention(64, 64, dtype=HALF), torch.randn(256, 64, dtype=HALF)
    graph = remat.trace(model, (x,), device="A100")
    (backward,) = (op for op in graph.operators if "flash_attention_backward" in op.target)
    # the gradient is that of a sum, expanded, and copied into rows
    assert backward.workspace_bytes == 4 * (2 * 2 * 128) * (32 + 1) + 2 * (256 * 64)


@pytest.mark.parametrize("is_slice", [True, False])
def test_a_max_pool_copies_what_is_not_contiguous(is_slice: bool) -> None:
    """A slice of the channels is copied whole; naive: pooling needs no memory of its own."""
    whole = torch.randn(2, 8, 16, 16)
    x = whole[:, :4] if is_slice else whole

    def pool(x: torch.Tensor) -> Any:
        return aten.max_pool2d_with_indices.default(x, [2, 2])

    graph = make_fx(pool, tracing_mode="fake")(x).graph
    (node,) = graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices.default)
    workspace, _ = allocated(lambda: pool(x))
    assert formula_bytes(Call.of(node)) == workspace == (x.nbytes if is_slice else 0)
