"""Operator calls without their data: all that an operator's cost and workspace depend on.

A `Call` is an fx node without data: the operator, the shapes, strides and types of its tensors, and
its other arguments. Equal calls cost the same, so costs are stored by call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from remat.torch_border.scalars import hint_of, is_symbol

aten = torch.ops.aten
OpOverload: Any = type(aten.mm.default)

# Operators that return a view although their schema does not declare it.
_UNDECLARED_VIEWS = {aten._unsafe_view.default}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its data. `shape` and `stride` count elements.

    With `is_conj` or `is_neg`, the tensor is the conjugate or the negative of what is in memory.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str = "cpu"
    layout: torch.layout = torch.strided
    is_conj: bool = False
    is_neg: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Returns the spec of a real or fake tensor."""
        is_strided = tensor.layout == torch.strided
        stride = tuple(map(int, tensor.stride())) if is_strided else ()
        return cls(
            tuple(map(int, tensor.shape)),
            stride,
            tensor.dtype,
            tensor.device.type,
            tensor.layout,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, laid out densely."""
        return self.numel * self.dtype.itemsize

    @property
    def unique_bytes(self) -> int:
        """Bytes of the distinct elements: an expanded dimension (stride 0) counts once."""
        if not self.stride:
            return self.nbytes
        return (
            math.prod(n for n, s in zip(self.shape, self.stride, strict=True) if s)
            * self.dtype.itemsize
        )

    @property
    def extent_bytes(self) -> int:
        """Bytes from the first element to the last: the smallest storage that holds the tensor."""
        if not self.numel or not self.stride:
            return self.nbytes
        return (
            1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        ) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True where the elements lie in row-major order without gaps."""
        expected = 1
        for n, s in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and s != expected:
                return self.numel == 0
            expected *= n
        return True

    @property
    def is_channels_last(self) -> bool:
        """True for a batch of images in which the channels of a pixel are contiguous."""
        return len(self.shape) == 4 and self.permuted(0, 2, 3, 1).is_contiguous

    def permuted(self, *order: int) -> TensorSpec:
        """Returns the view with the dimensions in another order."""
        return replace(
            self,
            shape=tuple(self.shape[i] for i in order),
            stride=tuple(self.stride[i] for i in order),
        )

    def __str__(self) -> str:
        layout = "" if self.layout == torch.strided else f":{self.layout}"
        marks = layout + ":conj" * self.is_conj + ":neg" * self.is_neg
        return f"{self.dtype}{list(self.shape)}/{list(self.stride)}{marks}".removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call. Tensors in `args` and `kwargs` are `TensorSpec`s, lists are tuples.

    Attributes:
        target: an `OpOverload`, a higher-order operator or a Python function.
        args: the positional arguments.
        kwargs: the keyword arguments, as pairs.
        outputs: the tensors it returns, flat.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, node: torch.fx.Node) -> Call:
        """Returns the call of an fx node; it and its inputs have fake tensors in `meta["val"]`."""
        args: Any = torch.fx.node.map_arg(node.args, _spec_of_node)
        kwargs: Any = torch.fx.node.map_arg(node.kwargs, _spec_of_node)
        outputs = tuple(_tensors_in(_freeze(node.meta.get("val"))))

        return cls(
            node.target,
            _freeze(args),
            tuple(sorted((k, _freeze(v)) for k, v in kwargs.items())),
            outputs,
        )

    @classmethod
    def made(cls, target: Any, args: Any, kwargs: Any, result: Any) -> Call:
        """Returns the call of an operator with these arguments and result, real or fake."""
        return cls(
            target,
            _freeze(args),
            tuple(sorted((name, _freeze(value)) for name, value in kwargs.items())),
            tuple(_tensors_in(_freeze(result))),
        )

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors among its arguments, flat."""
        return tuple(_tensors_in((self.args, self.kwargs)))

    @property
    def computes(self) -> bool:
        """True where the call runs a kernel; views, `getitem` and arithmetic on sizes do not."""
        if isinstance(self.target, OpOverload):
            return not self.target.is_view and self.target not in _UNDECLARED_VIEWS
        return not isinstance(self.target, (FunctionType, BuiltinFunctionType))

    @property
    def is_pointwise(self) -> bool:
        """True where each element of the output depends on one element of each input."""
        return isinstance(self.target, OpOverload) and torch.Tag.pointwise in self.target.tags

    @property
    def packet(self) -> Any:
        """The operator without its overload: `aten.add` of `aten.add.Tensor`."""
        return self.target.overloadpacket if isinstance(self.target, OpOverload) else self.target

    @property
    def device_type(self) -> str:
        """The device type of its tensors; `cpu` where it has none."""
        return next((t.device_type for t in (*self.outputs, *self.inputs)), "cpu")

    def argument(self, name: str) -> Any:
        """Returns the argument called `name` in the schema, or its default."""
        for position, declared in enumerate(self.target._schema.arguments):
            if declared.name == name:
                if not declared.kwarg_only and position < len(self.args):
                    return self.args[position]
                return dict(self.kwargs).get(name, declared.default_value)
        raise KeyError(f"{self.target} has no argument {name!r}; see {self.target._schema}")

    def __str__(self) -> str:
        named = [f"{name}={_text(value)}" for name, value in self.kwargs]
        return f"{self.target}({', '.join([*map(_text, self.args), *named])})"


def _spec_of_node(node: torch.fx.Node) -> Any:
    return _freeze(node.meta.get("val"))


def _freeze(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_freeze, value))

    if is_symbol(value):
        number = hint_of(value)
        return 1.0 if is_symbol(number) else number  # not known before it is read from a tensor

    if isinstance(
        value,
        (
            int,
            float,
            complex,
            str,
            type(None),
            torch.dtype,
            torch.layout,
            torch.memory_format,
            torch.device,
            TensorSpec,
        ),
    ):
        return value

    return repr(type(value))


def _tensors_in(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors_in(item)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return str(value)
