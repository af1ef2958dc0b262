"""Compiles hot loops with numba where it is installed; the same code runs in plain Python where not.

numba is an optional extra (`pip install remat[fast]`). Compiled code is cached on disk beside the module, so only the
first call on a machine waits for the compiler.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

IS_COMPILED = importlib.util.find_spec("numba") is not None


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Returns `function`, compiled if numba is there; arrays in and out, no Python objects."""
    if not IS_COMPILED:
        return function
    result: Callable[P, T] = importlib.import_module("numba").njit(cache=True)(function)
    return result
