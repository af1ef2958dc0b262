"""Private names of torch's symbols: Python numbers that change from step to step.

Dynamo makes an input of a number that was another one at the last capture (`automatic dynamic`),
and of sizes that were. Sizes stay fixed here: a plan is for one shape. AOTAutograd then turns
arithmetic on such floats into operators on tensors, which round otherwise than plain PyTorch does
and cost time; that is left out, and the numbers go to the operators as Python numbers.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
# frame and the number's source in it: what decides sizes, and is no input
_FIXED: set[tuple[_Frame, str]] = set()
_REASON = "a number of the step has to be a constant"


def is_symbol(value: Any) -> bool:
    """True for a number that is known when a step runs, and not before."""
    return isinstance(value, _SYMBOLS)


def hint_of(value: Any) -> Any:
    """Returns the number that a symbol had when it was captured, and anything else as it is.

    `int(symbol)` would say the same, and tie the capture to it (`SymNode.hint`, 2.13).
    """
    if not is_symbol(value):
        return value
    hint = value.node.hint
    return value if hint is None else hint


@contextmanager
def fixed_sizes() -> Iterator[None]:
    """Numbers become inputs in what this thread captures, sizes do not
    (`builder.process_automatic_dynamic`, 2.13).
    """
    before = vars(_ACTIVE).copy()
    _ACTIVE.has_fixed_sizes, _ACTIVE.frame_of, _ACTIVE.inputs = True, {}, set()
    try:
        yield
    finally:
        vars(_ACTIVE).clear()
        vars(_ACTIVE).update(before)


def refuse_changing_sizes(graph: fx.Graph) -> None:
    """Has dynamo capture a frame anew where a number that became an input decides a size.

    The number is a constant then: each of its values is another shape, and has a plan of its own
    (`TensorifyScalarRestartAnalysis`, `ShapeEnv.var_to_sources`, 2.13).

    Raises:
        TensorifyScalarRestartAnalysis: what dynamo captures a frame anew for.
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


@contextmanager
def python_numbers() -> Iterator[None]:
    """Leaves arithmetic on floats to Python (`_apply_tensorify_python_scalars`, 2.13).

    For the call of a backend: dynamo lets one run at a time.
    """
    private: Any = graph_compile
    plain = private._apply_tensorify_python_scalars
    private._apply_tensorify_python_scalars = lambda module: None
    try:
        yield
    finally:
        private._apply_tensorify_python_scalars = plain


def _is_active() -> bool:
    return getattr(_ACTIVE, "has_fixed_sizes", False)


def _decides_by_itself(plain: Any) -> Any:
    """Dynamo's question which numbers and sizes changed (`process_automatic_dynamic`, 2.13)."""

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
    """Dynamo's capture of a frame (`trace_frame`, 2.13).

    What dynamo can't do with a symbol and can with a constant, such as `"%.2f" % number`, makes it
    give a frame up: where numbers became inputs, it is captured anew without.
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
    """Where dynamo would break the graph depends on what is a constant (`SpeculationLog`, 2.13)."""
    next(arg for arg in args if isinstance(arg, SpeculationLog)).clear()


def _writes_constants(plain: Any) -> Any:
    """Dynamo's f-strings (`InstructionTranslatorBase._format_value`, 2.13).

    A text with a symbol in it that a graph break cuts off would be the number itself.
    """

    def format_value(self: Any, *args: Any) -> None:
        number = self.stack[-1]
        if _is_active() and isinstance(number, SymNodeVariable):
            self.stack[-1] = ConstantVariable.create(number.evaluate_expr(self.output))
        plain(self, *args)

    return format_value


def _install() -> None:
    """Wraps the functions above, for good: settings of other threads are theirs."""
    for home, name, wrap in (
        (builder, "process_automatic_dynamic", _decides_by_itself),
        (convert_frame, "trace_frame", _falls_back_to_constants),
        (InstructionTranslatorBase, "_format_value", _writes_constants),
    ):
        setattr(home, name, wrap(getattr(home, name)))


_install()
