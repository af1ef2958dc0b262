"""Private names of torch for the marks of `mark_dynamic`: the sizes that an input declares.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

_MARKS = (
    "_dynamo_dynamic_indices",
    "_dynamo_dynamic_range",
    "_dynamo_hint_overrides",
    "_specialize_on",
    "_has_dynamo_dim_marking",
)


def largest_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape with the largest sizes that `mark_dynamic(..., max=...)` declared (2.13).

    It is empty where none was declared.
    """
    largest = {
        mark.dim: mark.max
        for mark in getattr(tensor, "_dynamo_dynamic_range", ())
        if mark.max is not None
    }
    return tuple(largest.get(dim, size) for dim, size in enumerate(tensor.shape)) if largest else ()


def at_its_largest(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a meta tensor of the largest sizes that `tensor` declares, or else `tensor`."""
    shape = largest_shape(tensor)
    if not shape:
        return tensor
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


@contextmanager
def without_dynamic_marks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hides marks of `mark_dynamic` (2.13), so that each shape is captured separately."""
    marked = [
        (vars(t), name)
        for t in tensors
        if hasattr(t, "_dynamo_dynamic_indices")
        for name in _MARKS
        if name in vars(t)
    ]
    hidden = [(own, name, own.pop(name)) for own, name in marked]

    try:
        yield
    finally:
        for own, name, value in hidden:
            own[name] = value
