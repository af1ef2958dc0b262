"""Steps whose backward runs twice, or is differentiated itself: refused in our words, or plain."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import remat
from tests.planned import keep_all, keep_nothing, planned


class TwoLosses(nn.Module):
    """Two losses whose graphs share nothing but the input, or a first layer as well."""

    def __init__(self, *, is_shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8) if is_shared else nn.Identity()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x).sin()
        return self.a(hidden).tanh().sum(), self.b(hidden).sigmoid().sum()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("steps_of", [keep_all, keep_nothing])
def test_two_backwards_are_refused(is_shared: bool, steps_of: object) -> None:
    """Naive: autograd's own error, which advises retain_graph=True, and that is refused as well."""
    model = planned(TwoLosses(is_shared=is_shared), steps_of)  # type: ignore[arg-type]
    for _ in range(2):
        first, second = model(torch.randn(4, 8))
        first.backward()
        with pytest.raises(remat.TraceError, match="add its losses up"):
            second.backward()


def test_two_backwards_through_pieces_are_refused() -> None:
    class Broken(TwoLosses):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.first(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    model = planned(Broken(is_shared=True))
    for _ in range(2):
        first, second = model(torch.randn(4, 8))
        first.backward()
        with pytest.raises(remat.TraceError, match="add its losses up"):
            second.backward()
