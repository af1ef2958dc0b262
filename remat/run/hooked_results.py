"""Results whose whole gradient plain PyTorch computes, and a planned step does not.

In plain PyTorch, the gradient of a loss flows through the hidden states that were returned beside
it. A planned step returns both from one autograd node, so a hidden state gets only the gradients
that arrive for it from outside. Asking for more, by `retain_grad` or a hook, is an error.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from remat.core.errors import TraceError
from remat.torch_border.allocator import abandon_node
from remat.torch_border.autograd import current_node, node_of_step

# their hooks on what a model returns start work at the backward; they don't read gradients
_LIBRARIES = frozenset({
    "torch", "lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "deepspeed",
})  # fmt: skip
_READ = "_remat_read_results"  # attribute of an autograd node: weak references to results


def results_read_by_others(module: fx.GraphModule) -> tuple[int, ...]:
    """Returns the places of the results from which another result with a gradient is computed."""
    results = module.graph.output_node().args[0]
    assert isinstance(results, list | tuple)
    nodes = [node for node in results if isinstance(node, fx.Node) and _has_gradient(node)]
    if len(nodes) < 2:
        return ()

    every = (source for node in nodes for source in node.all_input_nodes)
    waiting = list(set(filter(_passes_gradients, every)))
    read = set(waiting)
    while waiting:
        sources = filter(_passes_gradients, waiting.pop().all_input_nodes)
        fresh = {source for source in sources if source not in read}
        read |= fresh
        waiting += fresh
    return tuple(place for place, node in enumerate(results) if node in nodes and node in read)


def watch_hooks(results: Sequence[Any], places: Sequence[int]) -> None:
    """Makes the backward of these results notice hooks on those at `places`."""
    if places and (node := node_of_step(results)) is not None:
        setattr(node, _READ, [weakref.ref(results[place]) for place in places])


def refuse_hooked_results() -> None:
    """Raises `TraceError` in a backward whose gradients a result was asked to keep, or to hook."""
    read = (result() for result in getattr(current_node(), _READ, ()))
    hooked = next((each for each in read if each is not None and _is_hooked(each)), None)
    if hooked is not None:
        abandon_node()
        raise TraceError(
            f"retain_grad() or a hook was put on a result of shape {tuple(hooked.shape)}, from "
            "which the planned step computes another result: its gradient exists only inside of "
            "the step. Register a hook on a tensor inside of the model, compute the loss outside "
            "of the planned call, or use remat.unwrap(model)"
        )


def _passes_gradients(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return not isinstance(value, torch.Tensor) or value.requires_grad


def _has_gradient(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad and node.op != "placeholder"


def _is_hooked(result: torch.Tensor) -> bool:
    """True for the user's hooks; a library's, such as FSDP's, only ask when a gradient arrives."""
    return result.retains_grad or any(map(_is_users, (result._backward_hooks or {}).values()))


def _is_users(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).split(".")[0] not in _LIBRARIES
