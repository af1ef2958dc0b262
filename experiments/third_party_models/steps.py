"""Describes training steps of other libraries' models.

A step is a module and a function that computes its loss; both are planned as one module. Weights
are random, sizes small. A library is imported when a step is made, so that a missing one affects
only its own models.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from experiments.models import Workload

Loss = Callable[..., torch.Tensor]
Make = Callable[[], Workload]

BATCH = 4
VOCABULARY = 96


@dataclass(frozen=True)
class ThirdParty:
    """A model of another library and its batch.

    Attributes:
        package: the name of the library on the package index.
        family: what kind of model it is.
        name: the model's name, unique in the table.
        make: returns the step; imports the library.
    """

    package: str
    family: str
    name: str
    make: Make


class Trained(nn.Module):
    """A model and its loss as one module, so that plans reach from the batch to the loss."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **batch: Any) -> torch.Tensor:
        """Returns the scalar loss of one batch."""
        return self.loss(self.model, **batch)


def step(model: nn.Module, loss: Loss, **batch: Any) -> Workload:
    """Returns the step of a model in training mode; `loss(model, **batch)` is its scalar."""
    return Workload(Trained(model.train(), loss), batch)


class Registry:
    """Models under their names, in the order of the table."""

    def __init__(self) -> None:
        self.models: dict[str, ThirdParty] = {}

    def add(self, package: str, family: str, name: str) -> Callable[[Make], Make]:
        """Returns a decorator that registers a function as the maker of a step."""

        def enter(make: Make) -> Make:
            assert name not in self.models, f"two models are named {name!r}"
            self.models[name] = ThirdParty(package, family, name, make)
            return make

        return enter


def load(module: str) -> Any:
    """Imports part of a library, as `Any`: none is installed where types are checked."""
    return importlib.import_module(module)


def classify(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy of a model's logits."""
    logits = model(images)
    return F.cross_entropy(logits, labels)


def mean_square(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean squared error of a model's output."""
    return F.mse_loss(model(inputs), targets)


def next_token(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy of each next token."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:])


def images(pixels: int = 64, batch: int = BATCH) -> dict[str, torch.Tensor]:
    """Random images and a class for each."""
    return {"images": torch.randn(batch, 3, pixels, pixels), "labels": torch.arange(batch) % 10}


def tokens(length: int = 64, batch: int = BATCH) -> torch.Tensor:
    """Random token ids; shape (batch, length)."""
    return torch.randint(0, VOCABULARY, (batch, length))
