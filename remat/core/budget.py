"""Memory budgets and sizes: parsed from text, and written as text."""

from __future__ import annotations

import re
from decimal import Decimal

from remat.core import limits
from remat.core.limits import shown

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*|%)\s*")
_HELP = (
    'write bytes as an int, or a text such as "8GiB", "7.5GB" or "60%" '
    "(of the peak of keeping everything)"
)

Budget = int | str


def parse_budget(budget: Budget, *, keep_all_bytes: int | None = None) -> int:
    """Returns the budget in bytes.

    Args:
        budget: bytes as an `int`, or a text: a number with an optional unit (`8GiB`, `7.5GB`; not
            `1e9`), or a percentage of `keep_all_bytes`. Percentages above 100 are allowed.
        keep_all_bytes: the peak of keeping everything, needed for a percentage only.

    Raises:
        TypeError: `budget` is neither an `int` nor a `str`.
        ValueError: the text does not parse, a percentage comes without `keep_all_bytes`, or the
            budget is not positive or above `limits.MOST_BUDGET`.

    >>> parse_budget("8GiB"), parse_budget("7.5GB"), parse_budget("60%", keep_all_bytes=1000)
    (8589934592, 7500000000, 600)
    """
    if isinstance(budget, bool) or not isinstance(budget, int | str):
        raise TypeError(f"budget {shown(budget)} is a {type(budget).__name__}; {_HELP}")
    size_bytes = budget if isinstance(budget, int) else _parse_text(budget, keep_all_bytes)
    if size_bytes <= 0:
        raise ValueError(f"budget {shown(budget)} is not positive; {_HELP}")
    if fault := limits.budget_fault(size_bytes):
        raise ValueError(fault)
    return size_bytes


def check_budget(budget: Budget) -> None:
    """Raises what `parse_budget` would raise whatever the peak of keeping everything is."""
    parse_budget(budget, keep_all_bytes=limits.MOST_BYTES if is_percentage(budget) else None)


def is_percentage(budget: Budget | None) -> bool:
    """True if the budget is a percentage of the peak of keeping everything."""
    return isinstance(budget, str) and budget.strip().endswith("%")


def _parse_text(text: str, keep_all_bytes: int | None) -> int:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"budget {shown(text)} does not parse; {_HELP}")

    number, unit = Decimal(match[1]), match[2].lower()
    if unit == "%":
        if keep_all_bytes is None:
            raise ValueError(
                f"budget {shown(text)} is a percentage, and the peak it refers to is not known "
                "here; write it in bytes"
            )
        return int(number * keep_all_bytes / 100)

    if unit not in _UNITS:
        known = ", ".join(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"])
        raise ValueError(
            f"budget {shown(text)} has the unknown unit {shown(match[2])} (known: {known}); {_HELP}"
        )
    return int(number * _UNITS[unit])


def format_bytes(size_bytes: float) -> str:
    """Returns `size_bytes` with about three significant digits and a binary unit.

    >>> format_bytes(2_007_959_040), format_bytes(512)
    ('1.87 GiB', '512 B')
    """
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return (
                f"{size:.0f} B"
                if unit == "B"
                else f"{size:.3g} {unit}"
                if abs(size) < 999.5
                else f"{size:.0f} {unit}"
            )
        size /= 1024
    return f"{size:,.2f} TiB"


def describe_bytes(size_bytes: int) -> str:
    """Returns the size with a binary unit, and in bytes.

    >>> describe_bytes(2_007_959_040)
    '1.87 GiB (2,007,959,040 bytes)'
    """
    return f"{format_bytes(size_bytes)} ({size_bytes:,} bytes)"
