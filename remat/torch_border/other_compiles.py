"""Keeps the plan of a module inside of another `torch.compile`.

Dynamo traces a module's forward, whatever `module(...)` runs instead, and `nn.Module.compile`
replaces what it runs. Supported: torch 2.11 to 2.15; each name below was checked with the version
beside it.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule  # 2.13
from torch._dynamo.exc import unimplemented  # 2.13
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable  # 2.13

from remat.torch_border.modules import OwnCall, get_call

_LOG = logging.getLogger(__name__)
_CAPTURING = threading.local()
_SAID: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
_WHY = (
    "remat planned this module, and its step runs as planned. Leave out fullgraph=True around it, "
    "or plan the outer module instead; remat.unwrap(module) drops the plan"
)


@contextmanager
def own_capture() -> Iterator[None]:
    """Marks what this thread captures inside of a `with` block as a planned step."""
    before = getattr(_CAPTURING, "is_own", False)
    _CAPTURING.is_own = True
    try:
        yield
    finally:
        _CAPTURING.is_own = before


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_own_capture() -> bool:
    """True while this thread captures or runs a planned step; a constant in captured code."""
    return bool(getattr(_CAPTURING, "is_own", False))


def is_met_by_another_compile() -> bool:
    """True where dynamo captures for another `torch.compile`, with gradients enabled."""
    is_captured = torch.is_grad_enabled() and torch.compiler.is_dynamo_compiling()
    return is_captured and not is_own_capture()


@torch.compiler.disable(reason=_WHY)  # type: ignore[untyped-decorator]
def uncompiled(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `call` as a graph break in the other compilation."""
    _say_that_it_stays(call)
    return call(*args, **kwargs)


def original_module(module: nn.Module) -> nn.Module:
    """Returns the module that `torch.compile` wrapped (`OptimizedModule`, 2.13), or the module."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


@functools.cache
def keep_plans() -> None:
    """Makes dynamo and `nn.Module.compile` leave planned modules alone, permanently.

    Other modules are compiled as before (`UnspecializedNNModuleVariable.call_function`, 2.13).
    """
    variable: Any = UnspecializedNNModuleVariable
    module: Any = nn.Module
    variable.call_function = _breaking_at_plans(variable.call_function)
    module.compile = _keeping_plans(module.compile)


def _breaking_at_plans(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        is_foreign = torch.is_grad_enabled() and not is_own_capture() and not tx.export
        if is_foreign and isinstance(get_call(self.value), OwnCall):
            unimplemented(
                gb_type="call of a module that remat planned",
                context=type(self.value).__name__,
                explanation=_WHY,
                hints=[],
            )
        return plain(self, tx, args, kwargs)

    return call_function


def _keeping_plans(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def compile(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = get_call(self)
        if isinstance(call, OwnCall):
            _say_that_it_stays(call)
            return None
        return plain(self, *args, **kwargs)

    return compile


def _say_that_it_stays(call: Callable[..., Any]) -> None:
    if call not in _SAID:
        _SAID.add(call)
        _LOG.warning(
            "torch.compile was called on a module that remat planned: it stays as planned, and is "
            'not compiled; for compiled kernels within the plan use executor="inductor", and '
            "remat.unwrap(model) drops the plan"
        )
