"""The memory of a half that Inductor compiled, known before it runs.

Inductor compiles a half to a Python function that allocates buffers, calls kernels on them, and
deletes each buffer after its last use. Here that function itself runs, on fake tensors and with
kernels that do nothing, while the bytes of all live storages are counted. So the count reflects
what Inductor decided about buffer reuse, in-place operators and the order of deletions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from remat.run.counted_storages import CountStorages
from remat.run.measured_forward import storages_of
from remat.torch_border.inductor import CompiledModule
from remat.torch_border.kernels import FakeTensorMode
from remat.tracers.calls import Call
from remat.tracers.retarget import CUDA_GRANULARITY_BYTES

_KERNEL = re.compile(r"^(\w+) = async_compile\.", re.MULTILINE)
_ALLOCATION = "empty_strided_"


class Shared(NamedTuple):
    """Memory in which several tensors lie."""

    number: int
    size_bytes: int


@dataclass(frozen=True)
class HalfMemory:
    """The memory of a half, above what is held when it begins.

    Attributes:
        peak_bytes: the most held at once.
        end_bytes: what is held at its end, results included; negative if it frees more of its
            inputs than it makes.
        is_input: for each result, whether it is one of the inputs that exist throughout.
        is_returned: for each result, whether it shares memory with a result that the caller gets.
        shared: for each result that shares its memory with another one, where that is.
    """

    peak_bytes: int
    end_bytes: int
    is_input: tuple[bool, ...] = ()
    is_returned: tuple[bool, ...] = ()
    shared: tuple[Shared | None, ...] = ()


def dry_run(
    compiled: CompiledModule,
    inputs: Sequence[Any],
    device_type: str,
    is_resident: Sequence[bool],
    num_returned: int,
    workspace_of: Callable[[Call], int],
    shared: Sequence[Shared | None] = (),
) -> HalfMemory:
    """Returns the memory of a compiled half, which it runs without computing anything.

    Args:
        compiled: the module that Inductor wrote.
        inputs: tensors of the sizes of its inputs, usually fake ones, and numbers.
        device_type: `cpu` or `cuda`, whose memory is counted as its allocator rounds it.
        is_resident: for each input, whether its caller holds it as well.
        num_returned: how many of the results the caller gets; the others are saved.
        workspace_of: call of a library operator -> its workspace.
        shared: for each input that shares its memory with another one, where that is.
    """
    call = compiled.with_names(_without_kernels(compiled))
    counting = CountStorages(
        CUDA_GRANULARITY_BYTES if device_type == "cuda" else 1,
        device_type=device_type,
        workspace_of=workspace_of,
        makes_numbers_up=True,  # a kernel in Triton gets the number in a tensor of the CPU
    )

    with FakeTensorMode(allow_non_fake_inputs=True), counting:
        args = _made_again(inputs, shared or [None] * len(inputs))
        held = [value for value, stays in zip(args, is_resident, strict=True) if stays]
        begin_bytes = counting.peak_bytes = counting.held_bytes
        results = call(args)
        end_bytes = counting.held_bytes
        is_input = _share_memory(results, held)
        is_returned = _share_memory(results, results[:num_returned])

    return HalfMemory(
        counting.peak_bytes - begin_bytes,
        end_bytes - begin_bytes,
        is_input,
        is_returned,
        tuple(_shared(results)),
    )


def _share_memory(results: Sequence[Any], others: Sequence[Any]) -> tuple[bool, ...]:
    storages = storages_of(others).keys()
    return tuple(bool(storages_of([result]).keys() & storages) for result in results)


def _shared(results: Sequence[Any]) -> Iterator[Shared | None]:
    storages = [next(iter(storages_of([result]).items()), None) for result in results]
    counts = Counter(storage and storage[0] for storage in storages)
    numbers = {key: number for number, key in enumerate(counts)}
    for storage in storages:
        is_shared = storage is not None and counts[storage[0]] > 1
        yield Shared(numbers[storage[0]], storage[1].size_bytes) if storage and is_shared else None


def _made_again(values: Sequence[Any], shared: Sequence[Shared | None]) -> list[Any]:
    """Returns new tensors, which share memory as `values` do."""
    memory: dict[int, torch.Tensor] = {}
    made = []
    for value, where in zip(values, shared, strict=True):
        if not isinstance(value, torch.Tensor) or where is None:
            made.append(_alone(value) if isinstance(value, torch.Tensor) else value)
            continue
        if where.number not in memory:
            size = where.size_bytes // value.element_size()
            memory[where.number] = torch.empty(size, dtype=value.dtype, device=value.device)
        held = memory[where.number].view(value.dtype)
        made.append(held.as_strided(value.shape, value.stride()))
    return made


def _alone(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _without_kernels(compiled: CompiledModule) -> dict[str, Any]:
    """Returns the function's global names, with fake allocations and kernels that do nothing."""
    names = dict(compiled.names)
    for name in names:
        if name.startswith(_ALLOCATION):
            names[name] = _allocation(name.removeprefix(_ALLOCATION))
        elif name.startswith("assert_"):
            names[name] = _nothing

    names |= dict.fromkeys(_KERNEL.findall(compiled.source), _IdleKernel())
    names["reinterpret_tensor"] = torch.as_strided
    names["copy_if_misaligned"] = _itself  # torch 2.13, on a GPU
    return names


class _IdleKernel:
    """Called as `kernel(...)` in C++, as `kernel.run(...)` in Triton."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    run = __call__


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


def _allocation(device_type: str) -> Callable[..., torch.Tensor]:
    def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        device = "cpu" if device_type == "cpu_pinned" else device_type
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return allocate
