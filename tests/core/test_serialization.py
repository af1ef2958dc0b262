"""Graphs, schedules and solutions on disk.

Files that remat wrote are equal when read back; others are refused in one line.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from remat.core.errors import GraphError, RematError, ScheduleError
from remat.core.graph import Graph
from remat.core.instance import read_instance
from remat.core.schedule import Schedule
from remat.core.solution import SearchRecord, Solution, Status
from remat.tracers.synthetic import FAMILIES

PLAIN = {"cost": [1, 2.5, 1], "size": [4, 4, 2], "edges": [[0, 1], [0, 2], [1, 2]]}


@pytest.fixture(params=FAMILIES)
def graph(request: pytest.FixtureRequest) -> Graph:
    return FAMILIES[request.param]()


def solution_of(graph: Graph) -> Solution:
    steps = Schedule.keep_all(graph).steps
    return Solution.of_steps(
        graph, 2**40, steps, lower_bound_s=graph.cost_s, solver="keep", wall_s=0.25
    )


def test_a_graph_comes_back_equal(graph: Graph, tmp_path: Path) -> None:
    graph.save(tmp_path / "graph.json")
    again = Graph.load(tmp_path / "graph.json")
    assert again == graph
    assert again.fingerprint == graph.fingerprint
    assert read_instance(tmp_path / "graph.json") == graph


def test_a_schedule_and_a_solution_come_back_equal(graph: Graph, tmp_path: Path) -> None:
    solution = solution_of(graph)
    solution.save(tmp_path / "plan.json")
    assert Solution.load(tmp_path / "plan.json") == solution
    assert solution.schedule is not None
    solution.schedule.save(tmp_path / "schedule.json")
    assert Schedule.load(tmp_path / "schedule.json") == solution.schedule


def test_a_solution_without_a_schedule_comes_back_equal(tmp_path: Path) -> None:
    graph = FAMILIES["chain"]()
    solution = Solution.without_schedule(
        graph,
        3,
        Status.INFEASIBLE,
        solver="s",
        wall_s=0.1,
        record=SearchRecord(minimum_bytes=9),
    )
    solution.save(tmp_path / "plan.json")
    assert Solution.load(tmp_path / "plan.json") == solution


def test_a_bound_computed_by_numpy_can_be_saved(tmp_path: Path) -> None:
    """The LP bounds of large graphs were `numpy.float64`, which the JSON encoder refused."""
    graph, steps = FAMILIES["chain"](), Schedule.keep_all(FAMILIES["chain"]()).steps
    solution = Solution.of_steps(
        graph, 2**40, steps, lower_bound_s=np.float64(graph.cost_s + 1), solver="s", wall_s=0.0
    )
    solution.save(tmp_path / "plan.json")
    assert Solution.load(tmp_path / "plan.json") == solution


def test_sizes_change_the_fingerprint_and_costs_do_not() -> None:
    graph = Graph.from_arrays([1, 1], [8, 8], [(0, 1)])
    assert graph.with_costs([2, 3]).fingerprint == graph.fingerprint
    assert Graph.from_arrays([1, 1], [8, 9], [(0, 1)]).fingerprint != graph.fingerprint


@pytest.mark.parametrize("kind", [Graph, Schedule, Solution])
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b'{"version": 1}', b"\xff\xfe", b'{"steps": 3}']
)
def test_other_files_are_refused_in_one_line(
    kind: type[Graph] | type[Schedule] | type[Solution], content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(RematError) as caught:
        kind.load(path)
    assert "other.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    graph = FAMILIES["chain"]()
    for record, error in (
        (graph, GraphError),
        (Schedule.keep_all(graph), ScheduleError),
        (solution_of(graph), ScheduleError),
    ):
        record.save(tmp_path / "later.json")
        content = json.loads((tmp_path / "later.json").read_text()) | {"version": 99}
        (tmp_path / "later.json").write_text(json.dumps(content))
        with pytest.raises(error, match="version 99"):
            type(record).load(tmp_path / "later.json")


def test_a_broken_graph_is_refused_when_read(tmp_path: Path) -> None:
    FAMILIES["chain"]().save(tmp_path / "graph.json")
    content = json.loads((tmp_path / "graph.json").read_text())
    content["operators"][3]["reads"] = [40]
    (tmp_path / "graph.json").write_text(json.dumps(content))
    with pytest.raises(GraphError, match=r"graph\.json.*before it is written"):
        read_instance(tmp_path / "graph.json")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(GraphError, match=str(path)):
            read_instance(path)
        with pytest.raises(GraphError, match=str(path)):
            Graph.load(path)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "graph.json"
    FAMILIES["chain"]().save(path)
    before = path.read_bytes()

    def fail(source: str, target: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        FAMILIES["unet"]().save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["graph.json"]


def test_a_plain_file_is_the_graph_of_its_arrays(tmp_path: Path) -> None:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(PLAIN | {"name": "for people", "published": {}}))
    assert read_instance(path) == Graph.from_arrays(
        [1, 2.5, 1], [4, 4, 2], [(0, 1), (0, 2), (1, 2)]
    )
    path.write_text(json.dumps(PLAIN | {"first_backward": 2}))
    assert read_instance(path).num_forward == 2


BROKEN = [
    {"cost": [1, 1]},
    {"size": [4, 4, -2]},
    {"size": [4, 4, 1.5]},
    {"size": [4, 4, 2**70]},
    {"size": [2**53, 1, 1]},
    {"cost": [1, "1", 1]},
    {"cost": [1, True, 1]},
    {"cost": [1, -1, 1]},
    {"cost": [1e308, 1e308, 1e308]},
    {"cost": None},
    {"edges": [[0, 1, 2]]},
    {"edges": [[1, 1]]},
    {"edges": [[2, 1]]},
    {"edges": [[0, 3]]},
    {"edges": [[-1, 1]]},
    {"edges": [[0, "1"]]},
    {"first_backward": 4},
    {"first_backward": -1},
    {"cost": [], "size": [], "edges": []},
]


@pytest.mark.parametrize("change", BROKEN, ids=json.dumps)
def test_a_broken_instance_is_refused_in_one_line(
    change: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(PLAIN | change))
    with pytest.raises(GraphError) as caught:
        read_instance(path)
    assert "bad.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    ["", "[", "[1]", "3", '{"cost": [NaN], "size": [1], "edges": []}', '{"x": ' + "[" * 100_000],
)
def test_a_file_without_a_json_object_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(GraphError, match=r"bad\.json"):
        read_instance(path)
