"""Bytes at each kernel, known before any code is written, and the loops to blame for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.operators import Operator, Value
from remat.core.schedule import Schedule, simulate
from remat.inductor.kernel_order import Loop, Loops


def chain(sizes: list[int]) -> Loops:
    """Each loop reads what the one before wrote; the first reads an input."""
    loops = [
        Loop(place, frozenset({place - 1} if place else ()), (place,), (place + 1,))
        for place in range(len(sizes) - 1)
    ]
    return Loops(tuple(loops), tuple(sizes), frozenset({0}), frozenset({len(sizes) - 1}))


def test_each_kernel_holds_what_it_reads_and_writes() -> None:
    loops = chain([5, 10, 20, 40])
    assert loops.bytes_at(loops.alone) == [5 + 10, 10 + 20, 20 + 40]


def test_a_buffer_within_one_kernel_is_never_held() -> None:
    loops = chain([5, 10, 20, 40])
    assert loops.bytes_at([[0, 1], [2]]) == [5 + 20, 20 + 40]
    assert 1 not in loops.spans([[0, 1], [2]])


def test_a_concatenation_exists_once_its_first_part_is_written() -> None:
    loops = (
        Loop(0, frozenset(), (0,), (2,)),
        Loop(1, frozenset({0}), (0,), (1,)),
        Loop(2, frozenset({1}), (1,), (2,)),
        Loop(3, frozenset({0, 2}), (2,), (3,)),
    )
    half = Loops(loops, (1, 5, 100, 10), frozenset({0}), frozenset({3}))
    assert half.bytes_at(half.alone) == [1 + 100, 1 + 5 + 100, 5 + 100, 100 + 10]
    assert half.launches(half.alone, limit_bytes=106) == [[[0], [1], [2]], [[3]]]


def test_an_input_that_no_kernel_reads_is_held_to_the_end() -> None:
    loops = (Loop(0, frozenset(), (0,), (2,)), Loop(1, frozenset({0}), (2,), (3,)))
    half = Loops(loops, (5, 100, 10, 20), frozenset({0, 1}), frozenset({3}))
    assert half.bytes_at(half.alone) == [5 + 100 + 10, 100 + 10 + 20]


def test_a_loop_overwrites_a_buffer_that_it_reads_last() -> None:
    loops = (
        Loop(0, frozenset(), (), (0,)),
        Loop(1, frozenset({0}), (0,), (1,), overwrites=frozenset({0})),
        Loop(2, frozenset({1}), (1,), (2,)),
    )
    half = Loops(loops, (8, 8, 8), frozenset(), frozenset({2}))
    assert half.bytes_at(half.alone) == [8, 8, 16]


def test_a_buffer_of_two_independent_readers_is_not_overwritten() -> None:
    loops = (
        Loop(0, frozenset(), (), (0,)),
        Loop(1, frozenset({0}), (0,), (1,), overwrites=frozenset({0})),
        Loop(2, frozenset({0}), (0,), (2,), overwrites=frozenset({0})),
    )
    half = Loops(loops, (8, 8, 8), frozenset(), frozenset({1, 2}))

    assert half.bytes_at([[0], [1, 2]]) == [8, 24]
    assert half.bytes_at([[0], [1], [2]]) == [8, 16, 16]


def test_a_buffer_of_an_earlier_reader_is_overwritten() -> None:
    loops = (
        Loop(0, frozenset(), (), (0,)),
        Loop(1, frozenset({0}), (0,), (1,)),
        Loop(2, frozenset({0, 1}), (0, 1), (2,), overwrites=frozenset({0})),
    )
    half = Loops(loops, (8, 2, 8), frozenset(), frozenset({1, 2}))
    assert half.bytes_at([[0], [1, 2]]) == [8, 10]


def test_kernels_run_in_order_of_place_after_what_they_need() -> None:
    loops = (
        Loop(7, frozenset(), (), (0,)),
        Loop(3, frozenset(), (), (1,)),
        Loop(5, frozenset({0}), (0,), (2,)),
    )
    half = Loops(loops, (1, 1, 1), frozenset(), frozenset({2}))
    assert half.in_order(half.alone) == [[1], [0], [2]]


def test_kernels_are_joined_while_their_buffers_fit_together() -> None:
    half = chain([5, 10, 20, 40])
    assert half.launches(half.alone, limit_bytes=1000) == [half.alone]
    assert half.launches(half.alone, limit_bytes=60) == [[[0], [1]], [[2]]]
    assert half.launches(half.alone, limit_bytes=0) == [[[0]], [[1]], [[2]]]


def test_all_buffers_of_a_joined_function_exist_together() -> None:
    """Naive: a buffer that a later kernel of the function writes does not exist yet."""
    half = chain([5, 10, 20, 40])
    together = half.launches(half.alone, limit_bytes=1000)
    assert half.bytes_together(together) == [75]
    one_by_one = half.launches(half.alone, limit_bytes=0)
    assert half.bytes_together(one_by_one) == half.bytes_at(half.alone)


def test_kernels_that_need_each_other_are_an_error() -> None:
    half = chain([1, 1, 1, 1])
    with pytest.raises(ValueError, match="need each other"):
        half.in_order([[0, 2], [1]])


def test_a_loop_far_from_its_kernel_is_to_blame() -> None:
    """A large input is read early, and its reader shares a kernel with the last loop."""
    loops = (
        Loop(0, frozenset(), (0,), (1,)),  # frees the large input, if it runs in its place
        Loop(1, frozenset(), (), (2,)),
        Loop(2, frozenset({1}), (2,), (3,)),
        Loop(10, frozenset({0, 2}), (1, 3), (4,)),
    )
    half = Loops(loops, (100, 1, 50, 1, 1), frozenset({0}), frozenset({4}))

    together = half.in_order([[0, 3], [1], [2]])
    assert max(half.bytes_at(half.in_order(half.alone))) == 101
    assert max(half.bytes_at(together)) == 151

    assert half.to_blame(together, limit_bytes=151) == {}
    assert half.to_blame(together, limit_bytes=120) == {0: 5}  # half of a distance of ten


@st.composite
def halves(draw: st.DrawFn) -> Loops:
    """Random loops in order, each of which writes a buffer and reads some written before."""
    count = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    loops = []
    for place in range(count):
        reads = draw(st.sets(st.integers(0, place - 1))) if place else set[int]()
        loops.append(Loop(place, frozenset(reads), tuple(sorted(reads)), (place,)))
    return Loops(tuple(loops), tuple(sizes), frozenset(), frozenset({count - 1}))


@given(halves())
def test_unfused_loops_hold_what_the_simulator_says(half: Loops) -> None:
    operators = tuple(
        Operator(f"op{i}", 1.0, loop.reads, loop.writes) for i, loop in enumerate(half.loops)
    )
    values = tuple(Value(f"v{i}", size) for i, size in enumerate(half.size_bytes))
    graph = Graph(values, operators, outputs=tuple(half.outputs))
    simulated = simulate(graph, Schedule.keep_all(graph))
    assert half.bytes_at(half.in_order(half.alone)) == simulated.bytes_at.tolist()
