"""Step functions: a function as a module; everything it calls is planned as one step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from remat.face.planned_module import PlannedCall
from remat.face.reached_modules import PLAIN, Lookup, Trace, reached_from
from remat.plan.distributed import planned_part, run_around_ddp
from remat.torch_border.modules import get_call, set_call
from remat.torch_border.other_compiles import is_met_by_another_compile, uncompiled


class StepFunction(nn.Module):
    """A function as a module: its children are the modules that the function reaches."""

    function: Callable[..., Any]
    lookups: list[Lookup]  # where variables led to its modules and functions

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        vars(self)["function"] = function  # not registered as a child, even if it is a module
        self.lookups = []

    @classmethod
    def of(cls, function: Callable[..., Any]) -> StepFunction:
        """Returns the step of `function`; its class has the function's name, for messages."""
        whole: Any = function
        while isinstance(whole, functools.partial):
            whole = whole.func
        name = getattr(whole, "__qualname__", type(whole).__name__)
        named: Any = type(name.rpartition("<locals>.")[2], (cls,), {})
        return named(function)  # type: ignore[no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)

    def reach(self, args: Any, kwargs: Any) -> bool:
        """Makes the modules that a call reaches its children; returns True if they changed."""
        found, self.lookups = reached_from(self.function, args, kwargs)
        if found == dict(self.named_children()):
            return False

        for module in found.values():
            planned_part(module)  # refuses what can't be planned
        self._modules.clear()
        for name, module in found.items():
            self.add_module(name, module)
        return True


class PlannedFunction:
    """What `checkpoint` and `wrap` return for a function: a callable with its signature.

    A copy or a pickle of it is the plain function.
    """

    __wrapped__: Callable[..., Any]

    def __init__(self, step: StepFunction) -> None:
        functools.update_wrapper(self, step.function)
        self.step = step
        self._given: Trace | None = None  # of the objects among the last call's arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the planned step, or the plain function under `no_grad`."""
        if is_met_by_another_compile():
            return uncompiled(self, args, kwargs)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        self._reach(args, kwargs)
        return run_around_ddp(self.step, functools.partial(self.step, *args, **kwargs))

    def __repr__(self) -> str:
        return f"<planned {self.__wrapped__!r}>"

    def __get__(self, owner: Any, _: type | None = None) -> Any:
        """Binds it like a function if it is an attribute of a class."""
        return self if owner is None else MethodType(self, owner)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _itself, (self.__wrapped__,)

    def _reach(self, args: Any, kwargs: Any) -> None:
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if not isinstance(x, PLAIN)]
        is_same = self._given is not None and self._given.is_of(leaves)
        if is_same and all(lookup.is_same() for lookup in self.step.lookups):
            return
        call = get_call(self.step)
        if self.step.reach(args, kwargs) and isinstance(call, PlannedCall):
            set_call(self.step, call.anew())
        self._given = Trace.of(leaves)


def as_step(model: Any, args: Any = (), kwargs: Any = None) -> nn.Module:
    """Returns the module to capture: `model` itself, or a new one that calls a function.

    A planned function's own module stays as its calls left it.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, type) or not callable(model):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"a torch.nn.Module or a function is needed, and {given} was given; pass an instance "
            "of a module, or a function that returns the loss"
        )

    step = StepFunction.of(model.__wrapped__ if isinstance(model, PlannedFunction) else model)
    step.reach(args, kwargs)
    return step


def planned_step(model: Any) -> nn.Module | None:
    """Returns a module itself, a planned function's module, or None for a plain function."""
    if isinstance(model, nn.Module):
        return model
    return model.step if isinstance(model, PlannedFunction) else None


def make_plain(owner: Any, name: str) -> None:
    """Puts the plain function back for a planned one among an object's attributes."""
    planned = vars(owner).get(name)
    if isinstance(planned, PlannedFunction):
        del vars(owner)[name]
        if getattr(owner, name, None) != planned.__wrapped__:  # it was not the class's
            vars(owner)[name] = planned.__wrapped__


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
