"""A model on fake tensors: nothing is allocated, and the model is not changed.

Parameters, buffers and inputs may be real, on the meta device, or fake already (built under
`torch.device("meta")` or a `FakeTensorMode`). Those without memory are placed on the device to plan
for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from remat.torch_border.kernels import FakeTensor, FakeTensorMode


class _Fakes:
    """Makes one fake tensor for each tensor."""

    def __init__(self, device_type: str) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device_type = device_type
        self.known: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.known:
            copy = self._copy(tensor.detach())
            is_parameter = isinstance(tensor, nn.Parameter)
            self.known[id(tensor)] = (
                nn.Parameter(copy, tensor.requires_grad)
                if is_parameter
                else copy.requires_grad_(tensor.requires_grad)
            )
        return self.known[id(tensor)]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (
            tensor.is_meta
            or isinstance(tensor, FakeTensor)
            or self.device_type not in ("", tensor.device.type)
        ):
            return self.mode.from_tensor(tensor, static_shapes=True)

        with self.mode:
            size, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
            return torch.empty_strided(
                size, stride, dtype=tensor.dtype, device=self.device_type or _type_of(tensor)
            )


def _type_of(tensor: torch.Tensor) -> str:
    return "cpu" if tensor.device.type == "meta" else tensor.device.type


@contextmanager
def on_fakes(
    model: nn.Module, args: Any, kwargs: Any, device_type: str = ""
) -> Iterator[tuple[Any, Any]]:
    """Replaces the model's parameters and buffers by fake ones, and yields fake arguments.

    Afterwards the originals are put back, even after an error.

    Args:
        model: any module.
        args: its positional arguments.
        kwargs: its keyword arguments.
        device_type: where the fake tensors are, `cpu` or `cuda`. If empty, each is where its tensor
            is, or on the CPU for a meta tensor.
    """
    fakes = _Fakes(device_type)
    modules = list(model.modules())
    # attributes too: a forward may store what it computed
    before = [
        (table, dict(table))
        for module in modules
        for table in (vars(module), module._parameters, module._buffers, module._modules)
    ]

    try:
        for module in modules:
            tables: tuple[Any, Any] = (module._parameters, module._buffers)
            for own in tables:
                for name, tensor in own.items():
                    if tensor is not None:
                        own[name] = fakes.of(tensor)

        # lists of parameters, such as a recurrent network's, and meta tensors as plain attributes
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, list) and any(id(item) in fakes.known for item in value):
                    vars(module)[name] = [fakes.known.get(id(item), item) for item in value]
                elif isinstance(value, torch.Tensor) and value.is_meta:
                    vars(module)[name] = fakes.of(value)

        fake_args, fake_kwargs = pytree.tree_map_only(
            torch.Tensor, fakes.of, (tuple(args), dict(kwargs))
        )
        with fakes.mode:
            yield fake_args, fake_kwargs
    finally:
        for table, content in before:
            table.clear()
            table.update(content)
