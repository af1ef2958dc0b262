"""Private names of torch's symbols: Python numbers that change from step to step.

Dynamo makes a number or a size that changed since the last capture an input of the graph
(`automatic dynamic`). Here only numbers become inputs and sizes stay fixed, since a plan is for one
shape. AOTAutograd would turn arithmetic on such floats into operators on tensors, which round
differently from plain PyTorch and cost time. This is switched off: operators get Python numbers.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo import convert_frame  # 2.13
from torch._dynamo.exc import (  # 2.13
    BackendCompilerFailed,
    RestartAnalysis,
    TensorifyScalarRestartAnalysis,
)
from torch._dynamo.pgo import auto_dynamic  # 2.13
from torch._dynamo.symbolic_convert import InstructionTranslatorBase, SpeculationLog  # 2.13
from torch._dynamo.variables import ConstantVariable, builder  # 2.13
from torch._dynamo.variables.tensor import SymNodeVariable  # 2.13
from torch._functorch._aot_autograd import graph_compile  # 2.13

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ACTIVE = threading.local()
_Frame = tuple[str, int, str]  # a code object: its file, first line and name
# frame and source of the numbers that are constants, because they decide sizes or can't be inputs
_FIXED: set[tuple[_Frame, str]] = set()
_REASON = "a number of the step has to be a constant"


def is_symbol(value: Any) -> bool:
    """True for a number that is known only when a step runs."""
    return isinstance(value, _SYMBOLS)


def hint_of(value: Any) -> Any:
    """Returns the value that a symbol had at capture (`SymNode.hint`, 2.13); others unchanged.

    `int(symbol)` would return the same, but make the capture valid for that value only.
    """
    if not is_symbol(value):
        return value
    hint = value.node.hint
    return value if hint is None else hint


@contextmanager
def fixed_sizes() -> Iterator[None]:
    """Makes numbers, but not sizes, inputs of what this thread captures in a `with` block.

    It uses `builder.process_automatic_dynamic` (2.13).
    """
    before = vars(_ACTIVE).copy()
    _ACTIVE.has_fixed_sizes, _ACTIVE.frame_of, _ACTIVE.inputs = True, {}, set()
    try:
        yield
    finally:
        vars(_ACTIVE).clear()
        vars(_ACTIVE).update(before)


def refuse_changing_sizes(graph: fx.Graph) -> None:
    """Makes dynamo capture a frame again where a number that became an input decides a size.

    The number is then a constant: each of its values gives another shape, with its own plan
    (`TensorifyScalarRestartAnalysis`, `ShapeEnv.var_to_sources`, 2.13).

    Raises:
        TensorifyScalarRestartAnalysis: dynamo then captures the frame again.
    """
    deciding = {symbol for size in _symbolic_sizes(graph) for symbol in _symbols_in(size)}
    frame_of = getattr(_ACTIVE, "frame_of", {})
    found = {(frame_of[name], name) for name in deciding if name in frame_of} - _FIXED
    if found:
        _FIXED.update(found)
        raise TensorifyScalarRestartAnalysis(restart_reason=_REASON)


def _symbolic_sizes(graph: fx.Graph) -> Iterator[Any]:
    for node in graph.nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                yield from (size for size in (*tensor.shape, *tensor.stride()) if is_symbol(size))


def _symbols_in(size: Any) -> Iterator[str]:
    """Yields the sources of the numbers that a size is computed from."""
    for symbol in size.node.expr.free_symbols:
        for source in size.node.shape_env.var_to_sources.get(symbol, ()):
            yield source.name if isinstance(source.name, str) else source.name()


def python_numbers() -> AbstractContextManager[None]:
    """Leaves arithmetic on floats to Python.

    Use it around a backend's call; dynamo runs one such call at a time.
    """
    return _floats_to_tensors_by(lambda module, plain: None)


def before_floats_are_tensors(
    act: Callable[[fx.GraphModule], None],
) -> AbstractContextManager[None]:
    """Calls `act` with each graph in which AOTAutograd turns floats into tensors.

    AOTAutograd makes constants of the floats that it does not turn into tensors.
    """

    def apply(module: fx.GraphModule, plain: Callable[[fx.GraphModule], None]) -> None:
        act(module)
        plain(module)

    return _floats_to_tensors_by(apply)


@contextmanager
def _floats_to_tensors_by(
    apply: Callable[[fx.GraphModule, Callable[[fx.GraphModule], None]], None],
) -> Iterator[None]:
    """Calls `apply` in place of AOTAutograd's pass (`_apply_tensorify_python_scalars`, 2.13)."""
    private: Any = graph_compile
    plain = private._apply_tensorify_python_scalars
    private._apply_tensorify_python_scalars = lambda module: apply(module, plain)
    try:
        yield
    finally:
        private._apply_tensorify_python_scalars = plain


