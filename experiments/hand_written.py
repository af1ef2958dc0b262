"""Training steps written by hand, as in the papers.

VGG, DenseNet, U-Net, recurrent networks, a GAN and a diffusion step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from .models import Workload


@dataclass(frozen=True)
class HandWritten:
    """A module that returns its loss, and a batch for it.

    Attributes:
        model: makes the module.
        batch: makes the keyword arguments of one step.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    family: str = "hand-written"

    def make(self) -> Workload:
        """Returns the model with random weights, in training mode, and its batch."""
        return Workload(self.model().train(), self.batch())


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class VGG(nn.Module):
    """Pairs of convolutions, each halving the size, and two linear layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [(3, 8), (8, 16), (16, 32)]
        self.features = nn.Sequential(
            *(nn.Sequential(_conv(a, b), _conv(b, b), nn.MaxPool2d(2)) for a, b in pairs)
        )
        self.head = nn.Sequential(
            nn.Linear(32 * 16, 64), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(64, 10)
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss; images are 32 x 32."""
        return F.cross_entropy(self.head(self.features(images).flatten(1)), labels)


class DenseNet(nn.Module):
    """Three blocks in which every layer reads all layers before it (Huang et al. 2017)."""

    def __init__(self, growth: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks, self.transitions, width = nn.ModuleList(), nn.ModuleList(), 16

        for _ in range(3):
            self.blocks.append(
                nn.ModuleList(_conv(width + i * growth, growth) for i in range(depth))
            )
            self.transitions.append(
                nn.Sequential(_conv(width + depth * growth, width), nn.AvgPool2d(2))
            )

        self.dropout, self.head = nn.Dropout2d(0.2), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss."""
        x = self.stem(images)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            assert isinstance(block, nn.ModuleList)
            for layer in block:
                x = torch.cat([x, self.dropout(layer(x))], dim=1)
            x = transition(x)
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), labels)


class UNet(nn.Module):
    """Three scales down and up, with skip connections.

    Takes a time step as a second input, if one is given (Ronneberger et al. 2015; Ho et al. 2020).
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Embedding(100, width)
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(_conv(width * 2**i, width * 2 ** (i + 1)) for i in range(3))
        self.up = nn.ModuleList(
            _conv(width * 2 ** (i + 1) + width * 2**i, width * 2**i) for i in reversed(range(3))
        )
        self.dropout, self.leave = nn.Dropout(0.1), nn.Conv2d(width, 3, 1)

    def forward(self, images: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
        """Returns images of the same size."""
        x = self.enter(images)
        if times is not None:
            x = x + self.time(times)[:, :, None, None]

        skips = []
        for down in self.down:
            skips.append(x)
            x = self.dropout(F.max_pool2d(down(x), 2))

        for up in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = up(torch.cat([x, skips.pop()], dim=1))

        result: torch.Tensor = self.leave(x)
        return result


class Segmentation(nn.Module):
    """A U-Net that classifies each pixel into three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of all pixels."""
        return F.cross_entropy(self.net(images), labels)


class DiffusionStep(nn.Module):
    """Draws noise of random strength inside the step; the U-Net predicts it.

    This is algorithm 1 of Ho et al. (2020).
    """

    shares: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet()
        self.register_buffer("shares", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), dim=0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the mean squared error of the noise."""
        times = torch.randint(0, 100, (images.shape[0],), device=images.device)
        noise, share = torch.randn_like(images), self.shares[times][:, None, None, None]
        return F.mse_loss(
            self.net(share.sqrt() * images + (1 - share).sqrt() * noise, times), noise
        )


class GANStep(nn.Module):
    """One step of both players.

    Each has its own loss; the discriminator's does not reach the generator.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(8, width, 4),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(width, 3, 4, stride=2),
            nn.Tanh(),
        )

        self.discriminator = nn.Sequential(
            spectral_norm(nn.Conv2d(3, width, 4, stride=2)), nn.LeakyReLU(0.2, inplace=True),
            nn.Dropout(0.2), nn.Flatten(),
            nn.LazyLinear(1),
        )  # fmt: skip

        self.discriminator(torch.zeros(2, 3, 10, 10))  # gives the lazy layer its size

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the sum of both losses; images are 10 x 10."""
        made = self.generator(torch.randn(images.shape[0], 8, 1, 1, device=images.device))
        real, fake, fooled = (
            self.discriminator(images),
            self.discriminator(made.detach()),
            self.discriminator(made),
        )
        return F.softplus(-real).mean() + F.softplus(fake).mean() + F.softplus(-fooled).mean()


class LanguageModel(nn.Module):
    """A recurrent network over embedded tokens; its head is tied to its embedding."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = kind(32, 32, num_layers=2, dropout=0.2, batch_first=True)
        self.head.weight = self.token.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of predicting each token from those before it."""
        logits = self.head(self.layers(self.token(ids))[0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _images(pixels: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"images": torch.randn(4, 3, pixels, pixels)}


def _labelled(pixels: int = 32) -> dict[str, Any]:
    return {"images": torch.randn(4, 3, pixels, pixels), "labels": torch.arange(4)}


def _segments() -> dict[str, Any]:
    return {"images": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 3, (4, 32, 32))}


def _tokens() -> dict[str, Any]:
    return {"ids": torch.randint(0, 64, (4, 12))}


HAND_WRITTEN: dict[str, HandWritten] = {
    "VGG": HandWritten(VGG, _labelled),
    "DenseNet": HandWritten(DenseNet, _labelled),
    "U-Net": HandWritten(Segmentation, _segments),
    "U-Net, diffusion step": HandWritten(DiffusionStep, _images(16)),
    "GAN step": HandWritten(GANStep, _images(10)),
    "LSTM": HandWritten(lambda: LanguageModel(nn.LSTM), _tokens),
    "GRU": HandWritten(lambda: LanguageModel(nn.GRU), _tokens),
}
