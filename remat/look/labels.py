"""Operators, lines of source and shapes as short texts, for tables and pages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from remat.core.solution import Solution, Status

_SOURCE = re.compile(r"([^:]*):([0-9]{1,9}):?\s*(.*)", re.DOTALL)
SOURCE_WIDTH = 12  # columns for file and line


def bound_source(solutions: Sequence[Solution]) -> str:
    """Returns `proved`, or `stated by the file` if that is true of any of these bounds."""
    return next((s.bound_source for s in solutions if s.is_bound_stated), "proved")


def largest_infeasible(solutions: Sequence[Solution]) -> int:
    """Returns the largest budget in bytes that was proved infeasible; 0 without any."""
    infeasible = (s.budget_bytes for s in solutions if s.status is Status.INFEASIBLE)
    return max(infeasible, default=0)


def short_target(target: str) -> str:
    """Returns an operator's name without `aten.` and `.default`.

    >>> short_target("aten.mm.default")
    'mm'
    """
    return target.removeprefix("aten.").removesuffix(".default")


def short_source(source: str, width: int = SOURCE_WIDTH) -> str:
    """Returns file and line in at most `width` columns, shortening the file's name.

    >>> short_source("modeling_resnet.py:66: hidden_states = self.convolution(input)")
    'modeling…:66'
    """
    place = source.split(": ")[0]
    name, _, line = place.rpartition(":")
    short = f"{name[: max(0, width - len(line) - 2)]}…:{line}"
    return place if len(place) <= width else short[:width]


def source_parts(source: str) -> tuple[str, int, str]:
    """Returns the file, the line and the code of a source; line 0 if it names none.

    >>> source_parts("model.py:31: return x"), source_parts("model.py:²: x")
    (('model.py', 31, 'return x'), ('model.py:²: x', 0, ''))
    """
    match = _SOURCE.fullmatch(source)
    return (match[1], int(match[2]), match[3]) if match else (source, 0, "")


def shape_text(dtype: str, shape: Sequence[int]) -> str:
    """Returns type and shape as a short text.

    >>> shape_text("bfloat16", (8, 1024))
    'bf16[8,1024]'
    """
    kind = dtype.replace("uint", "u").replace("float", "f").replace("int", "i")
    return f"{kind}[{','.join(map(str, shape))}]" if dtype else ""
