"""What the tests of several files start from."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ["REMAT_PROGRESS"] = "0"  # what tests look for on stderr is there on a slow machine too


@pytest.fixture
def fresh_torch() -> Iterator[None]:
    """Nothing compiled before or after, and one random stream."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
