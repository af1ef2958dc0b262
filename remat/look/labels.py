"""Operators, places in a source and shapes as short texts, for tables and pages."""

from __future__ import annotations

from collections.abc import Sequence

SOURCE_WIDTH = 12  # columns for file and line


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
    return place if len(place) <= width else f"{name[: max(0, width - len(line) - 2)]}…:{line}"


def shape_text(dtype: str, shape: Sequence[int]) -> str:
    """Returns type and shape for people.

    >>> shape_text("bfloat16", (8, 1024))
    'bf16[8,1024]'
    """
    kind = dtype.replace("uint", "u").replace("float", "f").replace("int", "i")
    return f"{kind}[{','.join(map(str, shape))}]" if dtype else ""
