"""`remat.fits`: whether a training step fits on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from remat.core.budget import Budget
from remat.face.step_function import as_step
from remat.fit.answer import Fit
from remat.fit.optimizer_memory import MakeOptimizer
from remat.fit.question import Question
from remat.solvers import Solver


def fits(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str = "",
    budget: Budget | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    reserve_bytes: int = 0,
    is_accumulating: bool = False,
    autocast: torch.dtype | None = None,
    solver: str | Solver = "auto",
    time_limit_s: float = 20.0,
    executor: str = "eager",
) -> Fit:
    """Returns whether a step of `model(*args, **kwargs)` fits, and its plan and memory.

    Nothing is allocated and no device is needed. The model may be on the meta device (`with
    torch.device("meta"):`), so this works for 70 billion parameters on a laptop.

    Args:
        model: any module, or a step function.
        args: its inputs; real, meta or fake.
        kwargs: its keyword inputs.
        device: a name in the device table, such as "H100"; this machine's device if empty.
        budget: the memory that may be used; by default what `checkpoint` takes. That is, on this
            machine's GPU, the memory that is free or that the model takes already, and of a named
            card all, each minus a sixteenth (at least 512 MiB); on a CPU it is all memory. A
            percentage refers to the peak of keeping everything, plus optimizer state, accumulated
            gradients and reserve.
        optimizer: "adamw", "sgd", "momentum", "adafactor", "adamw-8bit", ...
            (`remat.fit.optimizer_memory.OPTIMIZERS`), "none", or a class or function that makes an
            optimizer for given parameters; its memory is measured on fake tensors.
        reserve_bytes: kept free, for communication buffers or the context of other libraries.
        is_accumulating: whether gradients of earlier micro-batches are held during the step.
        autocast: the type of `torch.autocast` that the step runs under.
        solver: a name (`remat.SOLVER_NAMES`) or a solver.
        time_limit_s: time limit of the search for the least peak, and also of the solver if it is
            given by name.
        executor: "eager", or "inductor" for a step in fused kernels, on a device of this machine.
            Their peak is close to the compiled code's, which is known only after compiling.

    Raises:
        ValueError: an unknown device, executor or optimizer, a malformed budget, a negative
            reserve, or no budget and no free memory on this machine's GPU.
        TypeError: `optimizer` does not make an optimizer, or it can't step on fake tensors.
        TraceError: the step can't be captured, or needs data between two pieces.
    """
    question = Question.of(
        as_step(model, args, kwargs),
        device=device,
        budget=budget,
        optimizer=optimizer,
        reserve_bytes=reserve_bytes,
        is_accumulating=is_accumulating,
        autocast=autocast,
        solver=solver,
        time_limit_s=time_limit_s,
        executor=executor,
    )

    graph = question.trace(args, kwargs)
    return replace(question.answer(graph), plain_bytes=question.plain_bytes(graph, args, kwargs))
