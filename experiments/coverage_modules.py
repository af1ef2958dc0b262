"""One training step of every module of `torch.nn`, with the inputs of PyTorch's own module database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .models import Workload


class Stepped(nn.Module):
    """A module behind a layer of its own shape, with a loss behind it: everything floating is trained."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, args: Any, kwargs: Any) -> torch.Tensor:
        """Returns a scalar of everything floating that the module returns."""
        scaled = tree_map_only(torch.Tensor, lambda t: t * self.scale if t.is_floating_point() else t, args)
        results = [leaf for leaf in tree_leaves(self.module(*scaled, **kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        loss: torch.Tensor = torch.stack([(leaf * leaf).mean() for leaf in results]).sum()
        return loss


def module_cases() -> Iterator[tuple[str, Callable[[], Workload]]]:
    """Yields (name, maker) of each module in the database, one case a distinct set of constructor arguments."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        if torch.float32 not in info.dtypes:
            continue
        for index in range(num_inputs(info)):
            yield f"{info.name}, {index}", partial(make_case, info, index)


def inputs_of(info: Any) -> list[Any]:
    """Returns the database's inputs of one module that are for its forward."""
    torch.manual_seed(0)
    found = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
    return [case for case in found if case.forward_input is not None]


def num_inputs(info: Any) -> int:
    """How many cases a module has."""
    return len(inputs_of(info))


def make_case(info: Any, index: int) -> Workload:
    """Returns the step of one case; the same at each call."""
    case = inputs_of(info)[index]
    built = case.constructor_input
    module = info.module_cls(*built.args, **built.kwargs).to(torch.float32).train()
    given = case.forward_input
    return Workload(Stepped(module), {"args": tuple(given.args), "kwargs": dict(given.kwargs)})
