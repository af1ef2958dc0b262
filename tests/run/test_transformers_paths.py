"""What `transformers` does differently when compiled is captured as plain PyTorch runs it."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.run.idle_hooks import IdleHooks
from remat.run.transformers_paths import plain_paths
from tests.support.planned import assert_same, call_of, planned

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the libraries' own
    pytest.mark.usefixtures("fresh_torch"),
]
SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def decoder(kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **config: Any) -> Any:
    """A decoder with grouped heads, whose attention runs another kernel with a mask."""
    torch.manual_seed(0)
    settings = {**SMALL, "num_key_value_heads": 2, "use_cache": False, **config}
    made = transformers.AutoConfig.for_model(kind, **settings)
    return transformers.AutoModelForCausalLM.from_config(made).to(dtype).train()


def tokens(length: int = 12) -> torch.Tensor:
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(1))


def assert_same_step(model: Any, plain: Any, **batch: Any) -> None:
    for each in (model, plain):
        each.zero_grad()
        each(**batch).loss.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(mine.grad, theirs.grad)


def attention_masks(model: nn.Module) -> set[bool]:
    """Whether the captured attention reads a mask."""
    nodes = call_of(model).pieces[-1].step.module.graph.nodes
    forward = [
        node
        for node in nodes
        if "scaled_dot_product" in str(node.target) and "backward" not in str(node.target)
    ]
    return {any("mask" in name for name in _given(node)) for node in forward}


def _given(node: torch.fx.Node) -> list[str]:
    target: Any = node.target
    named = zip(target._schema.arguments, node.args, strict=False)
    given = {argument.name: value for argument, value in named} | dict(node.kwargs)
    return [name for name, value in given.items() if value is not None]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_decoder_without_a_mask_runs_the_kernel_of_plain_attention(kind: str) -> None:
    plain = decoder(kind)
    model = planned(copy.deepcopy(plain))
    assert_same_step(model, plain, input_ids=tokens(), labels=tokens())
    assert attention_masks(model) == {False}


def test_positions_that_the_caller_gives_may_pack_sequences() -> None:
    """Plain PyTorch looks at the positions; a captured step masks by them, whatever they are."""
    plain = decoder(dtype=torch.float64)
    model = planned(copy.deepcopy(plain))

    for packed in (torch.arange(12), torch.arange(12) % 6):
        batch = {
            "input_ids": tokens(),
            "labels": tokens(),
            "position_ids": packed.expand(2, -1),
        }

        for each in (model, plain):
            each.zero_grad()
            each(**batch).loss.backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def state_space(kind: str, **config: Any) -> Any:
    torch.manual_seed(0)
    settings = {
        "vocab_size": 64,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "state_size": 4,
        "use_cache": False,
    }

    made = transformers.AutoConfig.for_model(kind, **settings, **config)
    assert made.use_associative_scan
    return transformers.AutoModelForCausalLM.from_config(made).train()


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_the_loop_of_a_short_state_space_model_is_captured(kind: str) -> None:
    plain = state_space(kind)
    model = planned(copy.deepcopy(plain))
    assert_same_step(model, plain, input_ids=tokens(4), labels=tokens(4))


def test_a_long_state_space_model_scans_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    plain = state_space("mamba")
    model = planned(copy.deepcopy(plain))
    with caplog.at_level(logging.WARNING, "remat"):
        for each in (model, plain):
            each(input_ids=tokens(40), labels=tokens(40)).loss.backward()

    assert "use_associative_scan=False" in caplog.text
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_the_library_is_as_it_was_after_a_step() -> None:
    from transformers import masking_utils

    before = dict(vars(masking_utils))
    with plain_paths():
        with plain_paths():
            assert vars(masking_utils) != before
        assert vars(masking_utils) != before

        steps = torch.arange(6)[None] % 3
        assert masking_utils.find_packed_sequence_indices(steps) is not None
        assert masking_utils.find_packed_sequence_indices(torch.arange(6)[None]) is None
    assert vars(masking_utils) == before


def hooked(hook: Any, layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), *(nn.Linear(4, 4) for _ in range(layers)))
    model[0].weight.requires_grad_(False)
    model[0].register_forward_hook(hook)
    return model


def make_inputs_require_grad(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    output.requires_grad_(True)


@pytest.mark.parametrize(
    "hook", [make_inputs_require_grad, lambda module, inputs, output: output.requires_grad_()]
)
def test_hooks_that_checkpointing_needs_do_not_cut_a_step(hook: Any) -> None:
    plain = hooked(hook)
    model = remat.checkpoint(hooked(hook), "100%", costs="flops")
    numbers = torch.arange(8)

    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            each(numbers).square().sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same(mine.grad, theirs.grad)

    assert remat.report(model).breaks == ()
    model[0].register_forward_hook(hook)  # another one, once it is planned
    model(numbers).square().sum().backward()
    assert remat.report(model).breaks == ()
    assert model[0](numbers).requires_grad  # outside of a planned step the hooks are there


def test_hooks_come_back_after_steps_that_overlap() -> None:
    """Naive: each step puts back all hooks that it found; the one that ends last found none."""
    model = hooked(make_inputs_require_grad)
    first, second = IdleHooks(model).removed(), IdleHooks(model).removed()
    before = list(model[0]._forward_hooks.items())
    later = model[0].register_forward_hook(lambda *_: None)

    first.__enter__()
    assert len(model[0]._forward_hooks) == 1
    second.__enter__()
    first.__exit__(None, None, None)
    later.remove()  # a hook that the user removes meanwhile stays removed
    second.__exit__(None, None, None)
    assert list(model[0]._forward_hooks.items()) == before
