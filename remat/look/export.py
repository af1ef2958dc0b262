"""Exports of a predicted step for the viewers of PyTorch and Chrome.

- `memory_snapshot`: PyTorch's memory snapshot, the pickle of `torch.cuda.memory._dump_snapshot`,
  for https://pytorch.org/memory_viz, to compare it with a measured one. The fields are those of
  torch 2.13 (`torch/cuda/_memory_viz.py`, `torch/csrc/cuda/memory_snapshot.cpp`).
- `chrome_trace`: the schedule as trace events for https://ui.perfetto.dev and chrome://tracing: one
  track each for forward, backward and recomputations, and the memory by category as counters.
  Format: "Trace Event Format" (Google, 2016).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from remat.analysis.arena import Blocks, in_time_order
from remat.analysis.composition import Category, Composition
from remat.core.files import write_whole
from remat.core.graph import Graph
from remat.core.operators import Phase
from remat.core.schedule import Schedule
from remat.core.units import Units
from remat.look.labels import shape_text, short_target, source_parts
from remat.look.plot_schedule import is_first_time

EXPORT_SUFFIXES = (".pickle", ".json")
_BASE_ADDRESS = 0x7F00_0000_0000
_TRACKS = ("forward", "backward", "computed again")


def save(graph: Graph, schedule: Schedule, path: str | Path) -> None:
    """Writes a memory snapshot or a Chrome trace, if `path` ends in `.pickle` or `.json`.

    Raises:
        ValueError: the suffix is neither.
    """
    path = Path(path)
    if path.suffix == ".pickle":
        write_whole(path, pickle.dumps(memory_snapshot(graph, schedule), protocol=4))
    elif path.suffix == ".json":
        write_whole(path, json.dumps(chrome_trace(graph, schedule)).encode())
    else:
        raise ValueError(
            f"{path}: an export ends in .pickle (memory snapshot) or .json (Chrome trace)"
        )


def memory_snapshot(graph: Graph, schedule: Schedule) -> dict[str, Any]:
    """Returns the predicted step as a memory snapshot of one device with one segment.

    Resident values are allocated first and stay. Blocks have the addresses that a best-fit
    allocator gives them; an output computed in place continues its input's block. The time of an
    event is the cost of the steps before it, in microseconds.
    """
    blocks = Blocks.of(graph, schedule)
    resident = [v for v in graph.values if v.is_resident and v.size_bytes]

    base = _BASE_ADDRESS + sum(v.size_bytes for v in resident)
    address = in_time_order(blocks) + base
    total = base - _BASE_ADDRESS + blocks.arena_bytes(address - base)

    events = [_event("segment_alloc", _BASE_ADDRESS, total, 0, [])]
    where = _BASE_ADDRESS
    kept: list[tuple[int, int, list[dict[str, Any]]]] = []

    for value in resident:
        frames = [_frame(f"{value.kind} {value.name} {shape_text(value.dtype, value.shape)}")]
        events.append(_event("alloc", where, value.size_bytes, 0, frames))
        kept.append((where, value.size_bytes, frames))
        where += value.size_bytes

    allocations, left = _block_events(graph, schedule, blocks, address)
    segment = {
        "device": 0, "address": _BASE_ADDRESS, "total_size": total, "stream": 0,
        "segment_type": "large", "is_expandable": False,
        "segment_pool_id": (0, 0), "frames": [], "blocks": _segment_blocks([*kept, *left], total),
    }  # fmt: skip
    segment["allocated_size"] = segment["active_size"] = segment["requested_size"] = sum(
        size for _, size, _ in [*kept, *left]
    )

    return {
        "segments": [segment],
        "device_traces": [[*events, *allocations]],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _block_events(
    graph: Graph, schedule: Schedule, blocks: Blocks, address: Any
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns allocations and frees in order, and (address, size, frames) of the blocks left."""
    ends_s = np.cumsum(np.append(0.0, graph.arrays.cost_s[schedule.array]))
    scale = 1e6 if Units.of(graph).cost == "s" else 1.0
    num_half_steps = 2 * len(schedule.steps)

    moments = sorted(
        [(int(blocks.first[i]), 1, i) for i in range(len(address))]
        + [(int(blocks.last[i]) + 1, 0, i) for i in range(len(address))]
    )
    frames = {i: _block_frames(graph, schedule, blocks, i) for i in range(len(address))}
    outlives = set(graph.arrays.output.tolist())

    events, left = [], []
    for moment, is_alloc, i in moments:
        where, size, time_us = (
            int(address[i]),
            int(blocks.size_bytes[i]),
            int(scale * ends_s[min(moment // 2, len(ends_s) - 1)]),
        )

        if is_alloc:
            events.append(_event("alloc", where, size, time_us, frames[i]))
        elif moment >= num_half_steps and int(blocks.value[i]) in outlives:
            left.append((where, size, frames[i]))
        else:
            events += [
                _event(action, where, size, time_us, frames[i])
                for action in ("free_requested", "free_completed")
            ]

    return events, left


def _block_frames(
    graph: Graph, schedule: Schedule, blocks: Blocks, block: int
) -> list[dict[str, Any]]:
    op = graph.operators[schedule.steps[int(blocks.first[block]) // 2]]
    value = int(blocks.value[block])
    held = (
        f"{graph.values[value].name} "
        f"{shape_text(graph.values[value].dtype, graph.values[value].shape)}"
        if value >= 0
        else "workspace"
    )

    filename, line, code = source_parts(op.source)
    made_by = f"{op.phase} {short_target(op.target) or op.name} {op.module}".rstrip()
    frames = [_frame(held), _frame(made_by)]
    return [*frames, _frame(code, filename, line)] if line else frames


def _frame(name: str, filename: str = "remat", line: int = 0) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def _event(
    action: str, address: int, size: int, time_us: int, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": time_us,
        "frames": frames,
    }


def _segment_blocks(
    held: list[tuple[int, int, list[dict[str, Any]]]], total: int
) -> list[dict[str, Any]]:
    """Returns a segment's blocks and holes at the end of the step, in order of address."""
    blocks: list[dict[str, Any]] = []
    where = _BASE_ADDRESS

    for address, size, frames in sorted(held, key=lambda block: block[0]):
        if address > where:
            blocks.append(
                {
                    "address": where,
                    "size": address - where,
                    "requested_size": 0,
                    "state": "inactive",
                    "frames": [],
                }
            )

        blocks.append(
            {
                "address": address,
                "size": size,
                "requested_size": size,
                "state": "active_allocated",
                "frames": frames,
            }
        )
        where = address + size

    if where < _BASE_ADDRESS + total:
        rest = _BASE_ADDRESS + total - where
        blocks.append(
            {"address": where, "size": rest, "requested_size": 0, "state": "inactive", "frames": []}
        )

    return blocks


def chrome_trace(graph: Graph, schedule: Schedule) -> dict[str, Any]:
    """Returns the schedule as trace events.

    Times are costs in microseconds, or step numbers if all costs are 0.
    """
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [*_names(), *_slices(graph, schedule), *_counters(graph, schedule)],
    }


def _names() -> Iterator[dict[str, Any]]:
    yield {
        "name": "process_name",
        "ph": "M",
        "pid": 0,
        "tid": 0,
        "args": {"name": "predicted training step"},
    }

    for track, name in enumerate(_TRACKS):
        yield {"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}
        yield {
            "name": "thread_sort_index",
            "ph": "M",
            "pid": 0,
            "tid": track,
            "args": {"sort_index": track},
        }


def _slices(graph: Graph, schedule: Schedule) -> Iterator[dict[str, Any]]:
    begin_us = _times_us(graph, schedule)
    for step, (index, is_first) in enumerate(
        zip(schedule.steps, is_first_time(schedule.array), strict=True)
    ):
        op = graph.operators[index]
        track = 2 if not is_first else int(op.phase is Phase.BACKWARD)
        written = ", ".join(
            shape_text(graph.values[v].dtype, graph.values[v].shape) for v in op.writes
        )

        yield {
            "name": short_target(op.target) or op.name, "cat": _TRACKS[track], "ph": "X", "pid": 0,
            "tid": track, "ts": begin_us[step],
            "dur": begin_us[step + 1] - begin_us[step],
            "args": {
                "step": step, "operator": op.name, "module": op.module, "source": op.source,
                "writes": written,
            },
        }  # fmt: skip


def _counters(graph: Graph, schedule: Schedule) -> Iterator[dict[str, Any]]:
    parts, begin_us = Composition.of(graph, schedule), _times_us(graph, schedule)
    for step in range(len(schedule.steps)):
        held = {
            str(category): int(size)
            for category, size in zip(Category, parts.bytes_of[:, step], strict=True)
        }
        yield {"name": "memory (bytes)", "ph": "C", "pid": 0, "ts": begin_us[step], "args": held}


def _times_us(graph: Graph, schedule: Schedule) -> list[float]:
    cost = graph.arrays.cost_s[schedule.array] if graph.cost_s else np.ones(len(schedule.steps))
    scale = 1e6 if graph.cost_s and Units.of(graph).cost == "s" else 1.0
    return [float(at) for at in scale * np.cumsum(np.append(0.0, cost))]
