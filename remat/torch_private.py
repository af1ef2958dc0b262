"""Every private name of torch that `remat` touches, in one place, with the versions it was checked with.

Supported: torch 2.11 to 2.15. Each name below was checked with 2.13.0.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig  # 2.13
from torch._dynamo import config as dynamo_config
from torch._dynamo import exc as dynamo_exc
from torch._dynamo.backends.common import aot_autograd  # 2.13
from torch._functorch import config as functorch_config
from torch._higher_order_ops.associative_scan import associative_scan_op  # 2.13
from torch._ops import OpOverload, OpOverloadPacket  # 2.13
from torch._prims_common import suggest_memory_format  # 2.13
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _BypassDispatchCache  # 2.13
from torch.autograd import _disable_profiler_legacy, _enable_profiler_legacy  # type: ignore[attr-defined]  # 2.13
from torch.fx.experimental import proxy_tensor  # 2.13
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # 2.13
from torch.multiprocessing.reductions import StorageWeakRef  # 2.13
from torch.utils._python_dispatch import _disable_current_modes  # 2.13

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "StorageWeakRef",
    "active_ddp",
    "aot_autograd",
    "at_end_of_backward",
    "autocast_cache_left_on",
    "backward_without_autocast",
    "call_plain",
    "call_with_forward",
    "capture_settings",
    "compile_reason",
    "compile_whole",
    "corrected_fakes",
    "get_call",
    "held_bytes",
    "inductor_compilers",
    "inductor_partitioner",
    "is_associative_scan",
    "is_compiled_node",
    "is_ddp_optimizer_on",
    "is_dense",
    "is_first_fsdp",
    "is_fully_sharded",
    "is_graph_break",
    "is_graph_kept",
    "is_inside_autocast_cast",
    "is_profiling",
    "is_sharded",
    "largest_shape",
    "local_part",
    "rank_store",
    "run_counting_allocations",
    "saved_tensors",
    "sequence_number",
    "set_call",
    "start_counting_allocations",
    "stop_counting_allocations",
    "suggest_memory_format",
    "unwrap_failure",
    "with_kernel",
    "with_python_kernels",
    "without_dynamic_marks",
    "without_leaf_warnings",
    "without_modes",
]


@contextmanager
def capture_settings() -> Iterator[None]:
    """Dynamo's settings for capturing and running a planned step (config names of 2.13).

    One module may be compiled for any number of shapes, each with its plan, and anew where a hook
    came or went. Recurrent networks are captured. Logging is no reason to break a graph: `logger.warning` in a forward says nothing there.
    """
    limits = {"recompile_limit": 2**20, "accumulated_recompile_limit": 2**20, "optimize_ddp": False}
    settings = {**limits, "skip_nnmodule_hook_guards": False, "allow_rnn": True, "ignore_logger_methods": _logging_functions()}
    with dynamo_config.patch(settings):
        yield


def compile_whole(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """Compiles a function as one graph, as `torch.compile(fullgraph=True)` does through `optimize`, but counts no frames (2.13).

    While a function with `fullgraph=True` runs, dynamo counts the frames it compiled and compiles none below them, and has one count for
    all threads: meanwhile steps in pieces would run plain in other threads, and the one that ends the count would make others fail
    ("found no compiled frames").
    """
    context: Any = torch._dynamo.optimize(backend=backend, nopython=True, dynamic=False)
    context.fullgraph = False
    return context(function)  # type: ignore[no-any-return]


@contextmanager
def without_leaf_warnings() -> Iterator[None]:
    """Dynamo looks at `.grad` of what one piece hands to the next, which is no leaf (2.13): no fault of the model's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf", category=UserWarning)
        yield


@contextmanager
def backward_without_autocast() -> Iterator[None]:
    """Traces the backward outside of autocast, as plain PyTorch runs it (`backward_pass_autocast`, 2.13)."""
    with functorch_config.patch(backward_pass_autocast="off"):
        yield


