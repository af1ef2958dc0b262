"""Derivatives that depend on their data: products of factors with and without zeros.

Found with pytorch-msssim: on the tensors of a trace, torch uses the formula for zeros, which rounds
differently and, for `cumprod`, loops over the elements.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import remat
from experiments.comparison import is_same_step, peak_bytes
from experiments.models import Workload

pytestmark = pytest.mark.usefixtures("fresh_torch")


class _Product(nn.Module):
    def __init__(self, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(12, 12), of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(self.linear(x)).float().mean()


PRODUCTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda y: y[0, 0].prod(),
    "dim": lambda y: y.prod(-1),
    "kept dim of a transposed tensor": lambda y: y.mT.prod(1, keepdim=True),
    "float64": lambda y: y.prod(1, dtype=torch.float64),
    "cumulative": lambda y: torch.cumprod(1 - y.sigmoid(), 1),
    "zeros": lambda y: y.relu().prod(-1),
    "cumulative zeros": lambda y: y.relu().cumprod(-1),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_has_the_gradient_of_plain_pytorch_in_one_operator(name: str) -> None:
    torch.manual_seed(0)
    plain = Workload(_Product(PRODUCTS[name]), {"x": torch.randn(16, 32, 12)})
    model = remat.checkpoint(
        copy.deepcopy(plain.model), "100%", costs="roofline", time_limit_s=1, plan_cache=False
    )
    planned = Workload(model, plain.kwargs)
    assert is_same_step(planned, plain, 1)

    report = remat.report(model)
    assert report.graph.num_operators < 20  # and does not grow with the number of factors
    assert peak_bytes(planned) <= report.solution.peak_bytes


@pytest.mark.skipif(torch.__version__ < "2.12", reason="dynamo of 2.11 rounds it differently")
def test_a_derivative_of_a_derivative_is_that_of_plain_pytorch() -> None:
    def penalty(y: torch.Tensor) -> torch.Tensor:
        slope: torch.Tensor = torch.func.grad(lambda z: z.prod(-1).sum())(y)
        return slope.pow(2)

    plain = Workload(_Product(penalty), {"x": torch.randn(4, 12)})
    model = remat.checkpoint(copy.deepcopy(plain.model), "100%", costs="roofline", plan_cache=False)
    assert is_same_step(Workload(model, plain.kwargs), plain, 1)
