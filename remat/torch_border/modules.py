"""Private names of torch by which `module(...)` is made to run something else.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn


def call_plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls `module` as `module(...)` does where it was not compiled (`nn.Module._call_impl`,
    2.13).
    """
    return module._call_impl(*args, **kwargs)


def call_with_forward(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Calls `module` plainly, hooks and all, with another forward (`nn.Module._call_impl` calls
    `self.forward`, 2.13).
    """
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before


class OwnCall(ABC):
    """What `module(...)` runs in place of the plain call, put there by `set_call`."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copied or pickled it is None.

        `nn.Module` leaves it out, a module with a `__getstate__` of its own does not.
        """
        return type(None), ()


def set_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Makes `module(...)` run `call`, as `nn.Module.compile` does (`_compiled_call_impl`, 2.13; not
    pickled).
    """
    module._compiled_call_impl = call


def get_call(module: nn.Module) -> Any:
    """Returns what `set_call` set, None where nothing was."""
    return module._compiled_call_impl


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Returns a module's forward hooks by number, to be changed in place (`_forward_hooks`,
    2.13).
    """
    return module._forward_hooks


def has_backward_hook(module: nn.Module) -> bool:
    """True for a module with a hook around its backward, before or after it (`_backward_hooks`,
    2.13).
    """
    return bool(module._backward_hooks or module._backward_pre_hooks)
