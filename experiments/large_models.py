"""Networks at the sizes of their papers that `transformers` lacks.

DenseNet-121, U-Net, an unrolled LSTM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def _conv(inputs: int, outputs: int, size: int) -> nn.Sequential:
    """Batch norm, ReLU and a convolution, in DenseNet's order."""
    convolution = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
    return nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), convolution)


class DenseNet(nn.Module):
    """DenseNet-BC (Huang et al., 2017): every layer of a block reads all layers before it."""

    def __init__(
        self,
        *,
        growth: int = 32,
        depths: tuple[int, ...] = (6, 12, 24, 16),
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        width = 2 * growth

        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )  # fmt: skip

        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for index, depth in enumerate(depths):
            layers = (
                nn.Sequential(
                    _conv(width + i * growth, 4 * growth, 1), _conv(4 * growth, growth, 3)
                )
                for i in range(depth)
            )

            self.blocks.append(nn.ModuleList(layers))
            width += depth * growth

            if index < len(depths) - 1:
                self.transitions.append(nn.Sequential(_conv(width, width // 2, 1), nn.AvgPool2d(2)))
                width //= 2

        self.norm, self.head = nn.BatchNorm2d(width), nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss."""
        x = self.stem(images)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, nn.ModuleList)
            for layer in block:
                x = torch.cat([x, layer(x)], dim=1)
            if index < len(self.transitions):
                x = self.transitions[index](x)
        return F.cross_entropy(self.head(F.relu(self.norm(x)).mean(dim=(2, 3))), labels)


def _pair(inputs: int, outputs: int) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """U-Net (Ronneberger et al., 2015).

    The size is halved four times, then doubled with skip connections; each pixel gets a class.
    """

    def __init__(self, *, width: int = 64, depth: int = 4, num_classes: int = 2) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList(_pair(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.rise = nn.ModuleList(
            nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1])
        )
        self.up = nn.ModuleList(_pair(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss; sides are multiples of 2**depth."""
        skips: list[torch.Tensor] = []
        x = images

        for index, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if index else x)
            skips.append(x)

        skips.pop()
        for rise, up in zip(self.rise, self.up, strict=True):
            x = up(torch.cat([skips.pop(), rise(x)], dim=1))

        return F.cross_entropy(self.head(x), labels)


class UnrolledLSTM(nn.Module):
    """A language model of stacked LSTM cells, one operator per gate and token.

    To a planner, a fused LSTM is a single operator.
    """

    def __init__(self, *, width: int = 1024, num_layers: int = 2, vocabulary: int = 10_000) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(num_layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of predicting each token from those before it."""
        inputs = self.token(ids)
        states: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(self.cells)

        outputs = []
        for x in inputs.unbind(1):
            for index, cell in enumerate(self.cells):
                state = cell(x, states[index])
                states[index] = state
                x = state[0]
            outputs.append(x)

        logits = self.head(torch.stack(outputs[:-1], dim=1))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
