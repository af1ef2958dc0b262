"""The values that sizes, costs, indices, budgets and texts may have.

Graphs, schedules, solutions, instance files and caches all check with these functions, so they
accept the same values. Each function returns what is wrong in words, or an empty text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

MOST_BYTES = 2**53 - 1  # sums of sizes stay exact in floating point
MOST_BUDGET = 2**63 - 1  # budgets are only compared, as 64-bit integers
MOST_INDEX = 2**31 - 1  # products of two indices stay within 64 bits
MOST_COST, LEAST_COST = 1e100, 1e-100  # products and quotients of costs stay finite
LONGEST_TEXT = 10_000

# control characters (also those that command a terminal), text direction marks, lone surrogates
_NOT_PRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SHOWN = 80  # characters of a name in a message


def size_fault(size: int) -> str:
    """Returns what is wrong with a number of bytes.

    >>> size_fault(8), size_fault(-2)
    ('', 'the size -2; a size is a whole number from 0 to 9,007,199,254,740,991')
    """
    if 0 <= size <= MOST_BYTES and size == int(size):
        return ""
    return f"the size {shown(size)}; a size is a whole number from 0 to {MOST_BYTES:,}"


def cost_fault(cost: float) -> str:
    """Returns what is wrong with the cost of one operator.

    >>> cost_fault(0.5), cost_fault(-1.0)
    ('', 'the cost -1.0; a cost is 0, or from 1e-100 to 1e+100')
    """
    if cost == 0 or LEAST_COST <= cost <= MOST_COST:
        return ""
    return f"the cost {shown(cost)}; a cost is 0, or from {LEAST_COST:g} to {MOST_COST:g}"


def sum_fault(number: float) -> str:
    """Returns what is wrong with a sum of costs, or a time."""
    if math.isfinite(number) and number >= 0:
        return ""
    return f"{shown(number)}; a number that is finite and not negative is needed"


def index_fault(index: int) -> str:
    """Returns what is wrong with one index."""
    if 0 <= index <= MOST_INDEX:
        return ""
    return f"{shown(index)}; a whole number from 0 to {MOST_INDEX:,} is needed"


def indices_fault(indices: Sequence[int]) -> str:
    """Returns what is wrong with the first bad index; a few ms for 100,000 indices."""
    array = np.asarray(indices)
    if len(array) == 0:
        return ""
    if array.dtype.kind in "iu" and array.min() >= 0 and array.max() <= MOST_INDEX:
        return ""
    return next(filter(None, map(_one_index_fault, indices)), "")


def _one_index_fault(index: object) -> str:
    if isinstance(index, int | np.integer) and not isinstance(index, bool):
        return index_fault(int(index))
    return f"{shown(index)}; a whole number is needed"


def budget_fault(budget_bytes: int) -> str:
    """Returns what is wrong with the size of a budget; it may be negative."""
    if abs(budget_bytes) <= MOST_BUDGET:
        return ""
    return f"the budget {shown(budget_bytes)} bytes; at most {MOST_BUDGET:,} can be counted"


def texts_fault(texts: Sequence[str]) -> str:
    """Returns what is wrong with the first text that can't be printed or is too long.

    Searches all texts at once: 20 ms for the names of 100,000 operators.
    """
    if not _NOT_PRINTED.search("".join(texts)) and max(map(len, texts), default=0) <= LONGEST_TEXT:
        return ""
    return next(filter(None, map(_text_fault, texts)))


def _text_fault(text: str) -> str:
    if len(text) > LONGEST_TEXT:
        return (
            f"the text {shown(text)} of {len(text):,} characters; at most {LONGEST_TEXT:,} are "
            "allowed"
        )
    found = _NOT_PRINTED.search(text)
    return f"the text {shown(text)}; {found[0]!r} can't be printed" if found else ""


def printable(text: str) -> str:
    r"""Returns a text from outside, such as a source line, as one that `texts_fault` accepts.

    >>> printable("a\tb\x1b[31m")
    'a b [31m'
    """
    return _NOT_PRINTED.sub(" ", text)[:LONGEST_TEXT]


def shown(thing: object) -> str:
    """Returns a number or a text for a message, shortened if it is long.

    >>> shown(-(10**400)), shown("ab")
    ('-(2**1328 or more)', "'ab'")
    """
    if isinstance(thing, int) and not isinstance(thing, bool):
        size = thing.bit_length() - 1
        return f"{thing:,}" if size < 100 else f"{'-' * (thing < 0)}(2**{size} or more)"
    return shortened(repr(thing))


def shortened(text: str, length: int = _SHOWN) -> str:
    """Returns the text, cut to at most `length` characters."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
