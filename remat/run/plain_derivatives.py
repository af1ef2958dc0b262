"""Derivatives whose formula depends on the data, traced as one operator that decides at run time.

The backward of a product has a short formula for factors without zeros, and a general one. Plain
PyTorch counts the zeros to choose one. The tensors of a trace have no data, so torch (2.13) traces
the general formula: `prod` rounds differently, and `cumprod` becomes a loop over its n elements
that holds n^2 values. Here such a backward is one operator, which looks at the data when it runs.

It computes the forward again instead of saving its result. Its memory is planned for factors with
zeros, which need the most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from remat.torch_border.kernels import (
    below_autograd,
    with_autograd_kernel,
    without_python_kernels,
)

_LIBRARY = torch.library.Library("remat", "FRAGMENT")
_LIBRARY.define(
    "prod_backward(Tensor gradient, Tensor input, int? dim, bool keepdim, ScalarType? dtype)"
    " -> Tensor"
)
_LIBRARY.define(
    "cumprod_backward(Tensor gradient, Tensor input, int dim, ScalarType? dtype) -> Tensor"
)
aten, ours = torch.ops.aten, torch.ops.remat


def _prod(x: torch.Tensor, dim: int | None, keepdim: bool, dtype: Any) -> torch.Tensor:
    return x.prod(dtype=dtype) if dim is None else x.prod(dim, keepdim, dtype=dtype)


def _prod_backward(gradient: torch.Tensor, x: torch.Tensor, *options: Any) -> torch.Tensor:
    return _looked_at(_prod, gradient, x, options)


def _cumprod_backward(
    gradient: torch.Tensor, x: torch.Tensor, dim: int, dtype: Any
) -> torch.Tensor:
    return _looked_at(lambda x, dim, dtype: x.cumprod(dim, dtype=dtype), gradient, x, (dim, dtype))


def _looked_at(
    operator: Callable[..., torch.Tensor], gradient: torch.Tensor, x: torch.Tensor, options: Any
) -> torch.Tensor:
    """Returns the gradient as eager PyTorch computes it, in the layout that was traced."""
    with without_python_kernels(), torch.enable_grad():
        leaf = x.detach().requires_grad_()
        result = operator(leaf, *options)
        (found,) = torch.autograd.grad(result, leaf, gradient)
    promised = torch.empty_like(x)
    return found if found.stride() == promised.stride() else promised.copy_(found)


for _name, _function in {
    "prod_backward": _prod_backward,
    "cumprod_backward": _cumprod_backward,
}.items():
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _function, _key)
    torch.library.register_fake(
        f"remat::{_name}", lambda gradient, x, *_: torch.empty_like(x), lib=_LIBRARY
    )


class _Differentiated(torch.autograd.Function):
    """An operator whose backward is one operator as well."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.forward_of, ctx.backward_of = forward, backward
        ctx.save_for_backward(x)
        with below_autograd():
            result: torch.Tensor = forward(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, None, ctx.backward_of(gradient, x)


_differentiated: Any = _Differentiated.apply


def _traced_prod(
    x: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    def forward(x: torch.Tensor) -> Any:
        if dim is None:
            return aten.prod.default(x, dtype=dtype)
        return aten.prod.dim_int(x, dim, keepdim, dtype=dtype)

    def backward(gradient: torch.Tensor, x: torch.Tensor) -> Any:
        return ours.prod_backward(gradient, x, dim, keepdim, dtype)

    return _differentiated(forward, backward, x)


def _traced_cumprod(x: torch.Tensor, dim: int, *, dtype: Any = None) -> Any:
    def backward(gradient: torch.Tensor, x: torch.Tensor) -> Any:
        return ours.cumprod_backward(gradient, x, dim, dtype)

    return _differentiated(lambda x: aten.cumprod.default(x, dim, dtype=dtype), backward, x)


_TRACED = {
    aten.prod.default: _traced_prod,
    aten.prod.dim_int: _traced_prod,
    aten.cumprod.default: _traced_cumprod,
}


@contextmanager
def plain_derivatives() -> Iterator[None]:
    """Traces these derivatives as the operators above."""
    with ExitStack() as stack:
        for operator, kernel in _TRACED.items():
            stack.enter_context(with_autograd_kernel(operator, kernel))
        yield
