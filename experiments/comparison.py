"""Compares a planned training step with the plain one: equal to the bit? at what peak?"""

from __future__ import annotations

import gc
import random

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import remat

from .models import Workload


def is_same_step(one: Workload, other: Workload, seed: int) -> bool:
    """True if both steps leave the same loss, random state, gradients and buffers, bitwise."""
    ends = [state_after_step(workload, seed) for workload in (one, other)]
    return all(_is_same(a, b) for a, b in zip(*ends, strict=True))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit; NaN equals NaN."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and bool(((one == other) | ((one != one) & (other != other))).all())
    )


def state_after_step(workload: Workload, seed: int) -> list[torch.Tensor]:
    """Loss, random state, gradients and buffers, in the same order for equal models."""
    workload.model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # transformers draws the masks of speech models from it

    loss = workload.step()
    gradients = [torch.empty(0) if p.grad is None else p.grad for p in workload.model.parameters()]

    return [
        loss,
        torch.get_rng_state(),
        *gradients,
        *(buffer.clone() for buffer in workload.model.buffers()),
    ]


def peak_bytes(workload: Workload) -> int:
    """Measured peak of a step on the CPU; parameters, buffers and inputs count."""
    workload.model.zero_grad(set_to_none=True)
    gc.collect()
    return _resident_bytes(workload) + remat.measure(workload.step, device="cpu").peak_bytes


def _resident_bytes(workload: Workload) -> int:
    inputs = [leaf for leaf in tree_leaves(dict(workload.kwargs)) if isinstance(leaf, torch.Tensor)]
    tensors = [*workload.model.parameters(), *workload.model.buffers(), *inputs]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


def least_bytes(graph: remat.Graph, *, time_limit_s: float) -> int:
    """The least budget as a user learns it: from the error for a budget that can't be met."""
    try:
        return remat.solve(graph, 1, time_limit_s=time_limit_s).peak_bytes
    except remat.BudgetError as error:
        return error.minimum_bytes
