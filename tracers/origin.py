"""Where a traced operator comes from.

Its module and its line of code, for reports and per-block baselines.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import fx

from remat.core.limits import printable

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')
# calls the model: the innermost frame of what torch's own modules compute
_OWN = {("torch_border", "modules.py"), ("face", "step_function.py")}
# the module that was captured: a local or global of the captured frame, of any name
_ROOT = re.compile(r"^[LG]\['[^']*'\]")
_INDEXED = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]")


def module_of(node: fx.Node) -> str:
    """Returns the path of the innermost module that made `node`, such as `blocks.0.attn`.

    Empty at the top.

    A backward operator belongs to the module of the forward operator it differentiates.
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
    """Returns the line of user code that made `node`, such as `model.py:31: return self.down(x)`;
    empty if unknown.
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
