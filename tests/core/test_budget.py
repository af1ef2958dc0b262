"""Budgets as people write them, and sizes as people read them."""

from __future__ import annotations

import pytest

from remat.core.budget import check_budget, describe_bytes, format_bytes, parse_budget
from remat.core.graph import Graph
from remat.core.operators import Operator, Value
from remat.core.units import Scale, Units


@pytest.mark.parametrize(
    ("budget", "size_bytes"),
    [
        (7, 7),
        ("7", 7),
        (" 7 B ", 7),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("7.5GB", 7_500_000_000),
        (".5kB", 500),
        ("3.KiB", 3072),
        ("1TiB", 2**40),
        ("60%", 600),
        ("12.5 %", 125),
        ("120%", 1200),
    ],
)
def test_every_way_of_writing_a_budget_is_read(budget: int | str, size_bytes: int) -> None:
    assert parse_budget(budget, keep_all_bytes=1000) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(999 << 20, "999 MiB"), (1_048_156_569, "1000 MiB"), ((1 << 30) - 1, "1024 MiB")],
)
def test_sizes_are_never_written_with_an_exponent(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_large_numbers_are_exact() -> None:
    assert parse_budget(str(2**60 + 1)) == 2**60 + 1
    assert parse_budget("9007199254740993B") == 9007199254740993  # no float equals 2**53 + 1


@pytest.mark.parametrize(
    "budget",
    ["", "GiB", "8 GiBs", "1e9", "-5", "8,5GB", "0", "0%", 0, -1, "nan", "inf", "८GB", "5 5"],
)
def test_an_invalid_budget_is_refused(budget: int | str) -> None:
    with pytest.raises(ValueError, match="budget"):
        parse_budget(budget, keep_all_bytes=1000)


@pytest.mark.parametrize("budget", [1.5, None, True, b"8GiB", ["8GiB"]])
def test_a_budget_of_the_wrong_type_is_refused(budget: object) -> None:
    with pytest.raises(TypeError, match="8GiB"):
        parse_budget(budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", ["0.001%", "60%", "800%", "5000 %", "8GiB", 7])
def test_a_budget_is_checked_before_the_peak_is_known(budget: int | str) -> None:
    check_budget(budget)


@pytest.mark.parametrize("budget", ["60x", "%", "0%", "8 GiBs", 0])
def test_the_check_refuses_what_no_peak_makes_right(budget: int | str) -> None:
    with pytest.raises(ValueError, match="budget"):
        check_budget(budget)


def test_an_unknown_unit_is_named() -> None:
    with pytest.raises(ValueError, match="'XB'"):
        parse_budget("8XB")


def test_a_percentage_needs_the_keep_all_peak() -> None:
    with pytest.raises(ValueError, match="percentage"):
        parse_budget("60%")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1000 * 2**20, "1000 MiB"),
        (2**30, "1 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_bytes_are_printed_in_the_unit_that_reads_best(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_bytes_are_printed_in_a_unit_and_to_the_byte() -> None:
    assert describe_bytes(2**30) == "1 GiB (1,073,741,824 bytes)"


@pytest.mark.parametrize(
    ("largest", "unit", "name"),
    [
        (0, "B", "B"),
        (2**20, "B", "MiB"),
        (2**20 - 1, "B", "KiB"),
        (2e-6, "s", "µs"),
        (12, "s", "s"),
        (3e8, "FLOP", "MFLOP"),
        (5e6, "", "million"),
    ],
)
def test_a_scale_is_the_largest_that_fits(largest: float, unit: str, name: str) -> None:
    assert Scale.for_largest(largest, unit).name == name


@pytest.mark.parametrize(
    ("device", "costs", "units"),
    [
        ("", "", Units("", "")),
        ("cpu", "", Units("B", "")),
        ("cuda", "roofline:H100", Units("B", "s")),
        ("", "profile", Units("B", "s")),
        ("cpu", "flops", Units("B", "FLOP")),
    ],
)
def test_a_graphs_device_and_costs_give_its_units(device: str, costs: str, units: Units) -> None:
    assert (
        Units.of(
            Graph((Value("a", 1),), (Operator("a", 1.0, (), (0,)),), device=device, costs=costs)
        )
        == units
    )
