"""The fastest way to call an operator: torch's own Python binding, where it makes the same call.

`torch.ops.aten.mm.default(a, b)` parses its arguments against the schema at run time; `torch.mm(a,
b)` is generated code. The binding takes 1 to 2 microseconds less, which is a third of the cost of
running a step operator by operator (`experiments/speed.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from remat.torch_border.scalars import hint_of, is_symbol


class Bindings:
    """Finds bindings, and caches them by operator and form of call."""

    def __init__(self) -> None:
        self._known: dict[Any, Callable[..., Any]] = {}

    def of(self, node: fx.Node) -> Callable[..., Any]:
        """Returns the binding to call with the node's arguments, or else the operator itself."""
        target: Any = node.target
        if not isinstance(target, OpOverload) or target.namespace != "aten":
            return target  # type: ignore[no-any-return]

        form = (
            target,
            tuple(map(_form, node.args)),
            tuple((name, _form(arg)) for name, arg in node.kwargs.items()),
        )

        if form not in self._known:
            self._known[form] = next(
                (c for c in _candidates(target) if _is_same_call(c, node)), target
            )
        return self._known[form]


def _form(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        return type(hint_of(value)) if is_symbol(value) else "tensor"
    return tuple(map(_form, argument)) if isinstance(argument, list | tuple) else type(argument)


def _candidates(target: OpOverload) -> list[Callable[..., Any]]:
    name = target._schema.name.split("::")[1]
    homes: tuple[Any, ...] = (torch, torch.Tensor, torch._C._nn)
    return [getattr(home, name) for home in homes if hasattr(home, name)]


def _is_same_call(candidate: Callable[..., Any], node: fx.Node) -> bool:
    """True where the candidate dispatches to the node's operator and arguments, and nothing else.

    It is run on the node's fake tensors to find out.
    """
    args, kwargs = fx.node.map_arg(
        (node.args, dict(node.kwargs)), lambda source: hint_of(source.meta["val"])
    )

    recorder = _Recorder()
    try:
        with torch.no_grad(), recorder:
            candidate(*args, **kwargs)
    except (TypeError, RuntimeError, ValueError, NotImplementedError):
        return False

    return (
        len(recorder.calls) == 1
        and recorder.calls[0][0] is node.target
        and _named(*recorder.calls[0]) == _named(node.target, args, kwargs)
    )


def _named(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns arguments by name, without defaults, tensors replaced by their identity."""
    named = {
        argument.name: value
        for argument, value in zip(target._schema.arguments, args, strict=False)
    } | dict(kwargs)
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    comparable = {name: _comparable(value) for name, value in named.items()}

    return {
        name: value
        for name, value in comparable.items()
        if name not in defaults or value != _comparable(defaults[name])
    }


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))
    return tuple(map(_comparable, value)) if isinstance(value, list | tuple) else value


class _Recorder(TorchDispatchMode):
    """Notes the operators that a call dispatches to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # fake tensors look up their device by `prim.device`
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))