def _is_active() -> bool:
    return getattr(_ACTIVE, "has_fixed_sizes", False)


def _decides_by_itself(plain: Any) -> Any:
    """Returns our `process_automatic_dynamic` (2.13), which decides what becomes an input."""

    def process(tx: Any, name: str, entry: Any, **options: Any) -> Any:
        if not _is_active():
            return plain(tx, name, entry, **options)

        frame = (tx.f_code.co_filename, tx.f_code.co_firstlineno, tx.f_code.co_name)
        _ACTIVE.frame_of[name] = frame
        if isinstance(entry.size, tuple) or (frame, name) in _FIXED:
            return entry

        known = plain(tx, name, entry, **options)
        if known.scalar is auto_dynamic:
            _ACTIVE.inputs.add((frame, name))
        return known

    return process


def _falls_back_to_constants(plain: Any) -> Any:
    """Returns dynamo's capture of a frame (`trace_frame`, 2.13) with a second attempt.

    Dynamo gives up on a frame with code that works for a constant but not for a symbol, such as
    `"%.2f" % number`. If numbers became inputs, the frame is captured again with constants.
    """

    def trace(*args: Any, **kwargs: Any) -> Any:
        if not _is_active():
            return plain(*args, **kwargs)

        _ACTIVE.inputs = set()
        try:
            return plain(*args, **kwargs)
        except RestartAnalysis as restart:
            if restart.restart_reason == _REASON:
                _forget_speculations(args)
            raise
        except BackendCompilerFailed:
            raise
        except Exception:
            if not _ACTIVE.inputs - _FIXED:
                raise

            _FIXED.update(_ACTIVE.inputs)
            _forget_speculations(args)
            raise TensorifyScalarRestartAnalysis(restart_reason=_REASON) from None

    return trace


def _forget_speculations(args: Any) -> None:
    """Clears dynamo's log of graph breaks (`SpeculationLog`, 2.13): they depend on constants."""
    next(arg for arg in args if isinstance(arg, SpeculationLog)).clear()


def _writes_constants(plain: Any) -> Any:
    """Returns dynamo's code for f-strings (`_format_value`, 2.13) with symbols made constants.

    At a graph break, an f-string with a symbol would otherwise become the number itself.
    """

    def format_value(self: Any, *args: Any) -> None:
        number = self.stack[-1]
        if _is_active() and isinstance(number, SymNodeVariable):
            self.stack[-1] = ConstantVariable.create(number.evaluate_expr(self.output))
        plain(self, *args)

    return format_value


def _install() -> None:
    """Wraps dynamo's functions, permanently; they only act in threads inside of `fixed_sizes`."""
    for home, name, wrap in (
        (builder, "process_automatic_dynamic", _decides_by_itself),
        (convert_frame, "trace_frame", _falls_back_to_constants),
        (InstructionTranslatorBase, "_format_value", _writes_constants),
    ):
        setattr(home, name, wrap(getattr(home, name)))


_install()
