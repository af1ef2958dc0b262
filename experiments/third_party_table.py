"""Results of other libraries' models: rows, files and the table."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .third_party_models.diffusion import DIFFUSION
from .third_party_models.graphs import GRAPHS
from .third_party_models.images import IMAGES
from .third_party_models.language import LANGUAGE
from .third_party_models.recurrent import RECURRENT
from .third_party_models.science import SCIENCE
from .third_party_models.steps import Registry, ThirdParty
from .third_party_models.tables import TABLES

RESULTS = Path(__file__).parent / "results" / "third_party.json"
EQUAL, DIFFERENT = "equal", "DIFFERENT"
EQUAL_TO_AOT_EAGER = "equal to aot_eager"
BELOW_LEAST = "below the least"
ABOVE_BUDGET = "ABOVE THE BUDGET"
_KINDS: tuple[Registry, ...] = (IMAGES, DIFFUSION, LANGUAGE, RECURRENT, TABLES, GRAPHS, SCIENCE)
ALL: dict[str, ThirdParty] = {n: m for kind in _KINDS for n, m in kind.models.items()}


@dataclass(frozen=True)
class Row:
    """One model at one budget.

    Attributes:
        name: the model's name.
        budget: "100%", "60%" or "least"; empty if nothing could be planned.
        outcome: "equal", "equal to aot_eager" (to the bit, with rounding that differs from plain
            PyTorch's), "DIFFERENT", "ABOVE THE BUDGET" (and equal), "below the least" (a budget
            that can't be met), "plain PyTorch differs from itself", or the first line of the error.
        difference: the largest difference from plain PyTorch in a tensor that a step leaves,
            relative to the tensor's largest entry.
        aot_eager: what PyTorch's own compilation of the same pieces does, if the outcome is not
            "equal": "equal to plain", "as planned" (the same bits), "different too", or its error.
        budget_bytes: what the whole step may hold.
        predicted_bytes: peak of the schedule, plus the reserve for the code between pieces.
        measured_bytes: peak of a planned step, measured from outside.
        plain_bytes: the same for plain PyTorch.
        overhead: extra compute, as a fraction.
        num_operators: operators of the step's graph.
        num_pieces: runs of compiled pieces in the step.
        wall_s: seconds for planning and running at this budget.
    """

    name: str
    budget: str
    outcome: str
    difference: float = 0.0
    aot_eager: str = ""
    budget_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    plain_bytes: int = 0
    overhead: float = 0.0
    num_operators: int = 0
    num_pieces: int = 0
    wall_s: float = 0.0


def load() -> dict[str, Any]:
    """Returns what was measured so far: model -> environment, library version and rows."""
    if not RESULTS.exists():
        return {}

    kept = json.loads(RESULTS.read_text())
    return {
        name: {
            "environment": {**kept["environments"][found["environment"]], "date": found["date"]},
            "version": found["version"],
            "rows": [asdict(Row(name=name, **row)) for row in found["rows"]],
        }
        for name, found in kept["models"].items()
    }


def save(known: dict[str, Any]) -> str:
    """Writes both files, each environment once; returns the table."""
    text = table([Row(**row) for found in known.values() for row in found["rows"]])
    environments: list[dict[str, Any]] = []
    lines = []

    for name in (name for name in ALL if name in known):
        machine = {key: value for key, value in known[name]["environment"].items() if key != "date"}
        if machine not in environments:
            environments.append(machine)

        model = {
            "environment": environments.index(machine),
            "date": known[name]["environment"]["date"],
            "version": known[name]["version"],
            "rows": [_short(row) for row in known[name]["rows"]],
        }
        lines.append(f"{json.dumps(name)}: {json.dumps(model)}")

    listed, models = ",\n".join(map(json.dumps, environments)), ",\n".join(lines)
    RESULTS.write_text(f'{{"environments": [\n{listed}\n],\n"models": {{\n{models}\n}}}}\n')
    RESULTS.with_suffix(".md").write_text(text + "\n")

    return text


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """A row without its name and zeros, floats to four digits."""
    kept = {
        key: value for key, value in row.items() if key != "name" and (value or key == "budget")
    }
    return {
        key: float(f"{value:.4g}") if isinstance(value, float) else value
        for key, value in kept.items()
    }


def outcomes(rows: list[Row]) -> Counter[str]:
    """Counts the models by outcome; a model has the outcome of its worst budget."""
    severity = (EQUAL, BELOW_LEAST, EQUAL_TO_AOT_EAGER)  # from good to bad; others are worse
    worst: dict[str, str] = {}
    for row in rows:
        found = [worst.get(row.name, EQUAL), row.outcome.partition(":")[0]]
        worst[row.name] = max(
            found, key=lambda outcome: severity.index(outcome) if outcome in severity else 9
        )
    return Counter(EQUAL if outcome == BELOW_LEAST else outcome for outcome in worst.values())


def table(rows: list[Row]) -> str:
    """Returns counts and rows as Markdown."""
    packages = {ALL[row.name].package for row in rows if row.name in ALL}
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes(rows).most_common())

    titles = [
        "library",
        "model",
        "budget",
        "outcome",
        "difference",
        "aot_eager",
        "pieces",
        "operators",
        "budget, B",
        "predicted",
        "measured",
        "plain",
        "overhead",
    ]

    head = [f"{len({row.name for row in rows})} models of {len(packages)} libraries: {counts}.", ""]
    head += [f"| {' | '.join(titles)} |", "|---|---|---|---|---:|---|" + "---:|" * 7]
    return "\n".join(head + [f"| {' | '.join(_cells(row))} |" for row in rows])


def _cells(row: Row) -> list[str]:
    model = ALL.get(row.name)
    start = [model.package if model else "", row.name, row.budget, row.outcome.replace("|", "/")]
    difference = f"{row.difference:.0e}" if row.difference else ""
    sizes = (row.budget_bytes, row.predicted_bytes, row.measured_bytes, row.plain_bytes)
    counts = [f"{count}" if count else "" for count in (row.num_pieces, row.num_operators)]
    end = [f"{size:,}" if size else "" for size in sizes]
    overhead = f"{100 * row.overhead:.1f} %" if row.num_operators else ""
    return [*start, difference, row.aot_eager.replace("|", "/"), *counts, *end, overhead]
