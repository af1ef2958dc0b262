"""Training steps of real architectures, small enough for a laptop.

The demo's GPT and seven from `transformers`.

Every model is in training mode with its default dropout and takes keyword arguments. Those from
`transformers` return a dataclass with the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Workload:
    """A model and the batch of one training step.

    Attributes:
        model: the model, in training mode.
        kwargs: the batch, labels included.
    """

    model: nn.Module
    kwargs: Mapping[str, Any]

    def step(self) -> torch.Tensor:
        """Runs forward and backward and returns the loss.

        The whole output is held until the end, as in users' loops.
        """
        output = self.model(**self.kwargs)
        loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        return loss.detach()


class Block(nn.Module):
    """Attention and feed-forward network, each after a layer norm, with dropout and skips."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the block's output; shape (batch, tokens, width)."""
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)

        scores = query @ key.transpose(-1, -2) * (self.num_heads / width) ** 0.5
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        weights = self.dropout(scores.masked_fill(future, float("-inf")).softmax(dim=-1))

        x = x + self.dropout(
            self.out((weights @ value).transpose(1, 2).reshape(batch, tokens, width))
        )

        change: torch.Tensor = self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return x + change


class GPT(nn.Module):
    """A language model that returns its loss; its head is tied to its embedding."""

    def __init__(
        self,
        *,
        num_layers: int = 6,
        width: int = 128,
        num_heads: int = 4,
        vocabulary: int = 512,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of predicting each token from those before it."""
        place = torch.arange(ids.shape[1], device=ids.device)
        x = self.blocks(self.dropout(self.token(ids) + self.position(place)))
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gpt() -> Workload:
    """Six layers of width 128, 8 x 128 tokens."""
    return Workload(GPT(), {"ids": torch.randint(0, 512, (8, 128))})


def resnet50() -> Workload:
    """ResNet-50 at its real depth and width, 16 images of 96 x 96."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return _images(ResNetForImageClassification(ResNetConfig()), 16, 96)


def mobilenet_v2() -> Workload:
    """MobileNetV2 at its real depth and width, 16 images of 96 x 96."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return _images(MobileNetV2ForImageClassification(MobileNetV2Config(image_size=96)), 16, 96)


def vit() -> Workload:
    """Six layers of width 192, 8 images of 96 x 96 in patches of 8 x 8."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=6, num_attention_heads=4, intermediate_size=768,
        image_size=96, patch_size=8,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return _images(ViTForImageClassification(config), 8, 96)


def bert() -> Workload:
    """Six layers of width 192, masked words, 8 x 128 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=768,
        vocab_size=1000,
    )

    ids = torch.randint(0, 1000, (8, 128))
    return _train(
        BertForMaskedLM(config),
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids},
    )


def t5() -> Workload:
    """Four encoder and four decoder layers of width 192, 8 x 64 tokens in and out."""
    from transformers import T5Config, T5ForConditionalGeneration

    # every configuration takes this keyword, but no signature has it
    start: dict[str, Any] = {"decoder_start_token_id": 0}
    config = T5Config(
        vocab_size=1000, d_model=192, d_kv=48, d_ff=768, num_layers=4, num_heads=4, **start
    )

    ids, labels = torch.randint(0, 1000, (2, 8, 64))
    return _train(T5ForConditionalGeneration(config), {"input_ids": ids, "labels": labels})


def llama() -> Workload:
    """Six layers of width 192 with an untied head, 8 x 128 tokens."""
    return _llama(is_tied=False)


def llama_tied() -> Workload:
    """The same with the head tied to the embedding."""
    return _llama(is_tied=True)


def _llama(*, is_tied: bool) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000, hidden_size=192, intermediate_size=512, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2,
        attention_dropout=0.1, use_cache=False, tie_word_embeddings=is_tied,
    )  # fmt: skip

    ids = torch.randint(0, 1000, (8, 128))
    return _train(LlamaForCausalLM(config), {"input_ids": ids, "labels": ids})


def _images(model: nn.Module, batch: int, pixels: int) -> Workload:
    return _train(
        model,
        {"pixel_values": torch.randn(batch, 3, pixels, pixels), "labels": torch.arange(batch) % 2},
    )


def _train(model: nn.Module, kwargs: Mapping[str, torch.Tensor]) -> Workload:
    return Workload(model.train(), kwargs)


MODELS: dict[str, Callable[[], Workload]] = {
    "GPT": gpt,
    "ResNet-50": resnet50,
    "MobileNetV2": mobilenet_v2,
    "ViT": vit,
    "BERT": bert,
    "T5": t5,
    "Llama": llama,
    "Llama, tied": llama_tied,
}


def make(name: str, *, seed: int = 0) -> Workload:
    """Returns a workload by its name in `MODELS`, the same for the same seed."""
    torch.manual_seed(seed)
    return MODELS[name]()
