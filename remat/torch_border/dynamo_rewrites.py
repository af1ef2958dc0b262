"""Operators that dynamo replaces by others, with other results than eager PyTorch's.

They are left as they are while a planned step is captured. Supported: torch 2.11 to 2.15; each name
below was checked with the version beside it.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import exc as dynamo_exc
from torch._dynamo import variables as dynamo_variables
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.tensor import NumpyNdarrayVariable  # 2.13

from remat.core.errors import TraceError

_CAPTURE = threading.local()


@contextmanager
def operators_left_alone() -> Iterator[None]:
    """Captures what eager PyTorch computes, inside of a `with` block with `eager_settings`.

    - `addcmul_`, `addcdiv` and `_foreach_lerp_` with a number round differently in parts (2.13:
      `enable_dynamo_decompositions`, and handlers that this setting does not reach).
    - `torch.full` of a tensor takes the default type instead of the tensor's.
    - `max(a, b)` of two tensors is one of them; `torch.maximum` would give the other one, and the
      parameters behind it, a gradient of zeros. It is a graph break.
    - `numpy.random` has a generator of its own; dynamo draws from torch's. It is a graph break.
    - NumPy's functions and methods of an array round differently from torch's. They are a graph
      break; operators between arrays are not.
    - A `random.Random` of the user's would draw the same number in each step. It is a graph break.
    - A `deque` drops items beyond `maxlen`, which dynamo does not know. It is a graph break.
    - `OrderedDict.move_to_end` is refused: dynamo loses it, and does not see the order.
    - A `numpy.float64` is a float, also for a tensor; dynamo makes an array of it.
    - `nn.TransformerEncoder` returns zeros for padding in its fast path, and asks whether it is
      compiled before it takes that. It is told that it is not where it may take it.
    """
    _install()
    before = getattr(_CAPTURE, "is_on", False)
    _CAPTURE.is_on = True
    try:
        yield
    finally:
        _CAPTURE.is_on = before


@functools.cache
def eager_settings() -> dict[str, bool]:
    """Returns dynamo's settings that belong to `operators_left_alone`."""
    settings = {"enable_dynamo_decompositions": False, "use_numpy_random_stream": True}
    return {name: value for name, value in settings.items() if hasattr(dynamo_config, name)}


@functools.cache
def _install() -> None:
    """Wraps dynamo's handlers once; outside of a capture they do what they did.

    `TorchInGraphFunctionVariable._get_handlers`, `BuiltinVariable._call_min_max_binary`,
    `NumpyVariable.call_function`, `NumpyNdarrayVariable.call_method`, `VariableBuilder._wrap`,
    `VariableBuilder.wrap_listlike`, `call_method` of `RandomVariable` and of dictionaries (2.13).
    """
    handlers: dict[Any, Any] = dynamo_variables.TorchInGraphFunctionVariable._get_handlers()
    for function in (torch.addcdiv, torch._foreach_lerp_, torch.full):
        if function in handlers:
            handlers[function] = _left_alone(handlers[function])

    handlers[torch.compiler.is_compiling] = _eager_for_encoders(
        handlers[torch.compiler.is_compiling]
    )

    builtin: Any = dynamo_variables.BuiltinVariable
    builtin._call_min_max_binary = _broken_at_tensors(builtin._call_min_max_binary)
    for kind, method in (
        (dynamo_variables.NumpyVariable, "call_function"),
        (NumpyNdarrayVariable, "call_method"),
    ):
        setattr(kind, method, _broken_at_arrays(getattr(kind, method)))

    known: Any = dynamo_variables
    of_generators, of_deques = known.RandomVariable, known.lists.DequeVariable
    of_generators.call_method = _broken_where(lambda *_: True, of_generators.call_method)
    of_deques.call_method = _broken_where(_is_of_full_deque, of_deques.call_method)
    for name in ("OrderedDictVariable", "ConstDictVariable"):
        if of_dictionaries := getattr(known.user_defined, name, None):
            of_dictionaries.call_method = _keeping_order(of_dictionaries.call_method)

    builder: Any = VariableBuilder
    builder.wrap_listlike = _with_maxlen(builder.wrap_listlike)
    builder._wrap = _as_floats(builder._wrap)


def _is_capturing() -> bool:
    return getattr(_CAPTURE, "is_on", False)


# `unimplemented_v2` until it took the place of `unimplemented`
_break_graph: Any = getattr(dynamo_exc, "unimplemented_v2", None) or dynamo_exc.unimplemented


