"""The first difference between two graphs, found from the outline that a plan keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import remat
from remat.core.graph import Graph
from remat.core.operators import Operator, Phase, Value, ValueKind
from remat.core.outline import first_difference, outline

VALUES = (
    Value("weight", 8, ValueKind.PARAMETER),
    Value("hidden", 16, ValueKind.INTERMEDIATE),
    Value("out", 24, ValueKind.INTERMEDIATE),
)
_LAST = Phase.BACKWARD
OPERATORS = (
    Operator("first", cost_s=1.0, reads=(0,), writes=(1,), target="aten.mm", module="layer"),
    Operator("second", cost_s=1.0, reads=(1,), writes=(2,), target="aten.relu", phase=_LAST),
)
GRAPH = Graph(VALUES, OPERATORS, (2,))


def changed(index: int, **fields: Any) -> Graph:
    operators = list(OPERATORS)
    operators[index] = replace(operators[index], **fields)
    return replace(GRAPH, operators=tuple(operators))


def resized(index: int) -> Graph:
    values = list(VALUES)
    values[index] = replace(values[index], size_bytes=999)
    return replace(GRAPH, values=tuple(values))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (GRAPH, ""),
        (changed(0, cost_s=9.0, name="renamed"), ""),
        (changed(0, target="aten.bmm"), "operator 0, aten.bmm of layer, is a different operator"),
        (changed(1, phase=Phase.FORWARD), "operator 1, aten.relu, is a different operator"),
        (resized(1), "operator 0, aten.mm of layer, has results of another size"),
        (changed(1, reads=(0, 1)), "operator 1, aten.relu, reads other values"),
        (changed(1, reuses=(1,)), "operator 1, aten.relu, overwrites another value"),
        (
            changed(1, pinned="it changes"),
            "operator 1, aten.relu, may be recomputed in only one of the two",
        ),
        (
            replace(GRAPH, outputs=(1, 2)),
            "operator 0, aten.mm of layer, has a result that outlives the step in only one of the "
            "two",
        ),
        (resized(0), "an input has another size"),
        (
            replace(GRAPH, values=(replace(VALUES[0], kind=ValueKind.BUFFER), *VALUES[1:])),
            "in only one of the two, a parameter is frozen or is passed as an input",
        ),
        (
            replace(GRAPH, values=(*VALUES, Value("bias", 4, ValueKind.PARAMETER))),
            "there are more or fewer inputs or parameters",
        ),
        (
            Graph(
                (*VALUES, Value("more", 8)),
                (*OPERATORS, Operator("third", cost_s=1.0, reads=(2,), writes=(3,), phase=_LAST)),
                (2,),
            ),
            "one of the two has more operators",
        ),
    ],
)
def test_the_first_difference_is_named(other: Graph, difference: str) -> None:
    assert first_difference(outline(GRAPH), other) == difference


def test_a_saved_plan_names_the_difference(tmp_path: Path) -> None:
    solution = remat.solve(GRAPH, "100%")
    solution.save(tmp_path / "plan.json")
    loaded = remat.Solution.load(tmp_path / "plan.json")
    assert loaded.outline == outline(GRAPH)

    with pytest.raises(
        remat.ScheduleError, match=r"first difference: operator 1, aten\.relu, reads"
    ):
        loaded.on(changed(1, reads=(0, 1)))

    without = replace(loaded, outline=())  # as in an older file
    with pytest.raises(remat.ScheduleError, match=r"\(2 operators\); trace and solve again"):
        without.on(changed(1, reads=(0, 1)))