@contextmanager
def autocast_cache_left_on() -> Iterator[None]:
    """Traces the joint graph with autocast's cache on where it is on (`proxy_tensor.disable_autocast_cache`, 2.13)."""
    private: Any = proxy_tensor
    plain = private.disable_autocast_cache
    private.disable_autocast_cache = nullcontext
    try:
        yield
    finally:
        private.disable_autocast_cache = plain


@contextmanager
def with_kernel(operator: OpOverload, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Traces what `make` makes of a composite operator's kernel in its place (`py_kernels`, `_op_dk`, 2.13)."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    before = operator.py_kernels.get(key)
    operator.py_kernels[key] = make(before or partial(operator._op_dk, key))
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        operator.py_kernels.pop(key)
        operator.py_kernels.update({key: before} if before else {})
        operator._dispatch_cache.clear()


def is_inside_autocast_cast(device_type: str) -> bool:
    """True in what autocast itself calls, below its own dispatch key (`_dispatch_tls_is_dispatch_key_excluded`, 2.13)."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")
    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(key))


def inductor_compilers() -> tuple[Any, Any]:
    """Returns Inductor's `compile_fx` and `compile_fx_inner` (2.13), which take seconds to import and warn of torch's own old calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    return compile_fx, compile_fx_inner


def inductor_partitioner(cut: Callable[..., Any]) -> Any:
    """Returns `cut` as Inductor wants it (`CustomPartitionerFn`, 2.13), without a key: Inductor then caches nothing it compiles."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return cut(gm, joint_inputs, **kwargs)

        def uuid(self) -> None:
            return None

    return Partitioner()


def is_associative_scan(node: fx.Node) -> bool:
    """True for the higher-order operator (`associative_scan_op`, 2.13), and for what dynamo makes of a call of it on the CPU.

    There no operator is left of it, and the node only knows the line of the model that made the call.
    """
    return node.target is associative_scan_op or " associative_scan(" in (node.meta.get("stack_trace") or "")


_MARKS = ("_dynamo_dynamic_indices", "_dynamo_dynamic_range", "_dynamo_hint_overrides", "_specialize_on", "_has_dynamo_dim_marking")


def largest_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape with the largest sizes that `mark_dynamic(..., max=...)` declared (2.13); empty where none was."""
    largest = {mark.dim: mark.max for mark in getattr(tensor, "_dynamo_dynamic_range", ()) if mark.max is not None}
    return tuple(largest.get(dim, size) for dim, size in enumerate(tensor.shape)) if largest else ()


@contextmanager
def without_dynamic_marks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hides what `mark_dynamic` noted on tensors (2.13): each shape is captured with its sizes."""
    marked = [(vars(t), name) for t in tensors if hasattr(t, "_dynamo_dynamic_indices") for name in _MARKS if name in vars(t)]
    hidden = [(own, name, own.pop(name)) for own, name in marked]
    try:
        yield
    finally:
        for own, name, value in hidden:
            own[name] = value


def is_dense(tensor: torch.Tensor) -> bool:
    """True where a tensor fills its memory without gaps or overlaps, in any order (`is_non_overlapping_and_dense`, 2.13)."""
    return bool(torch._prims_common.is_non_overlapping_and_dense_or_false(tensor))


def is_graph_kept() -> bool:
    """True inside of a backward with `retain_graph=True` or `create_graph=True` (`_get_current_graph_task_keep_graph`, 2.13)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_fully_sharded(module: nn.Module) -> bool:
    """True for a module that `fully_shard` was called on (2.13)."""
    library = sys.modules.get("torch.distributed.fsdp")
    return library is not None and isinstance(module, library.FSDPModule)


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a tensor of which each rank has a part (`DTensor`, 2.13)."""
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(tensor, library.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank has of a tensor, all of it where it is not sharded (`DTensor._local_tensor`, 2.13)."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def held_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the memory behind a tensor: of a sharded one the largest part that a rank has, so that all ranks agree (`DTensor`, 2.13)."""
    if not is_sharded(tensor):
        return tensor.untyped_storage().nbytes()
    sizes: list[int] = list(tensor.shape)
    for place, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if placement.is_shard():
            sizes[placement.dim] = -(-sizes[placement.dim] // tensor.device_mesh.size(place))  # type: ignore[attr-defined]
    return math.prod(sizes) * tensor.element_size()


def rank_store(prefix: str) -> Any:
    """Returns the key-value store that all ranks share (`_get_default_store`, 2.13)."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    return PrefixStore(prefix, _get_default_store())


def active_ddp() -> nn.Module | None:
    """Returns the `DistributedDataParallel` whose forward runs now (`_get_active_ddp_module`, 2.13)."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-any-return]


def is_ddp_optimizer_on() -> bool:
    """True where dynamo cuts graphs inside of `DistributedDataParallel` along its buckets (`get_optimize_ddp_mode`, 2.13)."""
    return torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"


def is_first_fsdp(module: nn.Module) -> bool:
    """True for `FullyShardedDataParallel`, the first generation (2.13)."""
    library = sys.modules.get("torch.distributed.fsdp")
    return library is not None and isinstance(module, library.FullyShardedDataParallel)


def _logging_functions() -> set[Callable[..., Any]]:
    public = {method for name, method in vars(logging.Logger).items() if callable(method) and not name.startswith("_")}
    return public | {warnings.warn}


def call_plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls `module` as `module(...)` does where it was not compiled (`nn.Module._call_impl`, 2.13)."""
    return module._call_impl(*args, **kwargs)


def call_with_forward(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `module` plainly, hooks and all, with another forward (`nn.Module._call_impl` calls `self.forward`, 2.13)."""
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before


def set_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Makes `module(...)` run `call`, as `nn.Module.compile` does (`_compiled_call_impl`, 2.13; not pickled)."""
    module._compiled_call_impl = call


def get_call(module: nn.Module) -> Any:
    """Returns what `set_call` set, None where nothing was."""
    return module._compiled_call_impl


def unwrap_failure(error: BaseException) -> BaseException:
    """Returns what a backend raised, out of what dynamo makes of it (`BackendCompilerFailed`, 2.13)."""
    while isinstance(error, dynamo_exc.BackendCompilerFailed):
        error = error.inner_exception
    return error


def is_graph_break(error: BaseException) -> bool:
    """True where dynamo could not capture the step as one graph (`exc.Unsupported` and kin, 2.13), or only data can tell what it does."""
    if isinstance(unwrap_failure(error), GuardOnDataDependentSymNode):
        return True
    return isinstance(error, dynamo_exc.TorchDynamoException) and not isinstance(error, dynamo_exc.BackendCompilerFailed)


def compile_reason(module: fx.GraphModule) -> Any:
    """Returns why dynamo ended this graph where it did (`compile_subgraph_reason`, 2.13)."""
    return getattr(module, "compile_subgraph_reason", None)


def is_profiling() -> bool:
    """True where a profiler runs already; a second one can't (`torch.autograd._profiler_enabled`, 2.13)."""
    return bool(torch._C._autograd._profiler_enabled())


@contextmanager
def without_modes() -> Iterator[None]:
    """Runs what is inside for real where fake tensors are traced around it (`_disable_current_modes`, 2.13)."""
    with _disable_current_modes():
        yield


@contextmanager
def with_python_kernels(kept: Set[OpOverload], wrapped: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """Traces torch's own kernels where Python ones stand in their place (`OpOverload.py_kernels`, 2.13).

    Args:
        kept: operators whose Python kernels stay.
        wrapped: operator -> what makes another kernel of its Python kernel.
    """
    keys = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
    packets = [packet for packet in vars(torch.ops.aten).values() if isinstance(packet, OpOverloadPacket)]
    operators = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    before = {operator: dict(operator.py_kernels) for operator in operators if any(key in operator.py_kernels for key in keys)}
    try:
        for operator, kernels in before.items():
            for key in keys:
                if key in kernels and operator in wrapped:
                    operator.py_kernels[key] = wrapped[operator](kernels[key])
                elif operator not in kept:
                    operator.py_kernels.pop(key, None)
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernels in before.items():
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


@contextmanager
def corrected_fakes(layouts: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """Gives the results of some operators on fake tensors another layout (`FakeTensorMode.dispatch`, 2.13).

    What lies in more memory than it reads is not taken from the cache of fake tensors, which forgets how much that was.

    Args:
        layouts: operator -> function of its result and its arguments that returns the result to take instead.
    """
    plain: Any = FakeTensorMode.dispatch

    def corrected(self: Any, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = plain(self, func, types, args, kwargs or {})
        if func not in layouts:
            return result
        with self:
            return layouts[func](result, *args, **(kwargs or {}))

    def validated(self: Any, state: Any, key: Any, func: OpOverload, args: Any, kwargs: Any, output: Any) -> None:
        validate(self, state, key, func, args, kwargs, output)
        if isinstance(output, torch.Tensor) and not func.is_view and _has_slack(output):
            raise _BypassDispatchCache("more memory than is read")

    patched: Any = FakeTensorMode
    validate = patched._validate_output_for_cache_entry
    patched.cache_clear()
    patched.dispatch, patched._validate_output_for_cache_entry = corrected, validated
    try:
        yield
    finally:
        patched.dispatch, patched._validate_output_for_cache_entry = plain, validate


def _has_slack(tensor: torch.Tensor) -> bool:
    if not all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride())):  # known at run time only
        return False
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(tensor.numel() and tensor.untyped_storage().nbytes() > (last + 1) * tensor.itemsize)


def run_counting_allocations(fn: Callable[[], Any]) -> tuple[Any, list[tuple[float, int]]]:
    """Runs `fn` and returns its result, and what was allocated as `stop_counting_allocations` does."""
    start_counting_allocations()
    try:
        result = fn()
    finally:
        found = stop_counting_allocations()
    return result, found


def start_counting_allocations() -> None:
    """Counts every allocation of this thread on the CPU from here on.

    The event profiler of torch's first years (`_enable_profiler_legacy`, 2.13): unlike the present one
    it says nothing on stderr, and starts in microseconds. What is released is seen where its allocation was.
    """
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))


def stop_counting_allocations() -> list[tuple[float, int]]:
    """Returns (seconds since the start, bytes allocated or, negative, released) in order."""
    threads = _disable_profiler_legacy()
    start = next(record for records in threads for record in records if record.name() == "__start_profile")
    found = [
        (start.cpu_elapsed_us(record) / 1e6, int(record.cpu_memory_usage()))
        for records in threads
        for record in records
        if str(record.kind()) == "memory_alloc" and record.cpu_memory_usage()
    ]
    return found if len(threads) == 1 else sorted(found, key=lambda item: item[0])


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` once the backward that runs is over, as DDP and FSDP2 do (`queue_callback`, 2.13)."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def sequence_number(node: Any) -> int:
    """The place of an autograd node in the order of the forward (`Node._sequence_nr`, 2.13)."""
    return int(node._sequence_nr())


def is_compiled_node(node: Any) -> bool:
    """True for the autograd node of a piece that AOTAutograd compiled (`CompiledFunction`, 2.13)."""
    return hasattr(node, "_aot_id") or type(node).__name__ == "CompiledFunctionBackward"


def saved_tensors(node: Any) -> list[torch.Tensor]:
    """Returns the tensors that an autograd node keeps for its backward (attributes `_saved_*`, 2.13)."""
    found: list[torch.Tensor] = []
    for name in dir(node):
        if name == "saved_tensors" or (name.startswith("_saved_") and not name.startswith("_saved_tensors")):
            value = getattr(node, name)
            found += [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, torch.Tensor)]
    return [tensor for tensor in found if tensor.layout == torch.strided]
