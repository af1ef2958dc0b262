"""What the front page's Python blocks print, where it shows what they print.

    python -m experiments.front_page

Each block runs as it stands in the README, in a process of its own on a terminal of 80 columns.
Writes `results/front_page.json`; a test compares the front page with it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from experiments.figures import write

README = Path(__file__).parent.parent / "README.md"
SHOWN = re.compile(r"^```python\n([^`]*?)^```\n\n```\n([^`]*?)^```$", re.MULTILINE)


def shown() -> list[tuple[str, str]]:
    """Returns each block whose output is shown, and that output, shortened where it says `...`."""
    return [(code, text) for code, text in SHOWN.findall(README.read_text())]


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
