"""Compiles hot loops with numba where it is installed; the same code runs in plain Python where not.

numba is an optional extra (`pip install remat[fast]`). Compiled code is cached on disk beside the module, so only the
first call on a machine waits for the compiler.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

COMPILER_S = 30.0  # with less time left, what was never compiled on this machine is not called
IS_COMPILED = importlib.util.find_spec("numba") is not None


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Returns `function`, compiled if numba is there; arrays in and out, no Python objects."""
    if not IS_COMPILED:
        return function
    result: Callable[P, T] = importlib.import_module("numba").njit(cache=True)(function)
    return result


def inner(function: Callable[P, T]) -> Callable[P, T]:
    """Returns `function`, compiled to be called by compiled functions only, which saves half of the compiler's time."""
    if not IS_COMPILED:
        return function
    numba = importlib.import_module("numba")
    result: Callable[P, T] = numba.njit(cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return result


def is_ready(function: Callable[P, T]) -> bool:
    """True where calling `function` does not wait for the compiler: plain, compiled before, or cached on disk."""
    if not IS_COMPILED or getattr(function, "nopython_signatures", None):
        return True
    folder = Path(function.stats.cache_path)  # type: ignore[attr-defined]
    name = Path(function.__code__.co_filename).stem
    return any(folder.glob(f"{name}.{function.__name__}-*.nbc"))
