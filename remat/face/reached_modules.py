"""Finds the modules that a function calls, without running it.

They are found in its closure, defaults and bound object, in the arguments of a `functools.partial`,
in its own arguments, and among the globals and attributes that its code names. The user's functions
that it calls are searched in the same way. Functions of installed libraries are skipped, except for
the library that the function itself belongs to.
"""

from __future__ import annotations

import functools
import inspect
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

# names that a module which calls a function has already
_RESERVED = {"function", "of", "reach", *dir(nn.Module())}
_MOST_ITEMS = 1000  # in a container that is searched; a longer one is taken for data
_INSTALLED = tuple(sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib"))
_MOST_WATCHED = 100  # in a container that is compared at each call
# what leads to no module
PLAIN = (
    torch.Tensor, str, bytes, int, float, complex, type(None), torch.device, torch.dtype,
    torch.Generator, np.ndarray, np.generic, PurePath,
)  # fmt: skip


def reached_modules(function: Any, args: Any = (), kwargs: Any = None) -> dict[str, nn.Module]:
    """Returns name -> module for the outermost modules that a call of `function` reaches.

    A module that can be found only by running the function, such as an entry of a library's
    registry, is missed.

    >>> import functools
    >>> model = nn.Linear(2, 1)
    >>> reached_modules(lambda x: model(x).sum())
    {'model': Linear(in_features=2, out_features=1, bias=True)}
    """
    return reached_from(function, args, kwargs)[0]


@dataclass(frozen=True)
class Lookup:
    """Where something was found that led to a module, or may lead to one.

    Attributes:
        home: returns the dictionary or the cell in which it was; None once its owner is gone.
        name: under which it was in the dictionary.
        trace: what was there, without keeping it alive.
    """

    home: Callable[[], Any]
    name: str
    trace: Trace

    def is_same(self) -> bool:
        """False once something else is there, or in a container that is there."""
        return self.trace.is_of(_found_in(self.home(), self.name))


@dataclass(frozen=True)
class Trace:
    """Recognises what a value leads to, without keeping that alive.

    Attributes:
        found: weak references to the value itself, or to the objects in a container.
    """

    found: tuple[Callable[[], Any], ...]

    @classmethod
    def of(cls, value: Any) -> Trace:
        """Returns the trace of a value."""
        return cls(tuple(map(_referring_to, _objects_in(value))))

    def is_of(self, value: Any) -> bool:
        """False for another object, and for a container of others."""
        now = _objects_in(value)
        return len(now) == len(self.found) and all(
            item is found() for item, found in zip(now, self.found, strict=True)
        )


def reached_from(
    function: Any, args: Any = (), kwargs: Any = None
) -> tuple[dict[str, nn.Module], list[Lookup]]:
    """Returns the modules as `reached_modules` does, and where variables led to them."""
    walk = _Walk(_library_of(inspect.unwrap(function)))
    walk.look(function, "function")
    walk.look(list(args), "argument")
    walk.look(dict(kwargs or {}), "argument")
    walk.follow_names()
    return walk.found, walk.lookups


class _Walk:
    """Walks from a function to the objects that it refers to, each once."""

    def __init__(self, library: str) -> None:
        self.found: dict[str, nn.Module] = {}
        self.lookups: list[Lookup] = []
        self._own_library = library
        self._seen: dict[int, Any] = {}  # by id, which is unique while the object exists
        self._names: dict[str, None] = {}  # of globals and attributes in the code seen so far
        self._objects: list[Any] = []  # objects whose attributes may have these names

    def look(self, value: Any, name: str) -> None:
        """Looks into `value`, which was found under `name`."""
        if isinstance(value, MethodType):
            self.look(value.__self__, "self")
            self.look(value.__func__, name)
        if isinstance(value, (MethodType, *PLAIN)) or id(value) in self._seen:
            return

        self._seen[id(value)] = value

        if isinstance(value, nn.Module):
            self._add(name, value)
        elif isinstance(value, FunctionType):
            self._look_into(value, name)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.look(part, name)
        elif isinstance(value, list | tuple | set | frozenset | Mapping):
            for key, item in _items(value):
                self.look(item, f"{name}_{key}")
        elif not _is_torchs(value):
            self._objects.append(value)
            self.look(inspect.getattr_static(value, "__call__", None), name)

    def follow_names(self) -> None:
        """Looks up the names in the code among the attributes of the objects found."""
        tried: set[tuple[int, str]] = set()
        while True:
            waiting = [
                (owner, name)
                for owner in self._objects
                for name in self._names
                if (id(owner), name) not in tried
            ]
            if not waiting:
                return

            for owner, name in waiting:
                tried.add((id(owner), name))
                self._look_up(_attributes_of(owner), _attribute(owner, name), name)

    def _add(self, name: str, module: nn.Module) -> None:
        free = name.replace(".", "_")
        while free in self.found or free in _RESERVED:
            free += "_"
        self.found[free] = module
        self._objects.append(module)

    def _look_up(self, home: Callable[[], Any], value: Any, name: str) -> None:
        """Looks into a value, and notes where it was found if it may lead to a module."""
        is_there = _found_in(home(), name) is value
        if is_there and not isinstance(value, (*PLAIN, ModuleType, type)):
            self.lookups.append(Lookup(home, name, Trace.of(value)))
        self.look(value, name)

    def _look_into(self, function: FunctionType, name: str) -> None:
        # a decorator's wrapper says that it is the user's, but its code is the library's
        self.look(getattr(function, "__wrapped__", None), name)
        if _is_torchs(function) or _library_of(function) not in ("", self._own_library):
            return
        names = list(_names_in(function.__code__))
        self._names |= dict.fromkeys(names)

        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._look_up(partial(_itself, cell), _contents(cell), name)
        variables = function.__globals__
        for name in names:
            self._look_up(partial(_itself, variables), variables.get(name), name)
        for name, value in (function.__kwdefaults__ or {}).items():
            self.look(value, name)
        self.look(function.__defaults__, "default")


def _names_in(code: CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes in a function and in its inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _items(container: Any) -> list[tuple[Any, Any]]:
    if len(container) > _MOST_ITEMS:
        return []
    return list(container.items() if isinstance(container, Mapping) else enumerate(container))


def _objects_in(value: Any, depth: int = 3) -> list[Any]:
    """Returns what may lead to modules: a value itself, or what is in it to a small depth.

    Containers with many items are taken for data, and those of other types count as they are.
    """
    if isinstance(value, PLAIN):
        return []
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if type(value) not in (list, tuple, set, frozenset, dict):
        return [value]
    if len(value) > _MOST_WATCHED or not depth:
        return []
    items = value.values() if isinstance(value, dict) else value
    return [inner for item in list(items) for inner in _objects_in(item, depth - 1)]


def _referring_to(value: Any) -> Callable[[], Any]:
    """Returns a weak reference; where there can be none, what is never the same."""
    try:
        return weakref.ref(value)
    except TypeError:
        return object


def _found_in(home: Any, name: str) -> Any:
    """Returns what is in a cell, or under a name of a dictionary; None where there is nothing."""
    return _contents(home) if isinstance(home, CellType) else (home or {}).get(name)


def _attributes_of(owner: Any) -> Callable[[], Any]:
    """Returns what gives the attributes of an object, without keeping it alive."""
    try:
        refer = weakref.ref(owner)
    except TypeError:
        return lambda: None
    return lambda: getattr(refer(), "__dict__", None)


def _itself(value: Any) -> Any:
    return value


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later, or never
        return None


def _attribute(owner: Any, name: str) -> Any:
    """Returns `owner.name` without running code; for a property, the function behind it."""
    own = getattr(owner, "__dict__", {})
    if name in own or isinstance(owner, ModuleType):
        return own.get(name)
    found = inspect.getattr_static(owner, name, None)
    if isinstance(found, property):
        return found.fget
    return getattr(owner, name, None) if inspect.ismemberdescriptor(found) else found


def _library_of(function: Any) -> str:
    """Returns the installed library that a function belongs to; empty for the user's own."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    home = next((h for h in _INSTALLED if code and code.co_filename.startswith(h)), None)
    if code is None or home is None:
        return ""
    return Path(code.co_filename).relative_to(home).parts[0].removesuffix(".py")


def _is_torchs(value: Any) -> bool:
    """True for objects of torch itself and builtins, which refer to no user objects."""
    is_named = isinstance(value, FunctionType | type)
    home = value.__name__ if isinstance(value, ModuleType) else (value if is_named else type(value))
    return str(getattr(home, "__module__", home)).split(".")[0] in ("torch", "builtins")
