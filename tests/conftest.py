"""What the tests of several files start from."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from remat.solvers.auto.minimum import minimum
from remat.solvers.core.compiled import is_ready
from remat.solvers.search.annealing import anneal
from remat.tracers.synthetic import random_layered

os.environ["REMAT_PROGRESS"] = "0"  # what tests look for on stderr is there on a slow machine too


@pytest.fixture(scope="session", autouse=True)
def compiled_search() -> None:
    """Compiles the search where that was never done, so that short limits are not the compiler's.

    With less than 30 s left the search is left out instead, and a test finds no schedule.
    """
    if not is_ready(anneal):
        minimum(random_layered(8, seed=0))


@pytest.fixture
def fresh_torch() -> Iterator[None]:
    """Nothing compiled before or after, and one random stream."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
