"""Frames of our own around the composite modules of `torch.nn`, for steps that run in pieces.

Dynamo inlines torch's own files but compiles no frame that begins in one. So if a step is cut
inside of an `nn.TransformerEncoder`, which branches on its mask, all of its layers would run as
plain PyTorch. So would an `nn.Sequential` called in a loop that is left to plain Python. Therefore,
while a step runs, `forward` of such a module begins in a frame of our own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

_LOCK = threading.Lock()
# id of a module -> how many running steps use its frame; steps in several threads may share it
_USERS: Counter[int] = Counter()


class OwnFrames:
    """The composite modules of `torch.nn` inside of a module, and frames for their `forward`."""

    def __init__(self, module: nn.Module) -> None:
        self._frames = [
            (part, MethodType(_frame(), part)) for part in module.modules() if _is_composite(part)
        ]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Makes the modules run through their frames.

        Afterwards the frames are removed, so that the modules can be copied and pickled as before.
        """
        with _LOCK:
            ours = [
                (part, frame)
                for part, frame in self._frames
                if _USERS[id(part)] or "forward" not in vars(part)
            ]
            for part, frame in ours:
                _USERS[id(part)] += 1
                vars(part).setdefault("forward", frame)

        try:
            yield
        finally:
            with _LOCK:
                for part, _ in ours:
                    _USERS[id(part)] -= 1
                    if not _USERS[id(part)]:
                        del _USERS[id(part)], vars(part)["forward"]


def _is_composite(module: nn.Module) -> bool:
    """True for a module of torch's own that calls other modules."""
    forward = getattr(type(module), "forward", None)  # a scripted module's class has none
    is_called = forward is not nn.Module.forward  # a ModuleList never is
    is_torchs = str(getattr(forward, "__module__", "")).startswith("torch.nn.modules.")
    return is_called and is_torchs and next(module.children(), None) is not None


def _frame() -> Callable[..., Any]:
    """Returns a new function each time: dynamo stores what it compiled by code object."""
    namespace: dict[str, Any] = {}
    exec(
        "def forward(self, /, *args, **kwargs):\n    return type(self).forward(self, *args, "
        "**kwargs)",
        namespace,
    )
    return namespace["forward"]  # type: ignore[no-any-return]
