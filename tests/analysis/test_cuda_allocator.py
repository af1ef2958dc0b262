"""The model of CUDA's allocator: each rule, laws, and what an H100 showed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remat
from experiments.gpu import tables
from experiments.gpu.steps import STEPS, Place
from remat.analysis.arena import Blocks
from remat.analysis.cuda_allocator import CudaAllocator, expected_peaks
from remat.core.cuda_peaks import CudaPeaks
from remat.core.schedule import Schedule, simulate
from remat.tracers.synthetic import random_step, transformer
from tests.support.checkout import ROOT

KIB, MIB = 1 << 10, 1 << 20
SMALL, LARGE = 0, 1


def after(*sizes: int, is_expandable: bool = False) -> CudaPeaks:
    """The counts after requests, of which none is freed."""
    allocator = CudaAllocator(is_expandable=is_expandable)
    for size_bytes in sizes:
        allocator.allocate(size_bytes)
    return allocator.now


@pytest.mark.parametrize(
    ("size_bytes", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB - 1, MIB)]
)
def test_requests_are_rounded_up_to_grains(size_bytes: int, rounded: int) -> None:
    assert after(size_bytes).allocated_bytes == rounded


@pytest.mark.parametrize(
    ("size_bytes", "segment_bytes"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (11 * MIB - 1, 12 * MIB),
    ],
)
def test_the_segment_depends_on_the_size(size_bytes: int, segment_bytes: int) -> None:
    assert after(size_bytes).reserved_bytes == segment_bytes


def test_small_and_large_requests_do_not_share_segments() -> None:
    assert after(1, 2 * MIB).reserved_bytes == 22 * MIB


def test_a_small_block_is_split_down_to_one_grain() -> None:
    allocator = CudaAllocator()
    allocator.allocate(MIB)
    allocator.allocate(MIB - 512)
    (rest,) = allocator.pools[SMALL].free_blocks
    assert rest.size_bytes == 512
    assert allocator.now.allocated_bytes == 2 * MIB - 512


@pytest.mark.parametrize(("rest_bytes", "is_split"), [(MIB, False), (MIB + 512, True)])
def test_a_large_block_stays_whole_if_at_most_1_mib_would_remain(
    rest_bytes: int, is_split: bool
) -> None:
    allocator = CudaAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    allocator.allocate(12 * MIB - rest_bytes)
    assert allocator.now.allocated_bytes == 12 * MIB - (rest_bytes if is_split else 0)
    assert allocator.now.requested_bytes == 12 * MIB - rest_bytes


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = CudaAllocator()
    requests = [allocator.allocate(size * MIB) for size in (40, 30, 50)]
    for request in requests:
        allocator.free(request)
    allocator.allocate(28 * MIB)
    sizes = [block.size_bytes // MIB for block in allocator.pools[LARGE].free_blocks]
    assert sizes == [2, 40, 50] and allocator.now.reserved_bytes == 120 * MIB


def test_free_neighbours_merge_and_others_do_not() -> None:
    allocator = CudaAllocator()
    first, middle, last = (allocator.allocate(6 * MIB) for _ in range(3))
    assert allocator.now.reserved_bytes == 20 * MIB
    allocator.free(first)
    allocator.free(last)
    assert [b.size_bytes // MIB for b in allocator.pools[LARGE].free_blocks] == [6, 8]
    allocator.free(middle)
    assert [b.size_bytes // MIB for b in allocator.pools[LARGE].free_blocks] == [20]


def test_fragments_are_of_no_use_to_a_larger_request() -> None:
    """What `expandable_segments` is for: three free segments, and none is large enough."""
    sizes = [20 * MIB] * 3
    for is_expandable, wanted in ((False, 120 * MIB), (True, 60 * MIB)):
        allocator = CudaAllocator(is_expandable=is_expandable)
        for request in [allocator.allocate(size) for size in sizes]:
            allocator.free(request)
        allocator.allocate(60 * MIB)
        assert allocator.now.reserved_bytes == wanted


def test_an_expandable_segment_grows_by_pages_and_splits_to_one_grain() -> None:
    assert after(MIB + 512, is_expandable=True).reserved_bytes == 20 * MIB
    assert after(15 * MIB, 15 * MIB, 15 * MIB, is_expandable=True).reserved_bytes == 60 * MIB
    assert after(1, is_expandable=True).reserved_bytes == 2 * MIB
    allocator = CudaAllocator(is_expandable=True)
    allocator.allocate(20 * MIB - 512)
    assert allocator.now.allocated_bytes == 20 * MIB - 512


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    """Naive: the end is the best fit, and what could have grown there later has no room."""
    allocator = CudaAllocator(is_expandable=True)
    hole = allocator.allocate(10 * MIB)
    allocator.allocate(5 * MIB)  # 5 MiB are free at the end
    allocator.free(hole)
    allocator.allocate(4 * MIB)
    assert [b.size_bytes // MIB for b in allocator.pools[LARGE].free_blocks] == [5, 6]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 9)), max_size=60), st.booleans())
def test_laws(events: list[tuple[int, int]], is_expandable: bool) -> None:
    """Each event allocates, and frees one of the last requests if its second number is low."""
    allocator, held = CudaAllocator(is_expandable=is_expandable), []
    for size_bytes, victim in events:
        held.append(allocator.allocate(size_bytes))
        if victim < min(6, len(held)):
            allocator.free(held.pop(victim))
        now = allocator.now
        free = sum(b.size_bytes for pool in allocator.pools for b in pool.free_blocks)
        assert now.requested_bytes <= now.allocated_bytes <= now.reserved_bytes
        assert now.allocated_bytes + free == now.reserved_bytes

    for request in held:
        allocator.free(request)
    assert allocator.now.allocated_bytes == allocator.now.requested_bytes == 0
    for pool in allocator.pools:
        assert sorted(b.size_bytes for b in pool.free_blocks) == sorted(pool.segments)
    assert allocator.peaks.reserved_bytes == allocator.now.reserved_bytes


@given(st.integers(0, 12), st.integers(0, 2**32 - 1), st.booleans())
def test_what_a_schedule_requests_is_its_simulated_peak(
    count: int, seed: int, is_expandable: bool
) -> None:
    """It is less where a value of another size takes over memory while a step runs."""
    graph = random_step(count, seed=seed)
    schedule = Schedule.keep_all(graph)
    peaks = expected_peaks(graph, schedule, is_expandable=is_expandable)
    assert peaks.requested_bytes <= simulate(graph, schedule).peak_bytes
    blocks = Blocks.of(graph, schedule)
    assert peaks.requested_bytes == graph.resident_bytes + blocks.live_bytes


def test_later_steps_are_counted_with_what_earlier_ones_left() -> None:
    graph = transformer(2)
    one, three = (expected_peaks(graph, Schedule.keep_all(graph), num_steps=n) for n in (1, 3))
    assert one.requested_bytes == three.requested_bytes
    assert one.reserved_bytes <= three.reserved_bytes


def test_an_h100_allocated_and_reserved_what_is_expected() -> None:
    """12 layers of GPT-2 medium in plain PyTorch (`experiments/results/gpu_run.jsonl`)."""
    pytest.importorskip("transformers")
    name = "gpt2-medium, 12 layers, no dropout"
    facts = tables.compared(tables.read(ROOT / "experiments/results/gpu_run.jsonl"))
    fact = next(f for f in facts if (f["model"], f["way"]) == (name, "plain"))
    measured = {count: fact[count] - fact["base"] for count in ("allocated", "reserved")}

    model, batch = STEPS[name](Place("meta", is_tiny=False))
    graph = remat.trace(model, (), batch, device="H100")
    expected = expected_peaks(graph, Schedule.keep_all(graph))
    assert abs(expected.allocated_bytes / measured["allocated"] - 1) < 1e-4
    assert abs(expected.reserved_bytes / measured["reserved"] - 1) < 0.01
