"""What the tests of several files start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh_torch() -> Iterator[None]:
    """Nothing compiled before or after, and one random stream."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
