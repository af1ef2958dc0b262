"""Which operators are never computed again, by the tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from remat.tracers import recomputable
from remat.tracers.recomputable import NONDETERMINISTIC, pinned_reason

aten = torch.ops.aten


def reason(target: Any, device_type: str) -> str:
    """Why a call of `target` that returns a tensor may not be made twice."""
    node = fx.Graph().call_function(target)
    node.meta["val"] = torch.empty(2)
    return pinned_reason(node, device_type)


@pytest.mark.parametrize(
    "target",
    [
        aten._adaptive_avg_pool3d_backward.default,
        aten.adaptive_max_pool3d_backward.default,
        aten._cudnn_ctc_loss.default,
        aten._embedding_bag_dense_backward.default,
        aten._upsample_bicubic2d_aa_backward.default,
        aten._upsample_bilinear2d_aa_backward.default,
        aten.convolution_backward.default,
        aten.cudnn_grid_sampler_backward.default,
        aten.fractional_max_pool3d_backward.default,
        aten.index_copy.default,
        aten.nanmedian.dim,
        aten.reflection_pad3d_backward.default,
        aten.replication_pad3d_backward.default,
        aten.scatter.reduce,
        aten.scatter.src,
        aten.scatter_add.default,
    ],
)
def test_kernels_that_differ_from_run_to_run_are_never_run_again_on_a_gpu(target: Any) -> None:
    """Naive: a second run gives other bits than the first, and both are in one gradient."""
    assert reason(target, "cuda") == NONDETERMINISTIC
    assert reason(target, "cpu") == ""


@pytest.mark.parametrize("target", [aten.scatter.value, aten.mm.default, aten.convolution.default])
def test_deterministic_kernels_may_run_again_on_a_gpu(target: Any) -> None:
    """A number is scattered alike in any order."""
    assert reason(target, "cuda") == ""


@pytest.mark.parametrize("name", sorted(recomputable._NONDETERMINISTIC_ON_CUDA))
def test_torch_has_the_operators_of_the_table(name: str) -> None:
    operator, _, overload = name.removeprefix("aten::").partition(".")
    assert not overload or overload in getattr(aten, operator).overloads()
    assert hasattr(aten, operator)
