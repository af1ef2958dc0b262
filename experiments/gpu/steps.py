"""The training steps of the GPU run, and the ways of running them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import remat

Batch = dict[str, torch.Tensor]
Made = tuple[nn.Module, Batch]
PLAN_LIMIT_S = 10.0


@dataclass(frozen=True)
class Place:
    """Where steps run.

    Attributes:
        device: `cuda` or `cpu`.
        is_tiny: True for small sizes, for a rehearsal.
    """

    device: str
    is_tiny: bool

    @property
    def has_cuda(self) -> bool:
        """True on a GPU."""
        return self.device == "cuda"


def gpt2(
    place: Place,
    *,
    layers: int = 24,
    width: int = 1024,
    heads: int = 16,
    batch: int = 8,
    dropout: float = 0.1,
) -> Made:
    """GPT-2 medium by default (Radford et al., 2019), 1,024 tokens, bf16."""
    from transformers import GPT2Config, GPT2LMHeadModel

    length, words = 1024, 50257
    if place.is_tiny:
        layers, width, heads, batch, length, words = 2, 64, 4, 4, 64, 64

    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=words, use_cache=False,
        bos_token_id=0, eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip

    ids = torch.randint(0, config.vocab_size, (batch, length), device=place.device)
    with torch.device(place.device):
        model: nn.Module = GPT2LMHeadModel(config)
    return model.to(torch.bfloat16).train(), {"input_ids": ids, "labels": ids}


def resnet50(place: Place, *, batch: int = 128) -> Made:
    """ResNet-50 (He et al., 2015) in bf16."""
    from transformers import ResNetConfig, ResNetForImageClassification

    batch, pixels = (16, 32) if place.is_tiny else (batch, 224)
    sizes: dict[str, Any] = {}
    if place.is_tiny:
        sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]}
    # otherwise the first call sets the type, and the step would be captured again
    config = ResNetConfig(problem_type="single_label_classification", **sizes)
    model: nn.Module = ResNetForImageClassification(config)

    images = torch.randn(batch, 3, pixels, pixels, device=place.device, dtype=torch.bfloat16)
    labels = torch.zeros(batch, dtype=torch.long, device=place.device)
    model = model.to(place.device, torch.bfloat16).train()
    return model, {"pixel_values": images, "labels": labels}


def llama(place: Place, *, layers: int = 8, batch: int = 4) -> Made:
    """Eight layers of Llama-3-8B's size, 2,048 tokens, bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, hidden, heads, length, words = 4096, 14336, 32, 2048, 32000
    if place.is_tiny:
        width, hidden, heads, length, words, layers, batch = 64, 128, 8, 32, 64, 2, 2

    config = LlamaConfig(
        hidden_size=width, intermediate_size=hidden, num_attention_heads=heads,
        num_key_value_heads=heads // 4, num_hidden_layers=layers, vocab_size=words, use_cache=False,
    )  # fmt: skip

    with torch.device(place.device):
        model: nn.Module = LlamaForCausalLM(config)
    ids = torch.randint(0, words, (batch, length), device=place.device)
    return model.to(torch.bfloat16).train(), {"input_ids": ids, "labels": ids}


class _Logged(nn.Module):
    """A language model that logs a number; `torch.compile` cuts the step there."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.logged = 0.0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        hidden = self.model.transformer(input_ids).last_hidden_state
        self.logged = float(hidden.detach().abs().mean())
        logits = self.model.lm_head(hidden)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


def logged(place: Place) -> Made:
    """GPT-2 medium, 12 layers, without dropout, in two pieces."""
    model, batch = gpt2(place, layers=12, dropout=0.0)
    return _Logged(model), batch


STEPS: dict[str, Callable[[Place], Made]] = {
    "gpt2-medium": gpt2,
    "gpt2-medium, 4 sequences": partial(gpt2, batch=4),
    "gpt2-xl": partial(gpt2, layers=48, width=1600, heads=25, batch=4),
    "gpt2-medium, 12 layers, no dropout": partial(gpt2, layers=12, dropout=0.0),
    "gpt2-medium, 12 layers": partial(gpt2, layers=12),
    "gpt2-medium, 12 layers, logged": logged,
    "resnet50": resnet50,
    "llama-3-8b, 8 layers": llama,
}
# their own names in the results, since peaks and times are compared by model
for _name in ("resnet50", "gpt2-xl", "llama-3-8b, 8 layers"):
    STEPS[f"{_name}, autocast"] = STEPS[_name]


def in_autocast(model: nn.Module, prepared: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Returns the model, or what calls it, in float32 under autocast to bf16."""
    model.float()
    device = next(model.parameters()).device.type

    def call(**batch: torch.Tensor) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return (prepared or model)(**batch)

    return call


def planned(model: nn.Module, budget: str | int, executor: str = "eager") -> Callable[..., Any]:
    """Returns the model planned within a budget."""
    return remat.checkpoint(model, budget, time_limit_s=PLAN_LIMIT_S, executor=executor)


def block_checkpoints(model: nn.Module) -> Callable[..., Any]:
    """Returns the model with a checkpoint per block."""
    return _checkpointed(model, partial(checkpoint, use_reentrant=False))


def selective_checkpoints(model: nn.Module) -> Callable[..., Any]:
    """Returns the model with checkpoints per block that keep results of products, convolutions."""
    aten = torch.ops.aten
    kept = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default]
    contexts = partial(create_selective_checkpoint_contexts, kept)
    return _checkpointed(model, partial(checkpoint, use_reentrant=False, context_fn=contexts))


def _checkpointed(model: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Runs each block by `run`, where `transformers` puts checkpoints, or in a ResNet's layers."""
    from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

    whole: Any = model
    if whole.supports_gradient_checkpointing:
        whole.gradient_checkpointing_enable()

    part: Any
    for part in model.modules():
        if hasattr(part, "_gradient_checkpointing_func"):
            part._gradient_checkpointing_func = run
        elif isinstance(part, ResNetBottleNeckLayer):
            part.forward = partial(run, part.forward)  # type: ignore[method-assign]
    return model


def compiled(model: nn.Module, share: float = 1.0) -> Callable[..., Any]:
    """Returns the model under `torch.compile` with a share as `activation_memory_budget`."""
    settings: Any = torch._functorch.config
    settings.activation_memory_budget = share
    call: Callable[..., Any] = torch.compile(model)
    return call
