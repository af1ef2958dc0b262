"""Takes a screenshot, in a real browser, of the report on the demo's GPT at 60 %.

    python -m experiments.report_page [--keep FOLDER]

The guide shows it. Needs the extra `report` and a browser (`experiments/browser.py`). Writes
`results/report_page.png`, the schedule alone as `results/report_page_schedule.png`,
`results/report_page.json`, and with `--keep` the page itself into FOLDER.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import remat
from experiments.browser import look
from experiments.command_line import parser_of
from experiments.figures import RESULTS, write
from remat.cli.demo import GPT, example_batch
from remat.look.plot import plot_schedule, save
from remat.look.report import Report

SEED = 0
BUDGET = "60%"
_DRAWN = (
    "window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle ? "
    "JSON.stringify(document.body.scrollHeight) : ''"
)


def main() -> None:
    """Plans, writes the page, opens it and takes its picture."""
    parser = parser_of(__doc__)
    parser.add_argument("--keep", type=Path, default=None, help="folder for the page")
    keep = parser.parse_args().keep

    torch.manual_seed(SEED)
    graph = remat.trace(GPT(), (example_batch(),))
    curve = remat.frontier(graph, 8, time_limit_s=4.0)
    solution = remat.solve(graph, BUDGET, time_limit_s=20.0)

    with tempfile.TemporaryDirectory() as folder:
        page = (keep or Path(folder)) / "report.html"
        Report(graph, solution).save(page, curve=curve, title="GPT of the demo")
        seen = look(page, _DRAWN, RESULTS / "report_page.png", width=1280, height=1565)

        numbers = {
            "page_bytes": page.stat().st_size,
            "height": seen.value,
            "errors": seen.errors,
            "requests": seen.requests,
        }

    assert solution.schedule is not None
    picture = plot_schedule(
        graph,
        solution.schedule,
        budget_bytes=solution.budget_bytes,
        title=f"The demo's GPT at {BUDGET}",
    )
    save(picture, RESULTS / "report_page_schedule.png")

    plan = {
        "budget_bytes": solution.budget_bytes,
        "peak_bytes": solution.peak_bytes,
        "overhead": solution.overhead,
        "gap": solution.gap,
    }

    write("report_page", {**numbers, **plan}, seed=SEED)
    print(numbers)


if __name__ == "__main__":
    main()
