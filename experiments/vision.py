"""The convolutional networks of the field's tables, at their published shapes.

VGG16, U-Net; MobileNetV2 from `transformers`.

Each function returns a training step (model and inputs) that ends in a scalar loss. Build and trace
it under `fake_tensors()`: nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Step = tuple[nn.Module, dict[str, Any]]
# channels; 0 means pooling
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


class VGG16(nn.Module):
    """Simonyan and Zisserman (2014), configuration D: no batch norm, dropout as published."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3

        for channels in _VGG16:
            layers += (
                [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
                if channels
                else [nn.MaxPool2d(2)]
            )
            before = channels or before

        self.layers = nn.ModuleList(layers)
        head = [
            nn.Linear(512 * 49, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 1000),
        ]
        self.head = nn.ModuleList(head)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy."""
        x = pixels
        for layer in self.layers:
            x = layer(x)
        x = x.flatten(1)
        for layer in self.head:
            x = layer(x)
        return functional.cross_entropy(x, labels)


class _Double(nn.Module):
    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(before, channels, 3, padding=1),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.second(functional.relu(self.first(x))))


class UNet(nn.Module):
    """Ronneberger, Fischer and Brox (2015).

    Four levels of 64 to 1,024 channels, padded convolutions, two classes.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)

        self.down = nn.ModuleList(
            _Double(before, width) for before, width in zip((3, *widths), widths, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in widths[-2::-1]
        )
        self.join = nn.ModuleList(_Double(2 * width, width) for width in widths[-2::-1])
        self.head = nn.Conv2d(64, 2, 1)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy of each pixel's class."""
        x, skips = pixels, []
        for level, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for up, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
            x = join(torch.cat([skip, up(x)], 1))
        return functional.cross_entropy(self.head(x), labels)


def vgg16(batch: int = 256) -> Step:
    """VGG16 at 224 x 224."""
    return VGG16(), {
        "pixels": torch.zeros(batch, 3, 224, 224),
        "labels": torch.zeros(batch, dtype=torch.long),
    }


def mobilenet(batch: int = 512) -> Step:
    """MobileNetV2 at 224 x 224."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    # every configuration takes this keyword, but no signature has it
    classes: dict[str, Any] = {"num_labels": 1000}
    model = MobileNetV2ForImageClassification(MobileNetV2Config(**classes))

    return model, {
        "pixel_values": torch.zeros(batch, 3, 224, 224),
        "labels": torch.zeros(batch, dtype=torch.long),
    }


def unet(batch: int = 32) -> Step:
    """U-Net at 416 x 608."""
    return UNet(), {
        "pixels": torch.zeros(batch, 3, 416, 608),
        "labels": torch.zeros(batch, 416, 608, dtype=torch.long),
    }


STEPS: dict[str, Callable[[int], Step]] = {"VGG16": vgg16, "MobileNetV2": mobilenet, "U-Net": unet}
PUBLISHED_BATCH = {"VGG16": 256, "MobileNetV2": 512, "U-Net": 32}
