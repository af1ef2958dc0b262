"""The module and line of code of a traced operator, for reports and per-block baselines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import fx

from remat.core.limits import printable

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')
# Our own frames that call the model. For torch's own modules they would be the innermost frames.
_OWN = {("torch_border", "modules.py"), ("face", "step_function.py")}
# the captured module: a local or global of the captured frame, of any name
_ROOT = re.compile(r"^[LG]\['[^']*'\]")
_INDEXED = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]")


def module_of(node: fx.Node) -> str:
    """Returns the path of the innermost module that made `node`, such as `blocks.0.attn`.

    It is empty for the captured module itself. A backward operator belongs to the module of the
    forward operator that it differentiates.
    """
    stack: dict[str, Any] = (
        node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    )
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = _INDEXED.sub(lambda match: "." + (match[1] or match[2] or match[3]), _ROOT.sub("", path))
    return printable(path.strip("."))


def source_of(node: fx.Node) -> str:
    """Returns the user's line of code that made `node`; empty if unknown.

    For example `model.py:31: return self.down(x)`.
    """
    frames = [
        frame
        for frame in _FRAME.finditer(node.meta.get("stack_trace") or "")
        if Path(frame["file"]).parts[-2:] not in _OWN
    ]

    if not frames:
        return ""

    frame = frames[-1]
    return printable(f"{Path(frame['file']).name}:{frame['line']}: {frame['code'].strip()}")
