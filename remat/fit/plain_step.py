"""The peak of a training step in plain PyTorch, measured on fake tensors.

The unchanged module runs forward and backward on fake tensors, and the storages alive are counted.
The result is usually more than the peak of keeping everything in the captured step, which leaves
out copies, dropout masks as floats, and tensors that Python holds longer than needed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from remat.run.counted_storages import CountStorages
from remat.torch_border.fakes import on_fakes
from remat.torch_border.kernels import with_kernel
from remat.torch_border.modules import calls_plain
from remat.tracers.retarget import CUDA_GRANULARITY_BYTES
from remat.tracers.workspace import workspace_bytes

_LOG = logging.getLogger(__name__)


def plain_peak_bytes(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    traced_on: str,
    device_type: str,
) -> int | None:
    """Returns the peak of forward and backward, without parameters, buffers and inputs.

    None if the module can't run without data; the log says why.

    Args:
        model: any module.
        args: its inputs; real, meta or fake.
        kwargs: its keyword inputs.
        traced_on: the device type of the fake tensors.
        device_type: the device type to count for; on `cuda` sizes are rounded as its allocator
            does, and dropout runs as its fused kernel.
    """
    is_cuda = device_type == "cuda"
    counted = CountStorages(
        CUDA_GRANULARITY_BYTES if is_cuda else 1,
        workspace_of=partial(workspace_bytes, device_type=device_type),
    )
    dropout = torch.ops.aten.dropout.default
    as_on_device = with_kernel(dropout, lambda _: _fused_dropout) if is_cuda else nullcontext()

    try:
        with on_fakes(model, args, kwargs or {}, traced_on) as (fake_args, fake_kwargs):
            counted.ignore(*model.parameters(), *model.buffers())
            counted.ignore(*_tensors_in((fake_args, fake_kwargs)))
            with counted, as_on_device, calls_plain(model):
                _step(model, fake_args, fake_kwargs)
    except RuntimeError as error:
        _LOG.info("the peak of plain PyTorch is unknown, as the step needs data: %s", error)
        return None

    return counted.peak_bytes


def _step(model: nn.Module, args: Any, kwargs: Any) -> None:
    results = _tensors_in(model(*args, **kwargs))
    trained = [tensor for tensor in results if tensor.requires_grad]
    losses = [tensor for tensor in trained if tensor.dim() == 0] or trained
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])


def _fused_dropout(x: torch.Tensor, p: float, train: bool) -> Any:
    return torch.ops.aten.native_dropout(x, p, train)[0] if train and 0 < p < 1 else x


def _tensors_in(values: Any) -> list[torch.Tensor]:
    found = []
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            found += [
                v for v in pytree.tree_leaves(dict(vars(leaf))) if isinstance(v, torch.Tensor)
            ]

    return found
