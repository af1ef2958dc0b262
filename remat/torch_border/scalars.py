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
from torch._dynamo.exc import TensorifyScalarRestartAnalysis  # 2.13
from torch._dynamo.variables import builder  # 2.13
from torch._functorch._aot_autograd import graph_compile  # 2.13

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ACTIVE = threading.local()
_Frame = tuple[str, int, str]  # a code object: its file, first line and name
# frame and the number's source in it: what decides sizes, and is no input
_FIXED: set[tuple[_Frame, str]] = set()


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
    _ACTIVE.has_fixed_sizes, _ACTIVE.frame_of = True, {}
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
        raise TensorifyScalarRestartAnalysis(restart_reason="a number decides a size")


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


def _install() -> None:
    """Has dynamo ask for each tensor's sizes whether they are fixed.

    A wrapper that stays: settings of other threads are theirs.
    """
    private: Any = builder
    plain = private.process_automatic_dynamic

    def process(tx: Any, name: str, entry: Any, **options: Any) -> Any:
        if not getattr(_ACTIVE, "has_fixed_sizes", False):
            return plain(tx, name, entry, **options)
        frame = (tx.f_code.co_filename, tx.f_code.co_firstlineno, tx.f_code.co_name)
        _ACTIVE.frame_of[name] = frame
        if isinstance(entry.size, tuple) or (frame, name) in _FIXED:
            return entry
        return plain(tx, name, entry, **options)

    private.process_automatic_dynamic = process


_install()
