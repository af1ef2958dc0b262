"""A training step of every module of `torch.nn`, on inputs of PyTorch's module database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .models import Workload

# it has 857 combinations of the same few options: every 16th runs; other modules run all cases
_EVERY = {"nn.LinearCrossEntropyLoss": 16}
# PyTorch has no gradient for its targets
_TRAINS_ITS_FIRST_ARGUMENT = frozenset({"nn.SoftMarginLoss"})


class Stepped(nn.Module):
    """A module with a trained scale before it and a loss after it.

    The scale multiplies all floating-point arguments, or only the first.
    """

    def __init__(self, module: nn.Module, *, is_first_alone: bool = False) -> None:
        super().__init__()
        self.module, self.is_first_alone = module, is_first_alone
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, args: Any, kwargs: Any) -> torch.Tensor:
        """Returns a scalar made of all returned tensors that need a gradient."""
        trained = args[:1] if self.is_first_alone else args
        scaled = tree_map_only(
            torch.Tensor, lambda t: t * self.scale if t.is_floating_point() else t, trained
        )
        scaled += args[len(trained) :]

        results = [
            leaf
            for leaf in tree_leaves(self.module(*scaled, **kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]

        loss: torch.Tensor = torch.stack([(leaf * leaf).mean() for leaf in results]).sum()
        return loss


def module_cases() -> Iterator[tuple[str, Callable[[], Workload]]]:
    """Yields (name, maker) of each case in the database (of one loss, one case in 16)."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        if torch.float32 not in info.dtypes:
            continue
        for index in range(0, num_inputs(info), _EVERY.get(info.name, 1)):
            yield f"{info.name}, {index}", partial(make_case, info, index)


def inputs_of(info: Any) -> list[Any]:
    """Returns the database's inputs for the forward of one module."""
    torch.manual_seed(0)
    found = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    return [case for case in found if case.forward_input is not None]


def num_inputs(info: Any) -> int:
    """Returns how many cases a module has."""
    return len(inputs_of(info))


def make_case(info: Any, index: int) -> Workload:
    """Returns the step of one case; the same at each call."""
    case = inputs_of(info)[index]
    built = case.constructor_input
    module = info.module_cls(*built.args, **built.kwargs).to(torch.float32).train()

    given = case.forward_input
    if any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        with torch.no_grad():
            # a lazy module gets its shapes from a first batch, also in plain PyTorch
            module(*given.args, **given.kwargs)

    stepped = Stepped(module, is_first_alone=info.name in _TRAINS_ITS_FIRST_ARGUMENT)
    return Workload(stepped, {"args": tuple(given.args), "kwargs": dict(given.kwargs)})
