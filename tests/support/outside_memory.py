"""A planned module in a larger step: the losses outside of it, and the peak of the whole step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import remat

WIDTH, ROWS, CLASSES = 32, 128, 512
Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]
PLAIN = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def is_watched() -> bool:
    return torch.autograd._engine_run_backward is not PLAIN  # type: ignore[attr-defined]


def net(last: int = CLASSES) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, last))


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def loss_outside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), TARGETS)


TARGETS = torch.arange(ROWS) % CLASSES


def several_calls(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - model(x + 1)).square().mean()
    return loss


ANOTHER = nn.Sequential(nn.Linear(CLASSES, CLASSES), nn.GELU(), nn.Linear(CLASSES, CLASSES))


def half_checkpointed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Hooks pack what autograd saves, and compute it again when it is read."""
    logits: Any = torch.utils.checkpoint.checkpoint(
        ANOTHER, model(x), use_reentrant=False, preserve_rng_state=False
    )
    return F.cross_entropy(logits, TARGETS)


def run_step(step: Step, model: nn.Module, x: torch.Tensor) -> None:
    step(model, x).backward()
    model.zero_grad()
    ANOTHER.zero_grad()


def whole_peak(step: Step, model: nn.Module, x: torch.Tensor) -> int:
    """The peak of the whole step, measured from outside."""
    resident_bytes = x.nbytes + sum(p.nbytes for p in model.parameters())
    targets_bytes = TARGETS.nbytes if step in (loss_outside, half_checkpointed) else 0
    measured = remat.measure(lambda: run_step(step, model, x), device="cpu")
    return resident_bytes + targets_bytes + measured.peak_bytes


def planned(model: nn.Module, budget: int | str, **options: Any) -> nn.Module:
    return remat.checkpoint(
        model, budget, costs="flops", time_limit_s=2.0, plan_cache=False, **options
    )


def whole_of(model: nn.Module) -> int | None:
    return remat.report(model).whole_peak_bytes


def loss_of_any_size(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), TARGETS[: len(x)])
