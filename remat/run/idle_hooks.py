"""Hooks that only ask for gradients of what a module returns, which a planned step does without.

Reentrant `torch.utils.checkpoint` trains nothing where none of its inputs requires a gradient, so
`transformers` and PEFT hook the embeddings of a model whose checkpointing is enabled. A planned
step recomputes by its plan. The hook would cut it in two (dynamo captures no `requires_grad_` of a
value in between), and compute gradients that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from remat.torch_border.modules import forward_hooks


class IdleHooks:
    """The hooks of a module's parts that do nothing else."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._registered = -1  # how many hooks there had been anywhere, when they were looked for
        self._found: list[dict[int, Any]] = []

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Takes the hooks away, and puts them back in their places."""
        before = [(hooks, dict(hooks)) for hooks in self._hooks()]
        for hooks, _ in before:
            for number in [number for number, hook in hooks.items() if _only_asks(hook)]:
                del hooks[number]
        try:
            yield
        finally:
            for hooks, all_of_them in before:
                hooks.clear()
                hooks.update(all_of_them)

    def _hooks(self) -> list[dict[int, Any]]:
        if self._registered != RemovableHandle.next_id:
            self._registered = RemovableHandle.next_id
            every = map(forward_hooks, self._module.modules())
            self._found = [hooks for hooks in every if any(map(_only_asks, hooks.values()))]
        return self._found


def _only_asks(hook: Callable[..., Any]) -> bool:
    """True for a Python function of (module, arguments, result) that calls nothing but
    `requires_grad_`.
    """
    code = getattr(hook, "__code__", None)
    return (
        code is not None
        and code.co_argcount == 3
        and code.co_names == ("requires_grad_",)
        and not code.co_freevars
    )
