"""Compiles hot loops with numba where it is installed; the same code runs in plain Python where not.

numba is an optional extra (`pip install remat[fast]`). Compiled code is cached on disk beside the module, so only the
first call on a machine waits for the compiler.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

COMPILER_S = 30.0  # with less time left, what was never compiled on this machine runs in plain Python, or not at all
IS_COMPILED = importlib.util.find_spec("numba") is not None


_is_plain = False  # while a second copy of a module is loaded
_sources: set[Path] = set()  # files with compiled functions, in order of import: callees come before callers


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Returns `function`, compiled if numba is there; arrays in and out, no Python objects."""
    if not IS_COMPILED or _is_plain:
        return function
    result: Callable[P, T] = importlib.import_module("numba").njit(cache=True, nogil=True)(function)
    _sources.add(Path(function.__code__.co_filename))
    _drop_stale(result)
    return result


def inner(function: Callable[P, T]) -> Callable[P, T]:
    """Returns `function`, compiled to be called by compiled functions only, which saves half of the compiler's time."""
    if not IS_COMPILED or _is_plain:
        return function
    _sources.add(Path(function.__code__.co_filename))
    numba = importlib.import_module("numba")
    result: Callable[P, T] = numba.njit(cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return result


def is_ready(function: Callable[P, T]) -> bool:
    """True where calling `function` does not wait for the compiler: plain, compiled before, or cached on disk."""
    if not IS_COMPILED or getattr(function, "nopython_signatures", None):
        return True
    return any(path.suffix == ".nbc" for path in _cached(function))


def in_time(function: Callable[P, T], left_s: float) -> Callable[P, T]:
    """Returns `function`, or where `left_s` seconds are too few for the compiler, the same in plain Python: slow, but at once.

    All it calls that is compiled must be in its own module, which is loaded a second time.
    """
    if is_ready(function) or left_s > COMPILER_S:
        return function
    plain: Callable[P, T] = getattr(_plain_copy(function.__module__), function.__name__)
    return plain


@cache
def _plain_copy(name: str) -> ModuleType:
    """Returns a second copy of a module, in which nothing is compiled."""
    global _is_plain
    spec = importlib.util.spec_from_file_location(f"{name}_plain", str(sys.modules[name].__file__))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _is_plain = True
    try:
        spec.loader.exec_module(module)
    finally:
        _is_plain = False
    return module


def _cached(function: Callable[P, T]) -> list[Path]:
    """The files in which numba keeps what it compiled of `function`."""
    folder = Path(function.stats.cache_path)  # type: ignore[attr-defined]
    return list(folder.glob(f"{Path(function.__code__.co_filename).stem}.{function.__name__}-*.nb*"))


def _drop_stale(function: Callable[P, T]) -> None:
    """Deletes what was compiled before a source changed: numba 0.68 looks at a function's own file, not at its callees'."""
    newest = max(path.stat().st_mtime for path in _sources)
    for path in _cached(function):
        if path.stat().st_mtime < newest:
            path.unlink(missing_ok=True)
