"""Fixtures and settings shared by the tests."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor_config

import remat
from remat.solvers.auto.minimum import minimum
from remat.solvers.core.compiled import is_ready
from remat.solvers.search.annealing import anneal
from remat.tracers import devices, workspace
from remat.tracers.synthetic import random_layered

os.environ["REMAT_PROGRESS"] = "0"  # tests read stderr; slow stages would add progress lines


@pytest.fixture(scope="session", autouse=True)
def compiled_search() -> None:
    """Compiles the search if it is not compiled yet, so that short limits leave it time.

    With less than 30 s left, `auto` would skip the search, and a test would find no schedule.
    """
    if not is_ready(anneal):
        minimum(random_layered(8, seed=0))


@pytest.fixture(scope="session", autouse=True)
def short_plans() -> Iterator[None]:
    """Gives plans 2 s where a test does not say how long; a proof may take all of the usual 60."""
    with pytest.MonkeyPatch.context() as patch:
        for planner in (remat.checkpoint, remat.solve):
            defaults = planner.__kwdefaults__
            assert defaults is not None
            patch.setitem(defaults, "time_limit_s", 2.0)
        yield


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> None:
    """Exempts objects older than a test file from garbage collection, and collects less often.

    Each measured step collects first, and torch and its libraries make up a million objects.
    Captures create and drop so many objects that Python's own collections cost noticeable time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def untimed_guards() -> Iterator[None]:
    """Keeps torch from timing its guards.

    For that, it empties the processor's caches after each compilation.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def unrecorded_graphs() -> None:
    """Keeps pytest from recording torch's trace of a compilation, for which torch prints graphs.

    pytest adds handlers to each logger that does not propagate; torch prints if there are any.
    """
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    trace.handlers.clear()


@pytest.fixture(scope="session", autouse=True)
def scalar_kernels() -> Iterator[None]:
    """Keeps Inductor from using vector instructions, for which g++ takes half as long again.

    What a plan holds, and which kernels it has, does not depend on them.
    """
    with inductor_config.patch({"cpp.simdlen": 1}):
        yield


@pytest.fixture
def vector_kernels() -> Iterator[None]:
    """Lets Inductor use them, as it does where nothing is set."""
    with inductor_config.patch({"cpp.simdlen": None}):
        yield


@pytest.fixture
def idle_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled and fused kernels compute nothing, as only memory is checked.

    Not for pooling: torch 2.15 looks up what a kernel should have written as indices.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    def idle(*_: object, **__: object) -> Callable[..., None]:
        return lambda *_, **__: None

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", idle)
    monkeypatch.setattr(AsyncCompile, "wait", lambda *_: None)
    PyCodeCache.cache_clear()
    yield
    PyCodeCache.cache_clear()  # the same code has real kernels in other tests


@pytest.fixture
def fresh_torch() -> Iterator[None]:
    """Clears dynamo's compiled code before and after a test, and seeds its random numbers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def quick_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the search for the schedule that a step in pieces runs until it is planned."""
    monkeypatch.setattr("remat.pieces.captured_piece._PROVISIONAL_S", 0.1)


@pytest.fixture
def own_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts without measured costs and workspaces, with random numbers from a seed.

    Measured times count as those of an idle machine, and are stored.
    """
    monkeypatch.setattr("remat.tracers.timing.waited_s", lambda: 0.0)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _: tmp_path)
    devices._cpu.cache_clear()
    workspace._store.cache_clear()
    torch.manual_seed(0)
