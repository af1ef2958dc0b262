"""Removes hooks that only make a module's results require gradients, while a planned step runs.

Reentrant `torch.utils.checkpoint` trains nothing if none of its inputs requires a gradient, so
`transformers` and PEFT put such a hook on the embeddings of a model with checkpointing enabled. A
planned step recomputes by its plan and does not need it. The hook would cut the step in two (dynamo
does not capture `requires_grad_` of an intermediate value), and compute gradients that nobody
reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from remat.torch_border.modules import forward_hooks


class IdleHooks:
    """Hooks of a module's parts that do nothing but call `requires_grad_`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._registered = -1  # number of hooks registered in the process at the last search
        self._found: list[dict[int, Any]] = []

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Removes the hooks inside of a `with` block, and restores them in their order."""
        with _LOCK:
            mine = self._hooks()
            for hooks in mine:
                count, before = _USERS.get(id(hooks), (0, dict(hooks)))
                _USERS[id(hooks)] = count + 1, before
                for number in filter(lambda number: _only_asks(before[number]), before):
                    hooks.pop(number, None)

        try:
            yield
        finally:
            with _LOCK:
                for hooks in mine:
                    count, before = _USERS.pop(id(hooks))
                    if count > 1:
                        _USERS[id(hooks)] = count - 1, before
                    else:
                        _put_back(hooks, before)

    def _hooks(self) -> list[dict[int, Any]]:
        if self._registered != RemovableHandle.next_id:
            self._registered = RemovableHandle.next_id
            every = map(forward_hooks, self._module.modules())
            self._found = [hooks for hooks in every if any(map(_only_asks, _all_of(hooks)))]
        return self._found


_LOCK = threading.Lock()
# id of a module's hooks -> how many running steps removed some, and all hooks before; steps in
# several threads may share a module
_USERS: dict[int, tuple[int, dict[int, Any]]] = {}


def _all_of(hooks: dict[int, Any]) -> list[Any]:
    """Returns a module's hooks, with those that a running step removed."""
    _, before = _USERS.get(id(hooks), (0, {}))
    return [*hooks.values(), *before.values()]


def _put_back(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    """Restores the removed hooks in their order; the module may have lost or got others since."""
    now = dict(hooks)
    hooks.clear()
    hooks.update({n: hook for n, hook in before.items() if n in now or _only_asks(hook)})
    hooks.update(now)


def _only_asks(hook: Callable[..., Any]) -> bool:
    """True for a Python function of (module, args, result) that only calls `requires_grad_`."""
    code = getattr(hook, "__code__", None)
    return (
        code is not None
        and code.co_argcount == 3
        and code.co_names == ("requires_grad_",)
        and not code.co_freevars
    )
