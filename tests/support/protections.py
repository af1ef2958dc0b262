"""Shows that a planned step is right, and that without one of our protections it is not.

The same comparison runs twice: as it is, and on the naive implementation, which is ours with one
protection taken out. The second run must fail, so that the comparison is known to see the mistake.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.planned import (
    Steps,
    assert_same,
    call_of,
    keep_nothing,
    planned,
    reference,
    state_after,
)

Check = Callable[[], None]


def assert_only_naive_is_wrong(
    check: Check,
    monkeypatch: pytest.MonkeyPatch,
    *naive: tuple[Any, str, Any],
    error: type[Exception] = AssertionError,
) -> None:
    """`check` passes, and fails with this error with (owner, name, value) of `naive` patched in."""
    check()
    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        for owner, name, value in naive:
            patch.setattr(owner, name, value)
        with pytest.raises(error):
            check()


def same_as_plain(
    make: Callable[[], nn.Module],
    x: torch.Tensor,
    steps_of: Steps = keep_nothing,
    executor: str = "eager",
    draws: bool = False,
) -> Check:
    """Returns a check that two planned steps leave what the plain ones do.

    Through Inductor, a model that draws random numbers is compared with `torch.compile`, which
    draws other numbers than plain PyTorch.
    """

    def check() -> None:
        torch.manual_seed(0)
        model = make()
        plain = reference(copy.deepcopy(model), executor if draws else "eager")
        planned(model, steps_of, executor=executor)

        for seed in (1, 2):
            assert_same(
                state_after(model, x.clone(), seed=seed),
                state_after(plain, x.clone(), seed=seed),
                executor=executor,
            )
        assert call_of(model).pieces

    return check
