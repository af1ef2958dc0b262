"""Private names of torch for making `module(...)` run something else.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_LOCK = threading.Lock()
# id of a module -> how many calls with another forward are running, and the forward before them
_CALLS: dict[int, tuple[int, Callable[..., Any] | None]] = {}


def call_plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls `module` as `module(...)` does without compilation (`_call_impl`, 2.13)."""
    return module._call_impl(*args, **kwargs)


def call_with_forward(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Calls `module` with its hooks, but another forward.

    `_call_impl` (2.13) calls `self.forward`. Calls in several threads share the forward of the one
    that began first.
    """
    own = vars(module)
    with _LOCK:
        count, before = _CALLS.get(id(module), (0, own.get("forward")))
        _CALLS[id(module)] = count + 1, before
        if not count:
            own["forward"] = forward

    try:
        return module._call_impl(*args, **kwargs)
    finally:
        with _LOCK:
            count, before = _CALLS.pop(id(module))
            if count > 1:
                _CALLS[id(module)] = count - 1, before
            elif before is None:
                del own["forward"]
            else:
                own["forward"] = before


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Returns the forward that was set on a module itself; None if it has its class's.

    It leaves out what `call_with_forward` sets.
    """
    with _LOCK:
        if id(module) in _CALLS:
            return _CALLS[id(module)][1]
        return vars(module).get("forward")


class OwnCall(ABC):
    """What `module(...)` runs instead of the plain call, once `set_call` has set it."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Makes a copy or a pickle of it None.

        `nn.Module` does not copy it, but a module with its own `__getstate__` may.
        """
        return type(None), ()


def set_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Makes `module(...)` run `call`, as `nn.Module.compile` does.

    It sets `_compiled_call_impl` (2.13), which is not pickled.
    """
    module._compiled_call_impl = call


def get_call(module: nn.Module) -> Any:
    """Returns what `set_call` set; None where it set nothing."""
    return module._compiled_call_impl


@contextmanager
def calls_plain(module: nn.Module) -> Iterator[None]:
    """Makes a module and its parts run as plain modules inside a `with` block."""
    calls = {part: get_call(part) for part in module.modules()}
    own = {part: call for part, call in calls.items() if isinstance(call, OwnCall)}
    for part in own:
        set_call(part, None)
    try:
        yield
    finally:
        for part, call in own.items():
            set_call(part, call)


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Returns a module's own dict of forward hooks, by number (`_forward_hooks`, 2.13)."""
    return module._forward_hooks


def has_backward_hook(module: nn.Module) -> bool:
    """True for a module with a hook before or after its backward (`_backward_hooks`, 2.13)."""
    return bool(module._backward_hooks or module._backward_pre_hooks)
