"""What the GPU has for a training step, and what libraries keep there.

The first is the budget where none was given. It is looked at before a model's first step, and kept:
later shapes are planned for the same budget, so that optimizer state, which comes in between,
counts once (as `reserve_bytes`).
"""

from __future__ import annotations

from functools import cache

import torch

from remat.core.budget import describe_bytes
from remat.plan.distributed import least_of_all_ranks
from remat.torch_border.allocator import forget_cublas_workspaces
from remat.torch_border.kernels import without_modes

# Kept free: blocks that CUDA's allocator can't split or give back (on a model of it, 3 % above what
# GPT-2 medium allocates), and kernels that CUDA loads when they are first run. Documented, not
# measured on a GPU.
_RESERVED_SHARE, _LEAST_RESERVED_BYTES = 1 / 16, 512 << 20

# A budget is a multiple of it: a few bytes that another program takes or leaves from one run to the
# next then ask for the same plan, which the disk has.
_MULTIPLE_BYTES = 64 << 20

_NEEDED = (
    "a budget is needed on a CPU, whose memory other programs use as well: give it in bytes or as "
    'a share, budget="8GiB" or budget="60%"; budget=None is for a GPU, and takes what that has'
)


def check_has_card() -> None:
    """Raises `ValueError` where no GPU could ever be asked."""
    if not torch.cuda.is_available():
        raise ValueError(_NEEDED)


def budget_of_card(device_type: str, step_bytes: int) -> int:
    """Returns the bytes that a step may hold on the current GPU, the same on all ranks.

    What is free there, what torch's allocator has reserved and not allocated, and what of the step
    itself is allocated already, less the reserve.

    Args:
        device_type: where the step runs, `cpu` or `cuda`.
        step_bytes: what of it is there: parameters, buffers, inputs, gradients, and what libraries
            keep for it.

    Raises:
        ValueError: the step runs on a CPU, or nothing is left on the GPU.
    """
    if device_type != "cuda":
        raise ValueError(_NEEDED)
    left_bytes, total_bytes = _left_on_card()
    reserved_bytes = max(int(_RESERVED_SHARE * total_bytes), _LEAST_RESERVED_BYTES)
    own_bytes = left_bytes + step_bytes - reserved_bytes
    budget_bytes = least_of_all_ranks(own_bytes // _MULTIPLE_BYTES * _MULTIPLE_BYTES)
    if budget_bytes <= 0:
        raise ValueError(
            f"the GPU has {describe_bytes(left_bytes)} left of {describe_bytes(total_bytes)}, and "
            f"{describe_bytes(reserved_bytes)} are kept free: nothing is left for a step; end what "
            "else runs on the GPU, or give a budget"
        )
    return budget_bytes


def library_bytes(device_type: str) -> int:
    """Returns what cuBLAS keeps on the current GPU from a first forward and backward on.

    It keeps workspace for each thread's handle and each stream, and autograd runs the backward in
    a thread of its own. Measured once a process for each GPU; 0 on a CPU.
    """
    return _kept_by_cublas(torch.cuda.current_device()) if device_type == "cuda" else 0


@cache
def _kept_by_cublas(_: int) -> int:
    with without_modes(), torch.autocast("cuda", enabled=False), torch.enable_grad():
        forget_cublas_workspaces()
        torch.cuda.synchronize()
        before_bytes = torch.cuda.memory_allocated()
        _run_product("cuda")
        torch.cuda.synchronize()
        return max(0, torch.cuda.memory_allocated() - before_bytes)


def _run_product(device: str) -> None:
    """Runs a product with a bias, forward and backward, and keeps nothing of it."""
    x = torch.ones(16, 16, device=device)
    weight, bias = (torch.ones(*shape, device=device) for shape in ((16, 16), (16,)))
    result = torch.nn.functional.linear(x, weight.requires_grad_(), bias.requires_grad_())
    torch.autograd.grad(result.sum(), (weight, bias))


def _left_on_card() -> tuple[int, int]:
    """What this process can still allocate, and the card's memory or this process's share of it."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    held_bytes = torch.cuda.memory_reserved()
    allowed_bytes = int(torch.cuda.get_per_process_memory_fraction() * total_bytes)
    free_bytes = min(free_bytes, allowed_bytes - held_bytes)
    return free_bytes + held_bytes - torch.cuda.memory_allocated(), allowed_bytes
