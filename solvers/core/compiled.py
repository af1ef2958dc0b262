"""Compiles hot loops with numba; without numba the same code runs in plain Python.

Plain Python makes a 270th of the moves, and a warning says so once. This is why numba is a required
dependency: it takes 208 MB (173 of them llvmlite), where torch for the CPU takes 754 MB, and 0.16 s
to import, where torch takes 1.1 s.

Compiled code is cached on disk beside the module, or in `NUMBA_CACHE_DIR`, so only the first call
on a machine waits for the compiler, and a message says so. Where no such folder is writable, the
first call of each process waits. `NUMBA_DISABLE_JIT=1` acts as if numba were not installed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from remat.narration.stages import stage

P = ParamSpec("P")
T = TypeVar("T")

# seconds, about what the compiler takes for a search's loops, once on a machine; with less left,
# functions not yet compiled run in plain Python, or not at all; no measurement is on record
COMPILER_S = 30.0
# what `Solution.cut_short` then says
NOT_COMPILED = "the search was left out, as there was no time to compile it"
_IS_SWITCHED_OFF = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
_LOGGER = logging.getLogger(__name__)


def _is_numba_there() -> bool:
    if _IS_SWITCHED_OFF or importlib.util.find_spec("numba") is None:
        return False

    try:
        importlib.import_module("numba")
    # numba's library needs some 200 MB, more than a limited address space may have left
    except (OSError, ImportError, MemoryError) as error:
        _LOGGER.warning(
            "numba can't be loaded (%s): loops run in plain Python, with far fewer moves",
            str(error).split(".")[0] or type(error).__name__,
        )
        return False
    return True


IS_COMPILED = _is_numba_there()

_is_plain = False  # while a second copy of a module is loaded
# files with compiled functions, and those they import from: callees come before callers
_sources: set[Path] = set()


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Returns `function`, compiled if numba is available; arrays in and out, no Python objects."""
    if not IS_COMPILED or _is_plain:
        _warn_of_plain_python()
        return function
    return _jitted(function, nogil=True)


def inner(function: Callable[P, T]) -> Callable[P, T]:
    """Returns `function`, compiled for calls from compiled functions only; halves compile time.

    It may not create arrays (slices are allowed). That turns off numba's reference counting, which
    took two thirds of the annealing's time.
    """
    return _for_compiled_callers(function)


def copied(function: Callable[P, T]) -> Callable[P, T]:
    """Returns `function` as `inner` does, copied into each of its callers.

    Meant for short functions that are called often: a call passes each array as nine numbers. The
    annealing makes 5 % more moves with it. Copying large functions into several callers makes
    compiling slower.
    """
    return _for_compiled_callers(function, forceinline=True)


def _for_compiled_callers(function: Callable[P, T], **options: bool) -> Callable[P, T]:
    if not IS_COMPILED or _is_plain:
        return function
    return _jitted(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False, **options)


def _jitted(function: Callable[P, T], **options: bool) -> Callable[P, T]:
    """Returns `function` compiled, cached on disk where numba finds a writable folder."""
    njit = importlib.import_module("numba").njit
    try:
        result: Callable[P, T] = njit(cache=True, **options)(function)
    except RuntimeError:  # no writable folder; raised here, before anything is compiled
        _warn_of_no_cache()
        result = njit(**options)(function)

    _sources.update(_files_of(Path(function.__code__.co_filename), function.__module__))
    _drop_stale(result)
    _tell_of_compiling()
    return result


@cache
def _tell_of_compiling() -> None:
    """Announces on stderr and in the log when numba compiles our code: mostly once per machine."""
    event = importlib.import_module("numba.core.event")
    listener = type("Listener", (event.Listener,), {"on_start": _begin, "on_end": _end})()
    event.register("numba:compile", listener)


# one entry per function being compiled; a callee's comes after its caller's
_compiling: list[tuple[ExitStack, float]] = []


def _begin(_: object, event: Any) -> None:
    if _is_ours(event):
        stack = ExitStack()
        stack.enter_context(stage("compiling the search; later runs reuse the compiled code"))
        _compiling.append((stack, time.perf_counter()))


def _end(_: object, event: Any) -> None:
    if _is_ours(event):
        stack, began_s = _compiling.pop()
        stack.close()
        if not _compiling:
            name, took_s = event.data["dispatcher"].py_func.__name__, time.perf_counter() - began_s
            _LOGGER.info("compiled %s in %.1f s; the next process finds it on disk", name, took_s)


def _is_ours(event: Any) -> bool:
    return Path(event.data["dispatcher"].py_func.__code__.co_filename) in _sources


@cache
def _warn_of_plain_python() -> None:
    if not IS_COMPILED:
        _LOGGER.warning(
            "the search runs in plain Python, at a 270th of its speed: %s",
            "unset NUMBA_DISABLE_JIT" if _IS_SWITCHED_OFF else "install or repair numba",
        )


@cache
def _warn_of_no_cache() -> None:
    _LOGGER.warning(
        "no folder for compiled code is writable, so each process compiles for up to %.0f s; "
        "set NUMBA_CACHE_DIR",
        COMPILER_S,
    )


def is_ready(function: Callable[P, T]) -> bool:
    """True where calling `function` does not wait for the compiler.

    It is plain Python, compiled already, or cached on disk.
    """
    if not IS_COMPILED or getattr(function, "nopython_signatures", None):
        return True
    return any(path.suffix == ".nbc" for path in _cached(function))


def in_time(function: Callable[P, T], left_s: float) -> Callable[P, T]:
    """Returns `function`, or its plain Python version where `left_s` is too short to compile it.

    All compiled functions that it calls must be in its own module: a second copy of that module is
    loaded, in which nothing is compiled.
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
    """Returns numba's cache files of `function`; none where it has no folder for them."""
    folder: str | None = function.stats.cache_path  # type: ignore[attr-defined]
    return (
        []
        if folder is None
        else list(
            Path(folder).glob(
                f"{Path(function.__code__.co_filename).stem}.{function.__name__}-*.nb*"
            )
        )
    )


@cache
def _files_of(path: Path, name: str) -> frozenset[Path]:
    """Returns a module's file and those it imports from in its own or the enclosing package.

    Compiled code contains functions and constants of these files. Their modules are already loaded.
    """
    around = name.rsplit(".", 2)[0]
    found = {path}
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue

        imported = f"{name.rpartition('.')[0]}.{node.module}" if node.level == 1 else node.module
        module = sys.modules.get(imported or "")
        if f"{imported}.".startswith(f"{around}.") and module is not None and module.__file__:
            found.add(Path(module.__file__))

    return frozenset(found)


def _drop_stale(function: Callable[P, T]) -> None:
    """Deletes cached code that is older than a source; numba 0.68 checks only a function's file.

    Processes that start together, such as ranks, may do so at the same time.
    """
    newest = max(path.stat().st_mtime for path in _sources)
    for path in _cached(function):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < newest:
                path.unlink()
