"""Every Python block of the documents runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import remat

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks() -> list[tuple[str, str]]:
    documents = [
        ROOT / "README.md",
        *sorted(ROOT.glob("*/README.md")),
        *sorted(path for path in ROOT.glob("docs/*.md") if path.name != "README.md"),
    ]
    return [(f"{path.relative_to(ROOT)}-{i}", code) for path in documents for i, code in enumerate(BLOCK.findall(path.read_text()))]


@pytest.mark.parametrize(("name", "code"), _blocks(), ids=[name for name, _ in _blocks()])
def test_block_runs(name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the demo's GPT has fewer layers and plans less time: what the blocks show does not depend on either."""
    monkeypatch.setattr("remat.demo.LAYERS", 2)
    for planner in (remat.checkpoint, remat.solve):
        defaults = planner.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "time_limit_s", 2.0)
    exec(compile(code.replace("/tmp/", f"{tmp_path}/"), name, "exec"), {"__name__": "__main__"})


def test_the_front_page_has_code() -> None:
    assert sum(name.startswith("README.md") for name, _ in _blocks()) >= 2
