"""Autocast's cache in a traced step: a parameter is cast once, however many operators read it.

Plain PyTorch sums the gradients of all readers of the cast in the lower precision, and casts the
sum back once. AOTAutograd (torch 2.13) turns the cache off, and autocast caches casts of leaves
only, which traced parameters are not. So each reader's gradient would be cast back before the sum,
and would round differently. Here casts are stored on the tensors that stand for leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from remat.torch_border.autograd import autocast_cache_left_on, is_inside_autocast_cast
from remat.torch_border.kernels import with_kernel

_CASTS = "_remat_autocasts"  # attribute of a tensor that stands for a leaf: dtype -> its cast


@contextmanager
def autocast_cache(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Traces `module`, a captured forward, with autocast's cache.

    Args:
        module: an operator that marks leaves is added to it, and runs while it is traced.
        inputs: its example inputs, one per placeholder.
    """
    leaves: list[Any] = []

    def mark(*tensors: torch.Tensor) -> None:
        leaves.extend(tensors)
        forget()

    def forget() -> None:
        for leaf in leaves:
            setattr(leaf, _CASTS, {})

    _mark_leaves(module, inputs, mark)
    clear = torch.clear_autocast_cache

    def clear_both() -> None:  # called where an autocast region ends
        forget()
        clear()

    torch.clear_autocast_cache = clear_both
    try:
        with autocast_cache_left_on(), with_kernel(torch.ops.aten.to.dtype, _remembering):
            yield
    finally:
        torch.clear_autocast_cache = clear
        clear()


def _mark_leaves(module: fx.GraphModule, inputs: Sequence[Any], mark: Callable[..., None]) -> None:
    """Makes the module begin with `mark(*leaves)`, if autocast would cache the cast of any leaf."""
    nodes = module.graph.find_nodes(op="placeholder")
    leaves = [node for node, value in zip(nodes, inputs, strict=True) if _is_cached(value)]
    if leaves:
        with module.graph.inserting_after(nodes[-1]):
            module.graph.call_function(mark, tuple(leaves))
        module.recompile()


def _is_cached(value: Any) -> bool:
    """True where autocast would cache casts of `value`.

    The condition is that of `cached_cast` in aten/src/ATen/autocast_mode.cpp (torch 2.13).
    """
    is_trained_leaf = (
        isinstance(value, torch.Tensor)
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
    )
    return is_trained_leaf and value.dtype is torch.float32


def _is_caching(device_type: str, dtype: torch.dtype) -> bool:
    is_on = is_inside_autocast_cast(device_type) and torch.is_autocast_cache_enabled()
    return is_on and dtype is torch.get_autocast_dtype(device_type)


def _remembering(plain: Callable[..., Any]) -> Callable[..., Any]:
    def to(x: torch.Tensor, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        casts: dict[torch.dtype, torch.Tensor] | None = getattr(x, _CASTS, None)
        if casts is None or not _is_caching(x.device.type, dtype):
            return plain(x, dtype, *args, **kwargs)
        if dtype not in casts:
            casts[dtype] = plain(x, dtype, *args, **kwargs)
        return casts[dtype]

    return to
