"""CUDA's autocast on CPU tensors, to trace the step of a GPU on a machine without one.

The CPU's autocast casts the inputs of other operators than CUDA's does. CUDA's runs norms, softmax,
powers, exponentials and sums in float32, so a step holds more.

Source: `AT_FORALL_LOWER_PRECISION_FP`, `AT_FORALL_FP32`, `AT_FORALL_FP32_SET_OPT_DTYPE`,
`AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE` and `AT_FORALL_PROMOTE` in ATen/autocast_mode.h, the same
in torch 2.11 to 2.15, except for operators that `operators_cast_for` does not find. Each policy
below is one of these macros; float64 is never cast. Two operators are in none of them: builds for
CUDA cast for `_cudnn_rnn` in ATen/cudnn/AutocastRNN.cpp, and torch from 2.14 on runs
`linalg_matrix_sqrth` in float32, as fake tensors of a GPU showed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from remat.torch_border.autocast_keys import (
    OpOverload,
    below_autocast,
    operators_cast_for,
    with_cpu_autocast,
)

aten = torch.ops.aten
Kernel = Callable[..., Any]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOWER = _names("""
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
    cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear
    addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _cudnn_rnn
    _scaled_dot_product_flash_attention scaled_dot_product_attention
""")

_FLOAT32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
    group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa linalg_matrix_sqrth
""")

# the result is float32, but the input is not cast first
_FLOAT32_RESULT = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
""")

_WITH_DTYPE = {
    "norm.Scalar": aten.norm.ScalarOpt_dtype,
    "norm.ScalarOpt_dim": aten.norm.ScalarOpt_dim_dtype,
}

# inputs are cast to float32 if one of them is float32, otherwise to the lower precision
_WIDEST = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")

_REFUSED = frozenset({"binary_cross_entropy"})

POLICIES = frozenset({*_LOWER, *_FLOAT32, *_FLOAT32_RESULT, *_WITH_DTYPE, *_WIDEST, *_REFUSED})

# CUDA's kernels read float16 and write float32
_FUSED_SOFTMAX = {
    "softmax.int": aten._softmax.default,
    "log_softmax.int": aten._log_softmax.default,
}


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Makes `torch.autocast("cpu")` cast as `torch.autocast("cuda")` does, in a `with` block.

    It applies to the whole process.
    """
    on_cuda, on_cpu = operators_cast_for("cuda"), operators_cast_for("cpu")
    kernels: dict[str, Kernel | None] = {name: None for name in on_cpu.keys() - on_cuda.keys()}
    for name, operator in on_cuda.items():
        if not (name in _LOWER and name in on_cpu):  # otherwise torch's, with autocast's cache
            kernels[name] = _kernel(name, operator)
    with with_cpu_autocast(kernels):
        yield


def _kernel(name: str, operator: OpOverload) -> Kernel | None:
    if name in _LOWER:
        return _casting(operator, lambda _: torch.get_autocast_dtype("cpu"))
    if name in _FLOAT32:
        return _casting(operator, lambda _: torch.float32)
    if name in _WIDEST:
        return _casting(operator, _widest)
    if name in _FLOAT32_RESULT:
        return _with_float32_result(operator, _FUSED_SOFTMAX.get(name))
    if name in _WITH_DTYPE:
        return _with_dtype(operator, _WITH_DTYPE[name])
    if name in _REFUSED:
        return _refusing(name)
    return None


def _casting(operator: OpOverload, dtype_of: Callable[[Any], torch.dtype]) -> Kernel:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of((args, kwargs))

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            is_other = _is_cast(tensor) and tensor.dtype != dtype
            return tensor.to(dtype) if is_other else tensor

        with below_autocast("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
            return operator(*args, **kwargs)

    return run


def _widest(values: Any) -> torch.dtype:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    is_wide = any(_is_cast(tensor) and tensor.dtype == torch.float32 for tensor in tensors)
    return torch.float32 if is_wide else torch.get_autocast_dtype("cpu")


def _with_float32_result(operator: OpOverload, fused: OpOverload | None) -> Kernel:
    def run(*args: Any, **kwargs: Any) -> Any:
        given = _by_name(operator, args, kwargs)
        tensor: torch.Tensor = args[0]
        if _is_cast(tensor) and given.get("dtype") is None:
            given["dtype"] = torch.float32

        with below_autocast("cpu"):
            is_half = tensor.dtype == torch.float16 and given.get("dtype") == torch.float32
            if fused is not None and is_half:
                return fused(tensor, given["dim"], True)
            return operator(**given)

    return run


def _with_dtype(operator: OpOverload, other: OpOverload) -> Kernel:
    def run(*args: Any, **kwargs: Any) -> Any:
        given = {
            argument.name: argument.default_value
            for argument in operator._schema.arguments
            if argument.has_default_value()
        }
        given |= _by_name(operator, args, kwargs)

        dtype = torch.float32 if _is_cast(args[0]) else args[0].dtype
        with below_autocast("cpu"):
            return other(**given, dtype=dtype)

    return run


def _refusing(name: str) -> Kernel:
    def run(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"CUDA's autocast refuses {name}, since float16 inputs are unsafe for it; use "
            "torch.nn.functional.binary_cross_entropy_with_logits, or disable autocast there"
        )

    return run


def _by_name(operator: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    names = (argument.name for argument in operator._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_cast(tensor: torch.Tensor) -> bool:
    """True where autocast would cast `tensor` (`is_eligible`, ATen/autocast_mode.h, 2.13)."""
    is_float = tensor.is_floating_point() and tensor.dtype != torch.float64
    return is_float and tensor.device.type == "cpu"
