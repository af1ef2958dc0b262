"""Runs the Python blocks whose output the front page and the guide show.

    python -m experiments.front_page

Each block runs unchanged, in its own process, on a terminal of 80 columns. Writes
`results/front_page.json`; a test compares the pages with it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from experiments.figures import write

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "README.md", ROOT / "docs" / "choose-a-budget.md"
SHOWN = re.compile(r"^```python\n([^`]*?)^```\n\n```\n([^`]*?)^```$", re.MULTILINE)


def shown() -> list[tuple[str, str]]:
    """Returns each block whose output is shown, with that output (`...` where it is cut)."""
    return [(code, text) for page in PAGES for code, text in SHOWN.findall(page.read_text())]


def printed(code: str) -> str:
    """Runs a block and returns what it prints."""
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def main() -> None:
    """Runs, prints and writes."""
    outputs = [printed(code) for code, _ in shown()]
    print(*outputs, sep="\n")
    write("front_page", {"outputs": outputs}, seed=0)


if __name__ == "__main__":
    main()
