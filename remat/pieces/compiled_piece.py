"""A compiled piece, as AOTAutograd and autograd see it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.run.executor import BoxedFunction
from remat.run.hooked_results import watch_hooks
from remat.run.whole_step import note_planned
from remat.torch_border.autograd import is_compiled_node, node_of_step
from remat.torch_border.sharded import is_sharded


def boxed(call: BoxedFunction) -> BoxedFunction:
    """Returns a half to which AOTAutograd passes its inputs in a list."""

    def run(args: list[Any]) -> Any:
        return call(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def released(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a call of a method that does not keep its object alive.

    Dynamo never releases what it compiled. A backward keeps its own `Piecewise` (`as_part_of`).
    """
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = found()
        assert bound is not None, "a piece runs while its module does"
        return bound(*args)

    return call


def as_part_of(owner: Any, compiled: Callable[..., Any], read: Sequence[int]) -> Callable[..., Any]:
    """Returns a compiled piece that tells its `owner`, a `Piecewise`, what the caller gets.

    Its backward gets None for results without a gradient, for which autograd would give it zeros.
    Its autograd nodes are noted as part of the owner's plan. `read` are the places of results that
    must not be hooked (`watch_hooks`).
    """
    planned = weakref.ref(owner)

    def run(*args: Any) -> Any:
        results = compiled(*args)
        running = planned()
        assert running is not None, "a piece runs while its module does"
        if (own_node := node_of_step(results)) is not None:
            own_node.planned_by = running  # for the backward, which may outlive the module
        # AOTAutograd wraps the gradients of sharded arguments, and expects all of them
        if not any(is_sharded(arg) for arg in args):
            nodes: set[Any] = {
                result.grad_fn for result in results if isinstance(result, torch.Tensor)
            }
            for node in nodes:
                if node is not None and is_compiled_node(node):
                    node.set_materialize_grads(False)
                    note_planned(node, planned)

        watch_hooks(results, read)
        running.returned([result for result in results if not is_sharded(result)])
        return results

    return torch.compiler.disable(run, reason="it calls compiled code")  # type: ignore[no-any-return]
