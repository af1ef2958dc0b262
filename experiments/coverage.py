"""Do planned steps equal plain ones? All architectures, and every module of `torch.nn`.

    python -m experiments.coverage [MODEL ...]             # all architectures, or those named
    python -m experiments.coverage --modules [CASE ...]    # torch.nn, by PyTorch's own database
    python -m experiments.coverage [--modules] --missing   # only those without rows

Each architecture runs at 100 %, 70 % and the least budget, with dropout on. Loss, gradients,
buffers and random state are compared with plain PyTorch's to the bit; the predicted peak, the
measured peak and the overhead are recorded. A step that can't be captured must raise a
`TraceError`, whose first line goes into the table. Plain PyTorch is compared with itself first.

A step that `torch.compile` cuts into pieces is planned as one; sums over pieces may round
differently, and then the step has to equal PyTorch's own `aot_eager` in the same pieces (see
`graph_breaks`). Plans are searched for one second with roofline costs, so overheads are upper
bounds. The least budget is that of `remat.minimum`. If it is too small for a later step in pieces,
the budget that the error names is used. If the least budget is above 70 % of keeping everything,
the table says so.

Writes `coverage.json` and `.md` in `experiments/results`, with `--modules` `coverage_modules.json`
and `.md`. Models named on the command line are measured again; the others keep their rows.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import remat
from remat.run.capture import GraphBreak
from remat.solvers.auto.minimum import Minimum, minimum
from remat.solvers.auto.reuse import Shared
from remat.solvers.auto.solver import Auto

from .command_line import parser_of
from .comparison import is_same_step, peak_bytes, state_after_step
from .coverage_models import ARCHITECTURES
from .coverage_modules import module_cases
from .environment import environment
from .graph_breaks import compare, in_pieces
from .models import Workload

RESULTS = Path(__file__).parent / "results" / "coverage.json"
MODULES = RESULTS.with_name("coverage_modules.json")
_OF_MODULES = "torch.nn"  # the family of MODULES' rows
SEED = 0
_TIME_LIMIT_S = 1.0  # plans only have to be correct here, not cheap
_ATTEMPTS = 4  # at the least budget: only a step shows what code between pieces holds
_COSTS = "roofline"  # independent of the load on the machine
_EQUAL = "equal"
_EQUAL_IN_PIECES = "equal to aot_eager"
_DIFFERENT = "DIFFERENT"
_BELOW_LEAST = "below the least"
_FAILED = "FAILED"
_ABOVE_PREDICTED = "ABOVE PREDICTED"
_ANOTHER_PATH = "equal, above predicted on a path of its own"
_LATER_REFUSED = "BudgetError at a later step"


@dataclass(frozen=True)
class Row:
    """One model at one budget.

    Attributes:
        family: the family of the architecture, or "torch.nn".
        name: the model's name.
        budget: "100%", "70%" or "least"; empty if the step was refused.
        outcome: "equal", "equal to aot_eager" (in pieces, which round differently from the whole),
            "DIFFERENT", "ABOVE PREDICTED" (equal, at a higher peak), "equal, above predicted on a
            path of its own" (data led the measured step through pieces that were not planned, as
            with experts in a Python loop), "BudgetError at a later step" (in pieces: on another
            path, or because the code between pieces holds more), "below the least" (a budget that
            can't be met), "plain PyTorch differs from itself", or the error's text.
        predicted_bytes: peak of the schedule in the simulator; the other numbers are defined as in
            `predicted_vs_measured`.
    """

    family: str
    name: str
    budget: str
    outcome: str
    predicted_bytes: int = 0
    measured_bytes: int = 0
    plain_bytes: int = 0
    overhead: float = 0.0
    num_operators: int = 0
    wall_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """True if the step equals the plain one within the predicted peak, or no plan can fit."""
        return self.outcome in (_EQUAL, _BELOW_LEAST)


def main() -> None:
    """Measures the requested models; writes the results and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--modules", action="store_true", help="the modules of torch.nn")
    parser.add_argument("--missing", action="store_true", help="only models without rows")
    asked = parser.parse_args()

    path = MODULES if asked.modules else RESULTS
    known, cases = load(path), _modules() if asked.modules else _architectures()
    if unknown := set(asked.models) - {name for name, _, _ in cases}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; {path.name} has the names")
    if asked.missing:
        cases = [case for case in cases if case[0] not in known]
    if asked.models:
        cases = [case for case in cases if case[0] in asked.models]

    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    _compile_search()
    gc.freeze()  # each measured step collects garbage first; objects loaded by now need no scan

    for name, family, make in cases:
        rows = measure(name, family, make)
        made = {**environment(seed=SEED), "threads": torch.get_num_threads()}
        known[name] = {"environment": made, "rows": [asdict(row) for row in rows]}
        _save(known, path)

        print(
            name,
            *(f"{row.budget} {row.outcome}".strip() for row in rows),
            sep=" | ",
            file=sys.stderr,
            flush=True,
        )

    print(_save(known, path))


def load(path: Path) -> dict[str, Any]:
    """Returns what was measured so far: model -> its environment and its rows."""
    if not path.exists():
        return {}

    kept = json.loads(path.read_text())
    return {
        name: {
            "environment": {"date": found["date"], **kept["environments"][found["environment"]]},
            "rows": [
                asdict(Row(name=name, family=found["family"], **row)) for row in found["rows"]
            ],
        }
        for name, found in kept["models"].items()
    }


def _save(known: dict[str, Any], path: Path) -> str:
    """Writes the results and returns the table.

    It is called after each model, so that a stopped run leaves both files consistent. Each
    environment is written once; rows omit zeros and the fields that they share.
    """
    text = table([Row(**row) for found in known.values() for row in found["rows"]])
    environments: list[dict[str, Any]] = []
    lines = []

    for name, found in known.items():
        machine = {key: value for key, value in found["environment"].items() if key != "date"}
        if machine not in environments:
            environments.append(machine)

        rows = [
            {
                key: _short(value)
                for key, value in row.items()
                if key not in ("name", "family") and value != 0
            }
            for row in found["rows"]
        ]

        date, family = found["environment"]["date"], found["rows"][0]["family"]
        model = {
            "environment": environments.index(machine),
            "date": date,
            "family": family,
            "rows": rows,
        }
        lines.append(f"{json.dumps(name)}: {json.dumps(model)}")

    listed, models = ",\n".join(map(json.dumps, environments)), ",\n".join(lines)
    path.write_text(f'{{"environments": [\n{listed}\n],\n"models": {{\n{models}\n}}}}\n')
    path.with_suffix(".md").write_text(text + "\n")

    return text


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _compile_search() -> None:
    """Compiles the search, which takes longer than a plan's time limit."""
    model = ARCHITECTURES["GPT-2"].make()
    graph = remat.trace(model.model, kwargs=model.kwargs, costs=_COSTS)
    remat.solve(graph, minimum(graph).peak_bytes * 5 // 4, gap=0.02)


def _architectures() -> list[tuple[str, str, Callable[[], Workload]]]:
    return [(name, model.family, model.make) for name, model in ARCHITECTURES.items()]


def _modules() -> list[tuple[str, str, Callable[[], Workload]]]:
    """Takes the first case of each module, then the second of each.

    A stopped run then has some cases of every module.
    """
    cases = [(name, _OF_MODULES, make) for name, make in module_cases()]
    return sorted(cases, key=lambda case: int(case[0].rpartition(", ")[2]))


def measure(name: str, family: str, make: Callable[[], Workload]) -> list[Row]:
    """Returns the rows of one model: one if it is refused, else one per budget."""
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    blank = Row(family, name, "", "")

    try:
        plain = make()
        if not is_same_step(copy.deepcopy(plain), copy.deepcopy(plain), SEED):
            return [replace(blank, outcome="plain PyTorch differs from itself")]

        graph = _graph(plain)
        least = minimum(graph)
        keep_all = remat.simulate(graph, remat.Schedule.keep_all(graph)).peak_bytes
        budgets = {"100%": keep_all, "70%": keep_all * 7 // 10, "least": least.peak_bytes}

        blank = replace(
            blank, num_operators=graph.num_operators, plain_bytes=peak_bytes(copy.deepcopy(plain))
        )

        return [
            _measure_at(replace(blank, budget=label), plain, graph, budget, least)
            for label, budget in budgets.items()
        ]
    except remat.TraceError as error:
        return [replace(blank, outcome=f"TraceError: {_first_line(error)}")]
    except Exception as error:  # noqa: BLE001  # whatever it is, it goes into the table as a failure
        return [replace(blank, outcome=f"{_FAILED} {type(error).__name__}: {_first_line(error)}")]


def _graph(plain: Workload) -> remat.Graph:
    """Returns the traced graph of a step; after a graph break, that of a real step."""
    model = copy.deepcopy(plain.model)
    try:
        return remat.trace(model, kwargs=plain.kwargs, costs=_COSTS)
    except GraphBreak:
        torch._dynamo.reset()
        remat.checkpoint(model, "100%", costs=_COSTS, time_limit_s=_TIME_LIMIT_S, plan_cache=False)
        Workload(model, plain.kwargs).step()
        return remat.report(model).graph


def _outcome(planned: Workload, plain: Workload) -> str:
    """Says whether planned steps equal plain ones.

    Steps in pieces may equal `aot_eager` in the same pieces instead (see `graph_breaks`).
    """
    if all(is_same_step(planned, plain, seed) for seed in (1, 2)):
        return _EQUAL
    if not remat.report(planned.model).breaks:
        return _DIFFERENT
    found = compare(planned, plain, in_pieces(plain)).outcome
    return found if found == _DIFFERENT else _EQUAL_IN_PIECES


def _measure_at(row: Row, plain: Workload, graph: remat.Graph, budget: int, least: Minimum) -> Row:
    if budget < least.peak_bytes:
        return replace(row, outcome=_BELOW_LEAST)

    torch._dynamo.reset()
    start = time.perf_counter()
    solver, shared = Auto(time_limit_s=_TIME_LIMIT_S, threads=1), Shared(graph, least)
    solution = solver.improve(graph, budget_bytes=budget, known_steps=[least.steps], shared=shared)

    plain = copy.deepcopy(plain)
    planned = Workload(remat.wrap(copy.deepcopy(plain.model), solution, costs=_COSTS), plain.kwargs)

    try:
        row, is_same_path = _steps(row, planned, plain)
        allowed_bytes = solution.peak_bytes
    # the code between pieces holds more, or the path differs: a given plan is not replaced
    except (remat.BudgetError, remat.ScheduleError):
        found = _steps_planned_anew(row, plain, row.budget if row.budget == "100%" else budget)
        if found is None:
            return replace(row, outcome=_LATER_REFUSED)
        row, is_same_path, planned = found
        report = remat.report(planned.model)
        solution, allowed_bytes = (
            report.solution,
            report.solution.budget_bytes + report.unplanned_bytes,
        )

    if row.outcome != _DIFFERENT and row.measured_bytes > allowed_bytes:
        row = replace(row, outcome=_ABOVE_PREDICTED if is_same_path else _ANOTHER_PATH)

    predicted_bytes = solution.peak_bytes + remat.report(planned.model).unplanned_bytes
    return replace(
        row,
        predicted_bytes=predicted_bytes,
        overhead=solution.overhead,
        wall_s=time.perf_counter() - start,
    )


def _steps_planned_anew(
    row: Row, plain: Workload, budget: int | str
) -> tuple[Row, bool, Workload] | None:
    """Runs steps that may be planned again; returns None if all tries end in an error.

    For "least", the budget that the error names is tried next.
    """
    for _ in range(_ATTEMPTS if row.budget == "least" else 1):
        torch._dynamo.reset()
        model = remat.checkpoint(
            copy.deepcopy(plain.model),
            budget,
            costs=_COSTS,
            time_limit_s=_TIME_LIMIT_S,
            plan_cache=False,
        )

        planned = Workload(model, plain.kwargs)
        try:
            return (*_steps(row, planned, plain), planned)
        except remat.BudgetError as error:
            budget = error.minimum_bytes

    return None


def _steps(row: Row, planned: Workload, plain: Workload) -> tuple[Row, bool]:
    """Returns the outcome and peak of planned steps, and whether the path stayed the same."""
    outcome = _outcome(planned, plain)
    _settle(planned)
    path = remat.report(planned.model).graph.fingerprint
    measured_bytes = peak_bytes(planned)
    return replace(row, outcome=outcome, measured_bytes=measured_bytes), remat.report(
        planned.model
    ).graph.fingerprint == path


def _settle(planned: Workload) -> None:
    """Runs steps until one is measured within its budget.

    A step in pieces that exceeded its budget is planned again before the next one.
    """
    for seed in range(_ATTEMPTS):
        report = remat.report(planned.model)
        held_bytes = report.measured_peak_bytes

        if not report.breaks or (
            held_bytes is not None
            and held_bytes <= report.solution.budget_bytes + report.unplanned_bytes
        ):
            return

        state_after_step(planned, seed)


def _first_line(error: Exception) -> str:
    return " ".join(
        str(error)
        .replace("torch.compile can't capture this step as one graph: ", "graph break: ")
        .split("Rewrite")[0]
        .split()
    )[:220]


def table(rows: list[Row]) -> str:
    """Returns counts and rows as Markdown."""
    of_modules = rows[0].family == _OF_MODULES
    what = "cases of torch.nn's modules" if of_modules else "architectures"
    lines = [f"{len({row.name for row in rows})} {what}: {_counts(rows)}."]

    titles = [
        "family",
        "model",
        "budget",
        "outcome",
        "operators",
        "predicted peak",
        "measured peak",
        "share of plain peak",
        "overhead",
    ]

    lines += ["", f"| {' | '.join(titles)} |", "|---|---|---|---|---:|---:|---:|---:|---:|"]
    return "\n".join(lines + [f"| {' | '.join(_cells(row))} |" for row in rows])


def outcomes(rows: list[Row]) -> Counter[str]:
    """Counts the models by outcome; a model has the outcome of its worst budget."""
    # from good to bad; any other outcome is worse
    severity = (_EQUAL, _BELOW_LEAST, _EQUAL_IN_PIECES, _ANOTHER_PATH, _LATER_REFUSED)
    worst: dict[str, str] = {}

    for row in rows:
        found = [
            outcome for outcome in (worst.get(row.name), row.outcome.partition(":")[0]) if outcome
        ]
        worst[row.name] = max(
            found,
            key=lambda outcome: severity.index(outcome) if outcome in severity else len(severity),
        )

    return Counter(_EQUAL if outcome == _BELOW_LEAST else outcome for outcome in worst.values())


def _counts(rows: list[Row]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in outcomes(rows).most_common())


def _cells(row: Row) -> list[str]:
    if not row.measured_bytes:
        return [row.family, row.name, row.budget, row.outcome.replace("|", "/"), "", "", "", "", ""]
    return [
        row.family,
        row.name,
        row.budget,
        row.outcome,
        str(row.num_operators),
        f"{row.predicted_bytes:,} B",
        f"{row.measured_bytes:,} B",
        f"{100 * row.measured_bytes / max(1, row.plain_bytes):.1f} %",
        f"{100 * max(0.0, row.overhead):.1f} %",
    ]


if __name__ == "__main__":
    main()
