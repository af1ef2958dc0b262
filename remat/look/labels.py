"""Operators, places in a source and shapes as short texts, for tables and pages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from remat.core.solution import Solution

_SOURCE = re.compile(r"([^:]*):([0-9]{1,9}):?\s*(.*)", re.DOTALL)
SOURCE_WIDTH = 12  # columns for file and line


def bound_source(solutions: Sequence[Solution]) -> str:
    """Returns who says the bounds of these solutions: all are proved, or a file states some."""
    return next((s.bound_source for s in solutions if s.is_bound_stated), "proved")


def short_target(target: str) -> str:
    """Returns an operator's name for people.

    >>> short_target("aten.mm.default")
    'mm'
    """
    return target.removeprefix("aten.").removesuffix(".default")


def short_source(source: str, width: int = SOURCE_WIDTH) -> str:
    """Returns file and line in a number of columns.

    What is too long loses letters of the file, not of the line.

    >>> short_source("modeling_resnet.py:66: hidden_states = self.convolution(input)")
    'modeling…:66'
    """
    place = source.split(": ")[0]
    name, _, line = place.rpartition(":")
    short = f"{name[: max(0, width - len(line) - 2)]}…:{line}"
    return place if len(place) <= width else short[:width]


def source_parts(source: str) -> tuple[str, int, str]:
    """Returns the file, the line and the code of a source; line 0 where it names none.

    >>> source_parts("model.py:31: return x"), source_parts("model.py:²: x")
    (('model.py', 31, 'return x'), ('model.py:²: x', 0, ''))
    """
    match = _SOURCE.fullmatch(source)
    return (match[1], int(match[2]), match[3]) if match else (source, 0, "")


def shape_text(dtype: str, shape: Sequence[int]) -> str:
    """Returns type and shape for people.

    >>> shape_text("bfloat16", (8, 1024))
    'bf16[8,1024]'
    """
    kind = dtype.replace("uint", "u").replace("float", "f").replace("int", "i")
    return f"{kind}[{','.join(map(str, shape))}]" if dtype else ""
