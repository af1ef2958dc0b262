"""Small models and schedules, and the check that a planned step equals the plain one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.solvers.core.on_demand import steps_on_demand
from tests.support.planned import (
    Steps,
    assert_same,
    call_of,
    keep_all,
    keep_nothing,
    repeat_anything,
    state_after,
)


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
