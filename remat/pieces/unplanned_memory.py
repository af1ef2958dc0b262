"""Memory that a step holds outside of its captured graphs.

This is the module's own tensors and gradients, and the autograd graph of eager operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from remat.core.operators import Value, ValueKind
from remat.plan.distributed import bucket_bytes
from remat.torch_border.layouts import dense_parts
from remat.torch_border.sharded import held_bytes, local_part
from remat.tracers.retarget import allocated_bytes


def resident_values(module: nn.Module, inputs: Iterable[Any], kind: str) -> dict[int, Value]:
    """Returns storage -> value of a module's parameters, buffers and arguments.

    The values of tensors on devices of another type than `kind` have a size of 0.
    """
    named = [
        *(
            (name, p, ValueKind.PARAMETER if p.requires_grad else ValueKind.BUFFER)
            for name, p in module.named_parameters()
        ),
        *((name, tensor, ValueKind.BUFFER) for name, tensor in module.named_buffers()),
        *((f"input_{i}", tensor, ValueKind.INPUT) for i, tensor in enumerate(inputs)),
    ]

    found: dict[int, Value] = {}
    for name, tensor, value_kind in named:
        for part in dense_parts(tensor):
            is_counted = part.device.type == kind
            size_bytes = allocated_bytes(held_bytes(part), kind) if is_counted else 0
            dtype = str(part.dtype).removeprefix("torch.")
            storage = local_part(part).untyped_storage()
            found.setdefault(
                storage._cdata, Value(name, size_bytes, value_kind, tuple(part.shape), dtype)
            )

    return found


def there_bytes(module: nn.Module, inputs: Iterable[Any], kind: str) -> int:
    """Returns the bytes of a step's tensors that exist before it runs, on devices of type `kind`.

    These are parameters, buffers, inputs, gradients and DDP's buckets.
    """
    resident = resident_values(module, inputs, kind).values()
    return sum(v.size_bytes for v in resident) + gradient_bytes(module, kind) + bucket_bytes()


def gradient_bytes(module: nn.Module, kind: str, inputs: Sequence[torch.Tensor] = ()) -> int:
    """Returns the bytes of the gradients of parameters and inputs on devices of type `kind`.

    Gradients in DDP's buckets are left out: the buckets are counted separately.
    """
    found: dict[int, int] = {}
    leaves = (*module.parameters(), *(tensor for tensor in inputs if tensor.is_leaf))
    for leaf in leaves:
        for gradient in dense_parts(leaf.grad) if leaf.grad is not None else ():
            storage = local_part(gradient).untyped_storage()
            is_alone = storage.nbytes() == local_part(gradient).nbytes
            if gradient.device.type == kind and (is_alone or not bucket_bytes()):
                found[storage._cdata] = allocated_bytes(held_bytes(gradient), kind)
    return sum(found.values())


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Returns the tensors in what a model returned.

    It looks into containers, and into the attributes of objects in them.
    """
    found = []
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            found += [
                inner
                for inner in pytree.tree_leaves(dict(vars(leaf)))
                if isinstance(inner, torch.Tensor)
            ]
    return found


def autograd_nodes(results: Iterable[torch.Tensor], inputs: Iterable[Any]) -> Iterator[Any]:
    """Yields the nodes of the autograd graph between a forward's results and its inputs.

    Leaves, and the nodes that made the inputs, are left out.
    """
    seen: set[Any] = {t.grad_fn for t in inputs if isinstance(t, torch.Tensor)} | {None}
    waiting: list[Any] = [t.grad_fn for t in results]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue

        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions]
        if not hasattr(node, "variable"):
            yield node
