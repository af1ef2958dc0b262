"""Private names of Inductor.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import fx


def inductor_compilers() -> tuple[Any, Any]:
    """Returns Inductor's `compile_fx` and `compile_fx_inner` (2.13), which take seconds to import
    and warn of torch's own old calls.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    return compile_fx, compile_fx_inner


def inductor_partitioner(cut: Callable[..., Any]) -> Any:
    """Returns `cut` as Inductor wants it (`CustomPartitionerFn`, 2.13), without a key.

    Inductor then caches nothing it compiles.
    """
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return cut(gm, joint_inputs, **kwargs)

        def uuid(self) -> None:
            return None

    return Partitioner()
