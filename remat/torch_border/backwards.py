"""Private names of torch's autograd for intercepting a whole backward: its call, its nodes.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import compiled_autograd  # 2.13
from torch.utils import _pytree as pytree

Around = Callable[[Sequence[Any], Sequence[Any], Callable[[], Any]], Any]


def watch_backwards(around: Around) -> None:
    """Makes each backward called from Python run inside of `around(roots, gradients, run)`.

    `torch.autograd.backward` and `grad` call the engine through a function of their module
    (`_engine_run_backward`, 2.13), which is replaced until nothing watches any more.
    """
    private: Any = torch.autograd
    if not isinstance(private._engine_run_backward, _Watched):
        private._engine_run_backward = _Watched(private._engine_run_backward)
    if around not in private._engine_run_backward.arounds:
        private._engine_run_backward.arounds += (around,)


def stop_watching_backwards(around: Around) -> None:
    """Undoes `watch_backwards(around)`; restores torch's own function if nothing else watches.

    If other code replaced it since, that replacement stays, and still calls ours.
    """
    private: Any = torch.autograd
    watched = private._engine_run_backward
    if isinstance(watched, _Watched):
        watched.arounds = tuple(other for other in watched.arounds if other != around)
        if not watched.arounds:
            private._engine_run_backward = watched.plain


class _Watched:
    """What `torch.autograd` calls in place of the engine."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain = plain
        self.arounds: tuple[Around, ...] = ()

    def __call__(
        self, roots: Sequence[Any], gradients: Sequence[Any] = (), *args: Any, **kwargs: Any
    ) -> Any:
        run: Callable[[], Any] = partial(self.plain, roots, gradients, *args, **kwargs)
        for around in self.arounds:
            run = partial(around, roots, gradients, run)
        return run()


def is_in_backward() -> bool:
    """True inside of a backward (`_current_graph_task_id`, 2.13)."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_compiled_autograd_on() -> bool:
    """True where backwards are captured with their hooks (`compiled_autograd_enabled`, 2.13)."""
    return bool(compiled_autograd.compiled_autograd_enabled)


def nodes_behind(roots: Iterable[Any]) -> Iterator[Any]:
    """Yields the nodes that a backward from `roots` (tensors or edges of the graph) may run."""
    waiting: list[Any] = [
        root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots
    ]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions]
            yield node


def compiled_class(node: Any) -> type | None:
    """Returns the class of a compiled node; None for other nodes.

    AOTAutograd makes one class for each graph that it compiles (`_forward_cls`, 2.13).
    """
    found = getattr(node, "_forward_cls", None)
    return found if isinstance(found, type) and hasattr(found, "compiled_fw") else None


def held_tensors(node: Any) -> list[torch.Tensor]:
    """Returns the tensors that a node holds for its backward.

    What hooks packed is not unpacked, since that may compute something (`_raw_saved_*`,
    `SavedTensor.data`, 2.13). A node whose backward ran holds nothing.
    """
    found: list[Any] = list(getattr(node, "__dict__", {}).values())
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                saved = getattr(node, name)
                entries = saved if isinstance(saved, list | tuple) else [saved]
                found += [entry.data for entry in entries]
            except RuntimeError:  # freed, or packed by hooks in C++
                continue
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def is_parameter(tensor: torch.Tensor) -> bool:
    """True for a module's parameter, or a view of one (`Tensor._base`, 2.13)."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
