"""How much memory the GPU has for a training step, and how much libraries hold there.

The former is the budget if none was given. It is measured before a model's first step only:
later shapes are planned for the same budget, so that optimizer state, which is allocated after the
first step, counts once (as `reserve_bytes`).
"""

from __future__ import annotations

from functools import cache

import torch

from remat.core.budget import describe_bytes
from remat.plan.distributed import least_of_all_ranks
from remat.torch_border.allocator import forget_cublas_workspaces
from remat.torch_border.kernels import without_modes

# Kept free for blocks that CUDA's allocator can't split, and for kernels that CUDA loads on first
# use. On an H100 the allocator reserved 1 to 7 % more than GPT-2 and Llama allocated, and 27 to
# 95 % more than ResNet-50 did (4 % with expandable segments); it gives back the unused part of that
# before it runs out of memory (`experiments/results/gpu_run.jsonl`).
_RESERVED_SHARE, _LEAST_RESERVED_BYTES = 1 / 16, 512 << 20

# Budgets are multiples of this, so that the plan on disk still serves when another program has
# taken or released a few bytes since the last run.
_MULTIPLE_BYTES = 64 << 20

_NEEDED = (
    "a budget is needed on a CPU, whose memory other programs use as well: give it in bytes or as "
    'a percentage, budget="8GiB" or budget="60%"; budget=None works on a GPU only, and takes the '
    "memory that it has"
)


def check_has_card() -> None:
    """Raises `ValueError` on a machine without a usable GPU."""
    if not torch.cuda.is_available():
        raise ValueError(_NEEDED)


def budget_of_card(device_type: str, step_bytes: int, *, of_all_ranks: bool = True) -> int:
    """Returns the bytes that a step may hold on the current GPU.

    That is the memory that is free, plus what torch's allocator has reserved but not allocated,
    plus what the step itself has allocated already, minus the part that is kept free.

    Args:
        device_type: where the step runs, `cpu` or `cuda`.
        step_bytes: what the step has allocated already: parameters, buffers, inputs, gradients, and
            the memory that libraries hold for it.
        of_all_ranks: whether all ranks ask, and get the least of their answers.

    Raises:
        ValueError: the step runs on a CPU, or nothing is left on the GPU.
    """
    if device_type != "cuda":
        raise ValueError(_NEEDED)

    left_bytes, total_bytes = _left_on_card()
    reserved_bytes = kept_free_bytes(total_bytes)
    own_bytes = left_bytes + step_bytes - reserved_bytes
    budget_bytes = own_bytes // _MULTIPLE_BYTES * _MULTIPLE_BYTES
    if of_all_ranks:
        budget_bytes = least_of_all_ranks(budget_bytes)

    if budget_bytes <= 0:
        raise ValueError(
            f"the GPU has {describe_bytes(left_bytes)} left of {describe_bytes(total_bytes)}, and "
            f"{describe_bytes(reserved_bytes)} are kept free: nothing is left for a step; end the "
            "other programs on the GPU, or give a budget"
        )
    return budget_bytes


def kept_free_bytes(total_bytes: int) -> int:
    """Returns the part of a GPU's memory that steps planned without a budget leave free."""
    return max(int(_RESERVED_SHARE * total_bytes), _LEAST_RESERVED_BYTES)


def library_bytes(device_type: str) -> int:
    """Returns the bytes that cuBLAS holds on the GPU after a first forward and backward.

    It holds a workspace for each thread's handle and each stream, and autograd runs the backward in
    a thread of its own. Measured once per process, GPU and stream, which allocates the workspaces
    of the current stream; those of streams that a step switches to are not counted. 0 on a CPU.
    """
    if device_type != "cuda":
        return 0
    return _kept_by_cublas(torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream)


@cache
def _kept_by_cublas(device: int, stream: int) -> int:
    with without_modes(), torch.autocast("cuda", enabled=False), torch.enable_grad():
        forget_cublas_workspaces()
        torch.cuda.synchronize()
        before_bytes = torch.cuda.memory_allocated()
        _run_product("cuda")
        torch.cuda.synchronize()
        return max(0, torch.cuda.memory_allocated() - before_bytes)


def _run_product(device: str) -> None:
    """Runs a matrix product with a bias, forward and backward, and drops the results."""
    x = torch.ones(16, 16, device=device)
    weight, bias = (torch.ones(*shape, device=device) for shape in ((16, 16), (16,)))
    result = torch.nn.functional.linear(x, weight.requires_grad_(), bias.requires_grad_())
    torch.autograd.grad(result.sum(), (weight, bias))


def _left_on_card() -> tuple[int, int]:
    """Returns what this process can still allocate, and how much it may allocate in all."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    held_bytes = torch.cuda.memory_reserved()
    allowed_bytes = int(torch.cuda.get_per_process_memory_fraction() * total_bytes)
    free_bytes = min(free_bytes, allowed_bytes - held_bytes)
    return free_bytes + held_bytes - torch.cuda.memory_allocated(), allowed_bytes