def _left_alone(handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)
    def handle(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_capturing() and "dtype" not in kwargs:  # with a type, `torch.full` is right
            return None
        return handler(self, tx, *args, **kwargs)

    return handle


def _broken_at_tensors(handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)
    def handle(self: Any, tx: Any, a: Any, b: Any) -> Any:
        if _is_capturing() and (_is_tensor(a) or _is_tensor(b)):
            _break_graph(
                gb_type="Data-dependent branching",
                context=f"{self.fn.__name__}({a}, {b})",
                explanation=f"Python's {self.fn.__name__} chooses one of two tensors by their data",
                hints=["Use torch.maximum or torch.minimum, whose gradient goes to both."],
            )
        return handler(self, tx, a, b)

    return handle


# methods of an array that compute nothing that could be rounded
_EXACT = frozenset({
    "astype", "copy", "fill", "flatten", "item", "ravel", "repeat", "reshape", "size", "squeeze",
    "swapaxes", "tolist", "transpose", "view",
})  # fmt: skip


def _broken_at_arrays(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a handler of a NumPy function, or of a method of an array, that breaks the graph."""

    @functools.wraps(handler)
    def handle(self: Any, tx: Any, *given: Any) -> Any:
        is_method = isinstance(given[0], str)
        is_exact = is_method and (given[0] in _EXACT or given[0].startswith("__"))
        args, kwargs = given[-2:]
        is_of_arrays = is_method or any(map(_has_arrays, (*args, *kwargs.values())))
        if _is_capturing() and is_of_arrays and not is_exact:
            _break_graph(
                gb_type="Function of a NumPy array",
                context=str(given[0] if is_method else self.value),
                explanation="NumPy computes it, and torch would round differently",
                hints=["Use torch's function of the tensor."],
            )
        return handler(self, tx, *given)

    return handle


def _broken_where(
    is_changed: Callable[[Any, str], bool], handler: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a handler of methods that breaks the graph where one changes a user's object."""

    @functools.wraps(handler)
    def handle(self: Any, tx: Any, name: str, *given: Any) -> Any:
        # an object without a source was made by the forward itself
        if _is_capturing() and self.source is not None and is_changed(self, name):
            _break_graph(
                gb_type="Method that changes an object from outside of the graph",
                context=f"{self.python_type_name()}.{name}",
                explanation="torch.compile does not keep all of the change",
                hints=["Call it outside of the forward."],
            )
        return handler(self, tx, name, *given)

    return handle


def _keeping_order(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a handler of methods of a dictionary that refuses `move_to_end`."""

    @functools.wraps(handler)
    def handle(self: Any, tx: Any, name: str, *given: Any) -> Any:
        if _is_capturing() and name == "move_to_end":
            raise TraceError(
                "the forward calls move_to_end of an OrderedDict, whose order torch.compile does "
                "not see; pop the item and set it again"
            )
        return handler(self, tx, name, *given)

    return handle


def _is_of_full_deque(deque: Any, method: str) -> bool:
    """True for a method that may drop items of a deque with `maxlen`."""
    is_added = method in ("append", "appendleft", "extend", "extendleft", "insert", "__iadd__")
    return is_added and not deque.maxlen.is_constant_none()


def _with_maxlen(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a handler of lists from outside of a graph that knows how long a deque may be."""

    @functools.wraps(handler)
    def handle(self: Any, value: Any) -> Any:
        found = handler(self, value)
        if _is_capturing() and type(value) is collections.deque and hasattr(found, "maxlen"):
            found.maxlen = dynamo_variables.ConstantVariable.create(value.maxlen)
        return found

    return handle


def _as_floats(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a handler of values from outside of a graph; `numpy.float64`s become floats."""

    @functools.wraps(handler)
    def handle(self: Any, value: Any) -> Any:
        if _is_capturing() and type(value) is np.float64:
            return self.wrap_symfloat(float(value))
        return handler(self, value)

    return handle


def _has_arrays(variable: Any) -> bool:
    """True for an array, and for a list or tuple with one (`BaseListVariable.items`, 2.13)."""
    if isinstance(variable, dynamo_variables.BaseListVariable):
        return any(map(_has_arrays, variable.items))
    return isinstance(variable, NumpyNdarrayVariable)


def _eager_for_encoders(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a handler of `torch.compiler.is_compiling` for the encoder that asks it."""

    @functools.wraps(handler)
    def handle(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        encoder = getattr(tx.symbolic_locals.get("self"), "value", None)
        if _is_capturing() and isinstance(encoder, nn.TransformerEncoder):
            is_reached = getattr(tx.symbolic_locals.get("src"), "requires_grad", False)
            is_trained = is_reached or any(p.requires_grad for p in encoder.parameters())
            if not (torch.is_grad_enabled() and is_trained):
                return dynamo_variables.ConstantVariable.create(False)
        return handler(self, tx, *args, **kwargs)

    return handle


def _is_tensor(variable: Any) -> bool:
    """True for a tensor; a number that is an input of the graph is not one (2.13)."""
    of_numbers = (
        dynamo_variables.UnspecializedPythonVariable,
        dynamo_variables.FakeItemVariable,
    )
    return isinstance(variable, dynamo_variables.TensorVariable) and not isinstance(
        variable, of_numbers
    )
