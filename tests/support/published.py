"""The published instances, with their budgets by name."""

from __future__ import annotations

import functools
import json

import pytest

from remat.core.graph import Graph
from tests.support.checkout import SHARED

INSTANCES = SHARED / "instances"


@functools.cache
def instance(name: str) -> tuple[Graph, dict[str, int]]:
    path = INSTANCES / f"{name}.json"
    if not path.exists():
        pytest.skip(f"the published instance {path} is missing")
    data = json.loads(path.read_text())
    return Graph.from_arrays(
        data["cost"], data["size"], data["edges"], first_backward=data.get("first_backward")
    ), data["budgets"]
