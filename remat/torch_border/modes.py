"""Dispatch modes of the user, under which dynamo compiles nothing.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

from torch.utils._python_dispatch import (  # 2.13
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)


def active_modes() -> list[str]:
    """Returns the names of the active `TorchDispatchMode`s.

    Torch's own, such as that of fake tensors, are left out (`is_infra_mode`, 2.13).
    """
    if not is_in_torch_dispatch_mode(include_infra_modes=False):
        return []
    stack = _get_current_dispatch_mode_stack()
    return [type(mode).__name__.lstrip("_") for mode in stack if not mode.is_infra_mode()]
