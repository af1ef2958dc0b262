"""Imports and calls factories of models, given as `MODULE:CALLABLE` or `FILE.py:CALLABLE`.

A factory returns a model; (model, args); (model, args, kwargs); or (model, batch), where batch is a
dict of keyword inputs. A step function, which calls everything that belongs to a step, may take the
model's place.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from sysconfig import get_path
from types import ModuleType
from typing import Any

from remat.cli.arguments import Refused
from remat.core.errors import RematError

_OUR_FOLDER = Path(__file__).parents[1]
_HOW = (
    "return a model, (model, args), (model, args, kwargs) or (model, batch) with a dict of "
    "keywords; a step function may take the model's place"
)

FACTORY_HELP = (
    "MODULE:CALLABLE or FILE.py:CALLABLE. It returns a model, (model, args), "
    "(model, args, kwargs), or (model, batch) with a dict of keywords; a step function may take "
    "the model's place."
)


class FactoryFailed(Refused):
    """The user's code failed; the message is its error and the line that raised it."""


@dataclass(frozen=True)
class Made:
    """A model and its inputs.

    Attributes:
        model: a module, or a step function.
        args: its inputs.
        kwargs: its keyword inputs.
    """

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def made_by(factory: str) -> Made:
    """Calls a factory and returns its model and inputs.

    Raises:
        Refused: there is no such factory, or its result can't be used.
        FactoryFailed: its code raised.
    """
    module_name, _, name = factory.rpartition(":")
    if not (module_name and name):
        raise Refused(
            f"{factory!r} is not of the form MODULE:CALLABLE or FILE.py:CALLABLE, such as "
            "my_project.model:make or train.py:make"
        )

    with own_errors(factory):
        module = _file(module_name) if module_name.endswith(".py") else _module(module_name)
    make: Any = getattr(module, name, None)
    if not callable(make):
        raise Refused(f"{factory}: {module_name} has no callable {name!r}")

    _check_call(factory, make)
    with own_errors(factory):
        result = make()
    made = _understood(factory, result)

    _check_call(
        f"what {factory} returned",
        getattr(made.model, "forward", made.model),
        made.args,
        made.kwargs,
    )
    return made


def _module(name: str) -> ModuleType:
    sys.path.insert(0, "")  # the script `remat` does not search the working folder
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as reason:
        if reason.name is None or not f"{name}.".startswith(f"{reason.name}."):
            raise
        raise Refused(f"there is no module {reason.name!r}; for a file write {name}.py") from None


def _file(name: str) -> ModuleType:
    """Imports a file; it can import its neighbours, as when it is run as a script."""
    path = Path(name)
    if not path.is_file():
        raise Refused(f"there is no file {name}")

    sys.path.insert(0, str(path.resolve().parent))
    stem = path.stem if path.stem not in sys.modules else f"factory_in_{path.stem}"
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def own_errors(factory: str) -> Iterator[None]:
    """Turns errors of the user's code into `FactoryFailed`, with the line that raised them."""
    try:
        yield
    except Refused as reason:
        raise Refused(f"{factory}: {reason}") from None
    # anything may be raised here; a script that parses arguments raises SystemExit
    except (Exception, SystemExit) as error:  # noqa: BLE001
        raise FactoryFailed(f"{factory} failed: {_in_a_few_lines(error)}") from None


@contextmanager
def own_step(factory: str) -> Iterator[None]:
    """Turns errors that the user's step raises while it is traced into `FactoryFailed`.

    A `ValueError` or `TypeError` from remat or torch becomes `Refused`; their other errors are
    raised unchanged.
    """
    try:
        yield
    except RematError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if (
            not Path(last.filename).is_relative_to(_OUR_FOLDER)
            and "torch" not in Path(last.filename).parts
        ):
            raise FactoryFailed(f"the step of {factory} failed: {_in_a_few_lines(error)}") from None

        if isinstance(error, ValueError | TypeError):
            raise Refused(str(error)) from None
        raise


def _in_a_few_lines(error: BaseException) -> str:
    """Returns the error, and the innermost line outside of installed packages."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _is_installed(f.filename)]
    if not (own or frames):
        return text

    last = (own or frames)[-1]
    return f"{text}\n  {last.filename}:{last.lineno}, in {last.name}\n    {last.line}"


def _is_installed(filename: str) -> bool:
    path = Path(filename)
    is_library = "site-packages" in path.parts or path.is_relative_to(get_path("stdlib"))
    return path.is_relative_to(_OUR_FOLDER) or filename.startswith("<") or is_library


def _understood(factory: str, result: Any) -> Made:
    """Returns the model and inputs in a factory's result, which may have several forms."""
    if callable(result):
        return Made(result)
    if not isinstance(result, tuple | list) or not 1 <= len(result) <= 3 or not callable(result[0]):
        raise Refused(f"{factory} returned {_named(result)}; {_HOW}")

    model, *given = result
    if len(given) == 1 and isinstance(given[0], Mapping):
        return Made(model, (), dict(given[0]))
    args = given[0] if given else ()
    kwargs = given[1] if len(given) == 2 else {}

    if not isinstance(args, tuple | list):
        raise Refused(
            f"{factory} returned (model, {_named(args)}); the inputs must be a tuple, even a "
            f"single one: (model, (x,)); {_HOW}"
        )
    if not isinstance(kwargs, Mapping):
        raise Refused(f"{factory} returned {_named(kwargs)} as the keywords; {_HOW}")
    return Made(model, tuple(args), dict(kwargs))


def _named(value: Any) -> str:
    """Returns the type of a value for a message; for a tuple, the types of its items."""
    if isinstance(value, tuple | list):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return f"a {type(value).__name__}" if value is not None else "nothing"


def _check_call(
    what: str, function: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> None:
    """Refuses a call with arguments that the function does not take."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # builtins may have no signature
        return

    try:
        signature.bind(*args, **(kwargs or {}))
    except TypeError as reason:
        given = f"{len(args)} inputs and {len(kwargs or {})} keywords"
        raise Refused(
            f"{what} can't be called with {given}: {reason}; it takes {signature}; {_HOW}"
            if kwargs is not None
            else f"{what} takes {signature}, but it is called without arguments: {reason}"
        ) from None
