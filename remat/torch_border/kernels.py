"""Private names of torch's operators: their Python kernels, fake tensors and layouts.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket  # 2.13
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _BypassDispatchCache  # 2.13
from torch.multiprocessing.reductions import StorageWeakRef  # 2.13
from torch.utils._python_dispatch import _disable_current_modes  # 2.13

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "StorageWeakRef",
    "below_autograd",
    "corrected_fakes",
    "has_kernel",
    "is_dense",
    "is_onednn_on",
    "with_autograd_kernel",
    "with_cpu_kernel",
    "with_kernel",
    "with_python_kernels",
    "without_modes",
    "without_python_kernels",
]


@contextmanager
def with_kernel(
    operator: OpOverload, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Traces `make(kernel)` in place of the kernel of a composite operator.

    It uses `py_kernels` and `_op_dk` (2.13).
    """
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


@contextmanager
def with_autograd_kernel(operator: OpOverload, kernel: Callable[..., Any]) -> Iterator[None]:
    """Traces `kernel` in place of an operator's own autograd kernel (`py_kernels`, 2.13).

    Inside of `torch.func.grad` and similar functions torch's own kernel runs.
    """
    key = torch._C.DispatchKey.Autograd

    def install(replacement: Callable[..., Any] | None) -> None:
        operator.py_kernels.pop(key, None)
        operator.py_kernels.update({key: replacement} if replacement else {})
        operator._dispatch_cache.clear()

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is None:
            return kernel(*args, **kwargs)
        install(None)
        try:
            return operator(*args, **kwargs)
        finally:
            install(run)

    install(run)
    try:
        yield
    finally:
        install(None)


@contextmanager
def with_cpu_kernel(operator: OpOverload) -> Iterator[None]:
    """Traces a composite operator of the CPU as one operator, as where it has a kernel of its own.

    The CPU is given its composite kernel under its own key, so autograd uses the operator's own
    derivative. It applies to the whole process (`_op_dk`, `_destroy`, 2.13).
    """
    composite = partial(operator._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl(operator, composite)
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        library._destroy()
        operator._dispatch_cache.clear()


def below_autograd() -> Any:
    """Turns autograd off in a `with` block, as torch does inside an operator with a derivative.

    It uses `_AutoDispatchBelowAutograd` (2.13).
    """
    return torch._C._AutoDispatchBelowAutograd()


def without_python_kernels() -> Any:
    """Runs torch's own kernels inside of a `with` block, even during a trace that replaces them.

    It uses `_DisablePythonDispatcher` (2.13).
    """
    return torch._C._DisablePythonDispatcher()


def is_onednn_on() -> bool:
    """Says whether operators may run in oneDNN (`_get_mkldnn_enabled`, 2.13)."""
    return bool(torch._C._get_mkldnn_enabled())


def has_kernel(operator: OpOverload, device_type: str) -> bool:
    """Says whether an operator has a kernel of its own for a type of device (2.13)."""
    key = "CUDA" if device_type == "cuda" else "CPU"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key))


def is_dense(tensor: torch.Tensor) -> bool:
    """True where a tensor's elements have no gaps or overlaps, in any order of dimensions.

    It uses `is_non_overlapping_and_dense_or_false` (2.13).
    """
    return bool(torch._prims_common.is_non_overlapping_and_dense_or_false(tensor))


@contextmanager
def without_modes() -> Iterator[None]:
    """Runs operators for real inside of a `with` block, even during a trace on fake tensors.

    It uses `_disable_current_modes` (2.13).
    """
    with _disable_current_modes():
        yield


@contextmanager
def with_python_kernels(
    kept: Set[OpOverload], wrapped: Mapping[OpOverload, Callable[..., Any]]
) -> Iterator[None]:
    """Traces torch's own kernels of operators that have Python ones (`py_kernels`, 2.13).

    Args:
        kept: operators whose Python kernels stay.
        wrapped: operator -> function that makes another kernel from its Python kernel.
    """
    keys = {torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd}
    packets = [
        packet for packet in vars(torch.ops.aten).values() if isinstance(packet, OpOverloadPacket)
    ]
    operators = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    before = {
        operator: dict(operator.py_kernels)
        for operator in operators
        if not keys.isdisjoint(operator.py_kernels)
    }
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
def corrected_fakes(correct: Callable[[OpOverload, Any, Any, Any], Any]) -> Iterator[None]:
    """Corrects the layouts of operators' results on fake tensors (`FakeTensorMode.dispatch`, 2.13).

    A result whose storage is larger than its elements need is not put into the cache of fake
    tensors, since the cache does not store that size.

    Args:
        correct: function of an operator, its result and its arguments that returns the result to
            use instead.
    """
    plain: Any = FakeTensorMode.dispatch

    def corrected(
        self: Any, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = plain(self, func, types, args, kwargs or {})
        with self:
            return correct(func, result, args, kwargs or {})

    def validated(
        self: Any, state: Any, key: Any, func: OpOverload, args: Any, kwargs: Any, output: Any
    ) -> None:
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
    if not all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride())):
        return False  # sizes that are known only at run time
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(tensor.numel() and tensor.untyped_storage().nbytes() > (last + 1) * tensor.itemsize)
