"""Exports: other people's readers accept them, and they say what the simulator says."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from remat.analysis.arena import Blocks, best_fit, greedy_by_size, in_time_order, search
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.look.export import chrome_trace, memory_snapshot, save
from remat.solvers import make_solver
from remat.tracers.synthetic import FAMILIES, transformer


@pytest.fixture(scope="module")
def graph() -> Graph:
    step = transformer(3, width=2**16)
    return step.with_costs([op.cost_s * 1e-4 for op in step.operators], costs="roofline:H100")


@pytest.fixture(scope="module")
def schedule(graph: Graph) -> Schedule:
    peak = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    found = make_solver("pytorch-knapsack").solve(graph, budget_bytes=peak * 8 // 10).schedule
    assert found is not None
    assert found.num_recomputations
    return found


def replayed(snapshot: dict[str, Any]) -> tuple[int, dict[int, int]]:
    """Returns a snapshot's peak and the blocks left at its end; live blocks never overlap."""
    live: dict[int, int] = {}
    held = peak = 0

    for event in snapshot["device_traces"][0]:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert all(address + size <= a or a + s <= address for a, s in live.items())
            live[address], held = size, held + size
        elif event["action"] == "free_completed":
            assert live.pop(address) == size
            held -= size
        peak = max(peak, held)
    return peak, live


def test_a_snapshot_replays_to_the_predicted_peak(graph: Graph, schedule: Schedule) -> None:
    snapshot = memory_snapshot(graph, schedule)
    peak, live = replayed(snapshot)
    assert peak == simulate(graph, schedule).peak_bytes

    times = [event["time_us"] for event in snapshot["device_traces"][0]]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(1e6 * simulate(graph, schedule).cost_s, abs=1)

    (segment,) = snapshot["segments"]
    assert {
        b["address"]: b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"
    } == live
    assert sum(b["size"] for b in segment["blocks"]) == segment["total_size"] >= peak
    assert all(
        one["address"] + one["size"] == next_["address"]
        for one, next_ in pairwise(segment["blocks"])
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_replays_to_the_simulated_peak(family: str) -> None:
    graph = FAMILIES[family]()
    keep_all = Schedule.keep_all(graph)
    peak, live = replayed(memory_snapshot(graph, keep_all))
    assert peak == simulate(graph, keep_all).peak_bytes
    assert sum(live.values()) == graph.resident_bytes + int(
        graph.arrays.size_bytes[graph.arrays.output].sum()
    )


def test_pytorchs_own_readers_accept_a_snapshot(
    graph: Graph, schedule: Schedule, tmp_path: Path
) -> None:
    save(graph, schedule, tmp_path / "snapshot.pickle")
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert "segments: 1" in _memory_viz.segsum(snapshot)
    told = _memory_viz.trace(snapshot)
    assert told.count("cudaMalloc") == 1
    assert "add_local_files" in _memory_viz.trace_plot(snapshot)


def test_a_chrome_trace_has_every_step_once_and_in_order(
    graph: Graph, schedule: Schedule, tmp_path: Path
) -> None:
    save(graph, schedule, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == chrome_trace(graph, schedule)["traceEvents"]

    slices = [e for e in events if e["ph"] == "X"]
    assert [e["args"]["operator"] for e in slices] == [
        graph.operators[i].name for i in schedule.steps
    ]
    assert all(e["dur"] >= 0 and {"name", "cat", "pid", "tid", "ts"} <= set(e) for e in slices)
    assert all(
        one["ts"] + one["dur"] == pytest.approx(next_["ts"]) for one, next_ in pairwise(slices)
    )

    of_track: dict[str, int] = defaultdict(int)
    for event in slices:
        of_track[event["cat"]] += 1
    assert of_track["computed again"] == schedule.num_recomputations

    counters = [e["args"] for e in events if e["ph"] == "C"]
    assert [sum(c.values()) for c in counters] == simulate(graph, schedule).bytes_at.tolist()
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {
        "forward",
        "backward",
        "computed again",
    }


def test_another_suffix_is_refused(graph: Graph, schedule: Schedule, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.pickle"):
        save(graph, schedule, tmp_path / "a.txt")


@pytest.mark.parametrize("family", FAMILIES)
def test_live_blocks_sum_to_the_simulated_peak(family: str) -> None:
    graph = FAMILIES[family]()
    schedule = Schedule.keep_all(graph)
    blocks = Blocks.of(graph, schedule)
    assert blocks.live_bytes == simulate(graph, schedule).peak_bytes - graph.resident_bytes
    assert Blocks.of(graph, schedule, in_place=False).live_bytes >= blocks.live_bytes


@pytest.mark.parametrize(
    "place", [in_time_order, greedy_by_size, lambda blocks: search(blocks, time_limit_s=0.2)]
)
def test_placed_blocks_never_overlap_and_take_at_least_the_live_bytes(
    place: Any, graph: Graph, schedule: Schedule
) -> None:
    blocks = Blocks.of(graph, schedule)
    offset = place(blocks)
    assert blocks.arena_bytes(offset) >= blocks.live_bytes

    for i in range(len(offset)):
        together = (blocks.first <= blocks.last[i]) & (blocks.last >= blocks.first[i])
        together[i] = False
        apart = (offset + blocks.size_bytes <= offset[i]) | (
            offset[i] + blocks.size_bytes[i] <= offset
        )
        assert apart[together].all()


def test_the_smallest_gap_is_taken() -> None:
    import numpy as np

    ends = np.array([9, 1, 9, 1, 9, 9])
    blocks = Blocks(np.array([0, 0, 0, 0, 0, 2]), ends, np.array([1, 5, 1, 3, 1, 2]), np.arange(6))
    assert best_fit(blocks, np.arange(6)).tolist() == [0, 1, 6, 7, 10, 7]
