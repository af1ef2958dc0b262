"""A fixture for steps that are watched from outside."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from remat.torch_border.allocator import is_profiling
from tests.support.outside_memory import is_watched


@pytest.fixture
def torch_is_left_as_it_was() -> Iterator[None]:
    yield
    gc.collect()
    assert not is_watched() and not is_profiling()
