"""Numbers, pictures, links and commands in the documents.

Numbers match the result files; every file and command that is named exists.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from experiments import coverage
from experiments.all import FIGURES
from experiments.checkmate_figures import cells_of_table_2
from experiments.front_page import shown
from experiments.predicted_vs_measured import Row, _cells
from remat.cli.commands import app
from tests.support.checkout import ROOT

RESULTS = ROOT / "experiments" / "results"
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(ROOT.glob("[!.]*/**/README.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(RESULTS.glob("README.md")),
]


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(text: str) -> set[str]:
    return {re.sub(r"\s+", " ", line.strip()) for line in text.splitlines() if line.startswith("|")}


def everything() -> str:
    return "\n".join(path.read_text() for path in DOCUMENTS)


def found_in(pattern: str) -> set[tuple[str, str]]:
    found = {
        (path.relative_to(ROOT).as_posix(), match)
        for path in DOCUMENTS
        for match in re.findall(pattern, path.read_text())
    }
    assert found, pattern
    return found


def test_measured_peaks_match_the_result_file() -> None:
    shown = rows_of(everything())
    rows = [Row(**row) for model in read("predicted_vs_measured").values() for row in model["rows"]]
    assert rows
    for row in rows:
        assert f"| {' | '.join(_cells(row))} |".replace("|  |", "| |") in shown


def outcomes_in(path: Path) -> Counter[str]:
    models = coverage.load(path).values()
    return coverage.outcomes([coverage.Row(**row) for model in models for row in model["rows"]])


def test_the_coverage_matches_the_result_files() -> None:
    page = re.sub(r"\s+", " ", everything())
    counts, modules = map(outcomes_in, (coverage.RESULTS, coverage.MODULES))
    assert (
        f"Of {counts.total()} architectures, each at 100 %, 70 % and its least budget, "
        f"dropout on: {counts.pop('equal')} equal plain" in page
    )

    in_pieces = [
        counts.pop(way)
        for way in (
            "equal to aot_eager",
            "BudgetError at a later step",
            "equal, above predicted on a path of its own",
        )
    ]

    assert (
        f"{sum(in_pieces)} others run in the pieces that `torch.compile` cuts them into. "
        f"{in_pieces[0]} of these equal plain" in page
    )
    assert f"at every budget. {in_pieces[1]} raises a `BudgetError` in a later step" in page
    assert f"{in_pieces[2]} took a new path" in page

    assert f"{counts.pop('TraceError')} models are refused with a `TraceError`" in page
    assert not counts

    assert f"Of {modules.total():,} cases of `torch.nn`'s modules" in page
    assert (
        f"{modules.pop('equal'):,} are equal within their budgets, "
        f"{modules.pop('equal to aot_eager')} equal `aot_eager`, " in page
    )
    assert (
        f"and {modules.pop('TraceError')} are refused (an LSTM on the CPU runs in oneDNN)." in page
    )
    assert not modules


def test_published_graphs_match_the_result_file() -> None:
    shown = rows_of(everything())
    for row in read("checkmate_published")["rows"]:
        ours = f"{row['cost']:,.0f} | {row['bound']:,.0f} | {row['seconds']:.1f}"
        numbers = f"| {ours} | {row['published_cost']:,} | {row['published_seconds']:g} |"
        assert any(line.endswith(numbers) for line in shown), numbers


def test_the_front_pages_demo_matches_the_result_file() -> None:
    shown, runs = (
        rows_of((ROOT / "README.md").read_text()),
        json.loads((RESULTS / "demo" / "demo.json").read_text())["runs"],
    )

    for run in runs:
        peak = (
            f"{run['peak_bytes'] / 2**20:.0f} MiB, "
            f"{100 * run['peak_bytes'] / runs[0]['peak_bytes']:.0f} %"
        )
        numbers = (
            f"| {peak} | {1000 * run['step_s']:.0f} ms, {run['step_ratio']:.2f} x | "
            f"{run['loss']:.6f} |"
        )
        assert any(numbers in line for line in shown), numbers


def test_the_front_page_shows_what_its_blocks_print() -> None:
    outputs = read("front_page")["outputs"]
    blocks = [text for _, text in shown()]
    assert len(blocks) == len(outputs) >= 2

    for text, output in zip(blocks, outputs, strict=True):
        printed = iter(line.rstrip() for line in output.splitlines())
        for line in (
            line.rstrip() for line in text.splitlines() if line.strip() not in ("", "...")
        ):
            assert line in printed, f"not printed, or not in this order: {line}"


def test_the_times_of_small_steps_match_the_result_file() -> None:
    page = re.sub(r"\s+", " ", everything())
    small, middle, large = read("speed")["step"]

    assert (
        f"At 100 % a {1000 * small['plain_s']:.0f} ms step takes {small['ratio']:.2f} times "
        "plain's time" in page
    )
    assert (
        f"one of {middle['plain_s']:.1f} s {middle['ratio']:.3f}, one of "
        f"{large['plain_s']:.1f} s {large['ratio']:.3f}" in page
    )


def test_the_largest_graph_is_solved_as_the_guide_says() -> None:
    largest = max(read("bench_scale")["rows"], key=lambda row: row["operators"])
    assert (
        "more than 100,000 operators within 1 % of each other in less than a minute"
        in (ROOT / "docs" / "how-it-works.md").read_text()
    )
    assert largest["operators"] > 100_000 and largest["gap_percent"] < 1 and largest["seconds"] < 60


def test_the_time_of_all_figures_is_as_stated() -> None:
    minutes = sum(read(name)["run"]["wall_s"] for name in FIGURES) / 60
    assert f"took {minutes:.0f} minutes in all" in (RESULTS / "README.md").read_text()


def test_checkmates_table_2_matches_the_result_file() -> None:
    shown = rows_of((RESULTS / "README.md").read_text())
    for cells in cells_of_table_2(read("checkmate_figures")):
        assert f"| {' | '.join(cells)} |" in shown


def pictures() -> Iterator[tuple[str, Path]]:
    for document, link in found_in(r"!\[[^\]]*\]\(([^)]+)\)"):
        yield document, (ROOT / document).parent / link


def test_every_picture_has_a_result_file_with_date_seed_and_machine() -> None:
    found = list(pictures())
    assert len(found) >= 5

    for document, picture in found:
        assert picture.is_file(), f"{document} shows {picture.name}"
        name = re.sub(r"_figure\d", "_figures", picture.stem).removesuffix("_schedule")

        if name.startswith("gpu_run"):  # one fact per line
            record = picture.with_name("gpu_run.jsonl")
            facts = map(json.loads, record.read_text().splitlines())
            content = next(fact for fact in facts if fact["section"] == "environment")
        else:
            is_demo = picture.parent.name == "demo"
            record = picture.parent / ("demo.json" if is_demo else f"{name}.json")
            content = json.loads(record.read_text())

        made = content.get("environment", content)
        assert {"date", "seed", "python", "cores"} <= set(made), record.name


def test_every_link_to_a_file_leads_somewhere() -> None:
    for document, link in found_in(r"\]\(([^)#:]+)(?:#[^)]*)?\)"):
        assert ((ROOT / document).parent / link).exists(), f"{document} links to {link}"


def test_every_named_path_exists() -> None:
    for document, path in found_in(
        r"`((?:experiments|tests|solvers|tracers|remat|docs)/[\w./-]+\.(?:py|json|md|png|csv))`"
    ):
        assert (ROOT / path).exists(), f"{document} names {path}"


def test_every_named_command_exists() -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for document, name in found_in(r"`remat (\w+)[^`|]*`"):
        assert name in commands, f"{document} names remat {name}"
    for document, name in found_in(r"(?:python|torchrun[^`\n]*) -m (experiments\.\w+)"):
        assert importlib.util.find_spec(name) or name.endswith(".NAME"), f"{document} names {name}"


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_of_make_experiments_exists_and_is_in_the_index(name: str) -> None:
    record = read(name)
    assert {"date", "commit", "seed", "processor", "packages"} <= set(record["environment"])
    assert list(RESULTS.glob(f"{name.removesuffix('s')}*.png"))
    assert f"`{name}.py`" in (ROOT / "experiments" / "README.md").read_text()
