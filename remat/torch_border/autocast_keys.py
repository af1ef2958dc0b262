"""Private names of torch's autocast: the operators that it casts for, by device, and their kernels.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload  # 2.13

__all__ = ["OpOverload", "below_autocast", "operators_cast_for", "with_cpu_autocast"]


def operators_cast_for(device_type: str) -> dict[str, OpOverload]:
    """Returns name ("softmax.int") -> operator that autocast has a kernel for on a device type.

    A build of torch for the CPU knows those for CUDA too (`_dispatch_get_all_op_names`,
    `_dispatch_has_kernel_for_dispatch_key`, 2.13).
    """
    key = _key(device_type)
    found: dict[str, OpOverload] = {}
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace != "aten" or not torch._C._dispatch_has_kernel_for_dispatch_key(
            full_name, key
        ):
            continue

        packet, _, overload = name.partition(".")
        if hasattr(torch.ops.aten, packet):
            found[name] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


def below_autocast(device_type: str) -> Any:
    """Excludes autocast inside of a `with` block, as autocast does itself after it has cast.

    It uses `_ExcludeDispatchKeyGuard` (2.13).
    """
    key = getattr(torch._C.DispatchKey, _key(device_type))
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))


@contextmanager
def with_cpu_autocast(kernels: Mapping[str, Callable[..., Any] | None]) -> Iterator[None]:
    """Makes autocast on the CPU run other kernels, in all of this process (`_destroy`, 2.13).

    Args:
        kernels: name of an operator -> its kernel; None for operators that autocast must not cast.
    """
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings that torch's own kernels are overridden
            for name, kernel in kernels.items():
                library.impl(name, kernel or torch.library.fallthrough_kernel, allow_override=True)
        yield
    finally:
        library._destroy()


def _key(device_type: str) -> str:
    return f"Autocast{device_type.upper()}"
