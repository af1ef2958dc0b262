"""Every private name of torch that `remat` touches, in one place, with the versions it was checked with.

Supported: torch 2.11 to 2.15. Each name below was checked with 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import exc as dynamo_exc
from torch._dynamo.backends.common import aot_autograd  # 2.13; "common" since 2.0
from torch._subclasses.fake_tensor import FakeTensorMode  # 2.13

__all__ = [
    "FakeTensorMode",
    "aot_autograd",
    "call_plain",
    "many_recompilations",
    "set_call",
    "unwrap_failure",
]


@contextmanager
def many_recompilations() -> Iterator[None]:
    """Lets one module be compiled for any number of shapes; each has its plan (config names of 2.13)."""
    with dynamo_config.patch(recompile_limit=2**20, accumulated_recompile_limit=2**20):
        yield


def call_plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls `module` as `module(...)` does where it was not compiled (`nn.Module._call_impl`, 2.13)."""
    return module._call_impl(*args, **kwargs)


def set_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Makes `module(...)` run `call`, as `nn.Module.compile` does (`_compiled_call_impl`, 2.13; not pickled)."""
    module._compiled_call_impl = call  # type: ignore[assignment]


def get_call(module: nn.Module) -> Any:
    """Returns what `set_call` set, None where nothing was."""
    return module._compiled_call_impl


def unwrap_failure(error: BaseException) -> BaseException:
    """Returns what a backend raised, out of what dynamo makes of it (`BackendCompilerFailed`, 2.13)."""
    while isinstance(error, dynamo_exc.BackendCompilerFailed):
        error = error.inner_exception
    return error


def is_graph_break(error: BaseException) -> bool:
    """True where dynamo could not capture the step as one graph (`exc.Unsupported` and kin, 2.13)."""
    return isinstance(error, dynamo_exc.TorchDynamoException) and not isinstance(error, dynamo_exc.BackendCompilerFailed)


def compile_reason(module: fx.GraphModule) -> Any:
    """Returns why dynamo ended this graph where it did (`compile_subgraph_reason`, 2.13)."""
    return getattr(module, "compile_subgraph_reason", None)


def is_profiling() -> bool:
    """True where a profiler runs already; a second one can't (`torch.autograd._profiler_enabled`, 2.13)."""
    return bool(torch.autograd._profiler_enabled())


def allocation_events(profiler: torch.profiler.profile) -> list[tuple[int, int]]:
    """Returns (time in ns, bytes allocated or, negative, released) of each event, in order (2.13's event tree)."""
    kind = torch._C._profiler._EventType.Allocation
    found: list[tuple[int, int]] = []
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        if event.tag == kind and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
        pending.extend(event.children)
    return sorted(found, key=lambda item: item[0])
