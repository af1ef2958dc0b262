"""A small model with dropout, for tests of plans that Inductor runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout, self.norm = nn.Dropout(0.3), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return out


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = x.pow(2).mean()
        return loss


def batch() -> torch.Tensor:
    return torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
