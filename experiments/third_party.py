"""Do models of other libraries train as with plain PyTorch, inside their budgets?

    pip install --no-deps --target SITE -r experiments/third_party.txt  # outside of the environment
    PYTHONPATH=SITE python -m experiments.third_party [WORD ...]   # all, or names with a WORD
    PYTHONPATH=SITE python -m experiments.third_party --missing    # models without rows

The libraries are installed without their dependencies, because some would pull in CUDA or
torchvision. A missing library is skipped, and the reason printed. Weights are random; nothing is
downloaded.

Each model runs at 100 %, 60 % and the least budget, which `BudgetError` names. Loss, gradients,
buffers and random state of two steps are compared with plain PyTorch's: equal to the bit, or else
the relative difference. The peak of a later step, measured from outside, is compared with the
budget. A step in pieces is planned again if the code between the pieces held more than was reserved
for it; the lowest peak of a few steps counts. A model that differs or fails is also run by
PyTorch's own `aot_eager`. Plans are searched for one second with roofline costs, so overheads are
upper bounds.

Each model runs in a process of its own, with a time limit. Writes `results/third_party.json` and
`.md` after each, so that a stopped run leaves both files consistent.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection

import numpy as np
import torch

import remat
from remat.tracers.synthetic import transformer

from .absent_modules import stand_in_for
from .command_line import parser_of
from .comparison import least_bytes, peak_bytes, state_after_step
from .environment import environment
from .graph_breaks import in_pieces
from .models import Workload
from .third_party_models.steps import Make
from .third_party_table import (
    ABOVE_BUDGET,
    ALL,
    BELOW_LEAST,
    DIFFERENT,
    EQUAL,
    EQUAL_TO_AOT_EAGER,
    Row,
    load,
    save,
)

SEED = 0
_STEPS = (1, 2)  # seeds of the steps that are compared
_TIME_LIMIT_S = 1.0  # of a plan, which only has to be correct here, not cheap
_MODEL_LIMIT_S = 900.0  # for a model's three budgets and the start of its process
_ATTEMPTS = 4  # at the least budget, and to measure a peak of steps in pieces
_COSTS = "roofline"  # independent of the load on the machine
_FORK = multiprocessing.get_context("fork")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the requested models, each in its own process, and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--missing", action="store_true", help="only models without rows")
    asked = parser.parse_args(arguments)

    _prepare()
    known = load()

    for name in _asked_for(asked.words, known if asked.missing else ()):
        package = ALL[name].package
        found = installed_version(package)
        if not found:
            print(f"{name} | skipped: {package} is not installed", file=sys.stderr, flush=True)
            continue

        rows = _in_a_process(name)
        made = {**environment(seed=SEED), "threads": 1}
        rows_kept = [asdict(row) for row in rows]
        known[name] = {"environment": made, "version": found, "rows": rows_kept}

        save(known)
        shown = (f"{row.budget} {row.outcome} {row.aot_eager}".strip() for row in rows)
        print(name, *shown, sep=" | ", file=sys.stderr, flush=True)

    print(save(known))


def _asked_for(words: list[str], known: Container[str]) -> list[str]:
    """Returns one model of each library, then the next of each: a stopped run has some of all."""
    names = [
        name
        for name in ALL
        if name not in known and (not words or any(word in name for word in words))
    ]

    seen: Counter[str] = Counter()
    turn = {}
    for name in names:
        turn[name] = seen[ALL[name].package]
        seen[ALL[name].package] += 1

    return sorted(names, key=turn.__getitem__)


def installed_version(package: str) -> str:
    """Returns the version of a package; empty if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _prepare() -> None:
    """Sets this process up once; the processes of the models are copies of it."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # beside other processes, two threads would wait for each other
    stand_in_for("torchvision", "torchaudio")
    for module in ("torch._dynamo.backends.debugging", "torch._inductor.compile_fx"):
        importlib.import_module(module)  # each step imports these: import them once, here

    compiling = _FORK.Process(target=_solve_once)  # it starts threads, which can't be copied
    compiling.start()
    compiling.join()


def _solve_once() -> None:
    """Compiles the search into a disk cache: that takes longer than a plan's time limit."""
    graph = transformer(4)
    remat.solve(graph, remat.minimum(graph).peak_bytes * 5 // 4, gap=0.02)


def _in_a_process(name: str) -> list[Row]:
    """Measures a model in a copy of this process, which has imported what all models need."""
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_send_rows, args=(sender, name))
    process.start()
    sender.close()

    try:
        if receiver.poll(_MODEL_LIMIT_S):
            rows: list[Row] = receiver.recv()
            return rows
        return [Row(name, "", f"FAILED: took more than {_MODEL_LIMIT_S:.0f} s")]
    except EOFError:
        return [Row(name, "", "FAILED: its process ended without a result")]
    finally:
        process.kill()
        process.join()


def _send_rows(sender: Connection, name: str) -> None:
    sender.send(measure(name, ALL[name].make))


@dataclass(frozen=True)
class _Plain:
    """Plain PyTorch's results for a step, found once for all budgets."""

    make: Make

    def made(self) -> Workload:
        """Returns the step with the same weights and batch each time."""
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)  # noqa: NPY002  # some libraries draw from it
        return self.make()

    @cached_property
    def ends(self) -> list[torch.Tensor]:
        """What two steps leave: losses, random states, gradients and buffers."""
        return _ends(self.made())

    @cached_property
    def aot_eager_ends(self) -> list[torch.Tensor] | str:
        """What two steps leave when `aot_eager` runs the same pieces, or its error."""
        torch._dynamo.reset()
        try:
            return _ends(in_pieces(self.made()))
        except Exception as error:  # noqa: BLE001  # its text goes into the table
            return _first_line(error)

    def is_steady(self, times: int) -> bool:
        """True if that many more runs give the same; some kernels depend on memory addresses."""
        return all(_difference_of(_ends(self.made()), self.ends) is None for _ in range(times))

    def peak_bytes(self) -> int:
        """Returns the measured peak of a step after the first."""
        plain = self.made()
        state_after_step(plain, _STEPS[0])
        return peak_bytes(plain)

    def aot_eager(self, ends: list[torch.Tensor] | None = None) -> str:
        """Says how `aot_eager` compares with plain PyTorch and with what planned steps left."""
        theirs = self.aot_eager_ends
        if isinstance(theirs, str):
            return f"fails too: {theirs}"
        if _difference_of(theirs, self.ends) is None:
            return "equal to plain"
        is_as_planned = ends is not None and _difference_of(ends, theirs) is None
        return "as planned" if is_as_planned else "different too"


def measure(name: str, make: Make) -> list[Row]:
    """Returns the rows of one model: one if nothing can be planned, else one per budget."""
    row, plain = Row(name, "", ""), _Plain(make)
    try:
        row = replace(row, plain_bytes=plain.peak_bytes())
        if not plain.is_steady(1):
            return [replace(row, outcome="plain PyTorch differs from itself")]

        everything, graph = _at(replace(row, budget="100%"), plain, "100%")
        if everything.outcome == DIFFERENT and not plain.is_steady(_ATTEMPTS):
            return [replace(row, outcome="plain PyTorch differs from itself")]

        least = least_bytes(graph, time_limit_s=_TIME_LIMIT_S)
    except Exception as error:  # noqa: BLE001  # whatever it is, it goes into the table
        return [replace(row, outcome=_first_line(error), aot_eager=plain.aot_eager())]

    part = everything.budget_bytes * 6 // 10
    labels = {"60%": part, "least": least}
    met, tried = everything.budget_bytes, list[Row]()

    for label, budget in labels.items():
        tried.append(_tried(replace(row, budget=label), plain, budget, least, met))
        met = budget if tried[-1].measured_bytes else met

    return [everything, *tried]


def _tried(row: Row, plain: _Plain, budget: int, least: int, met: int) -> Row:
    """Returns the row at one budget; the least is tried again at the budget its error names.

    That is never above `met`, the smallest budget that a plan has kept so far.
    """
    if budget < least:
        return replace(row, outcome=BELOW_LEAST, budget_bytes=budget)

    attempts = _ATTEMPTS if row.budget == "least" else 1
    for _ in range(attempts):
        try:
            return _at(row, plain, budget)[0]
        except remat.BudgetError as error:
            is_below = row.budget != "least" and error.minimum_bytes > budget
            outcome = BELOW_LEAST if is_below else _first_line(error)
            row = replace(row, outcome=outcome, budget_bytes=budget)
            budget = min(error.minimum_bytes, met)
        except Exception as error:  # noqa: BLE001  # whatever it is, it goes into the table
            return replace(row, outcome=_first_line(error), budget_bytes=budget)

    return row


def _at(row: Row, plain: _Plain, budget: int | str) -> tuple[Row, remat.Graph]:
    """Plans, compares and measures at one budget; returns the graph too."""
    torch._dynamo.reset()
    start = time.perf_counter()
    planned = plain.made()
    options = {"costs": _COSTS, "time_limit_s": _TIME_LIMIT_S, "plan_cache": False}
    remat.checkpoint(planned.model, budget, **options)  # type: ignore[arg-type]  # of several types

    ends = _ends(planned)
    difference = _difference_of(ends, plain.ends)
    measured_bytes = _settled_peak_bytes(planned, budget)

    report = remat.report(planned.model)
    if isinstance(budget, str):
        keep_all = remat.simulate(report.graph, remat.Schedule.keep_all(report.graph))
        budget = keep_all.peak_bytes + report.unplanned_bytes

    row = replace(
        row,
        outcome=ABOVE_BUDGET if measured_bytes > budget else EQUAL,
        budget_bytes=budget,
        predicted_bytes=report.solution.peak_bytes + report.unplanned_bytes,
        measured_bytes=measured_bytes,
        overhead=report.solution.overhead,
        num_operators=report.graph.num_operators,
        num_pieces=report.num_pieces,
        wall_s=time.perf_counter() - start,
    )

    if difference is not None:
        theirs = plain.aot_eager(ends)
        outcome = EQUAL_TO_AOT_EAGER if theirs == "as planned" else DIFFERENT
        row = replace(row, outcome=outcome, difference=difference, aot_eager=theirs)

    return row, report.graph


def _settled_peak_bytes(planned: Workload, budget: int | str) -> int:
    """Returns a step's peak; in pieces, the lowest of a few, up to one within the budget."""
    peak = peak_bytes(planned)
    for seed in range(_ATTEMPTS):
        is_within = not isinstance(budget, str) and peak <= budget
        if is_within or not remat.report(planned.model).breaks:
            break
        state_after_step(planned, seed)
        peak = min(peak, peak_bytes(planned))
    return peak


def _ends(workload: Workload) -> list[torch.Tensor]:
    """Returns copies of what two steps leave."""
    return [end.detach().clone() for seed in _STEPS for end in state_after_step(workload, seed)]


def _difference_of(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float | None:
    """Returns the largest relative difference of two tensors; None if no bit differs."""
    pairs = zip(ours, theirs, strict=True)
    found = [apart for one, other in pairs if (apart := _difference(one, other)) is not None]
    return max(found, default=None)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float | None:
    """None if no bit differs; infinite if shapes differ, or only one has a gradient."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if one.is_complex():
        one, other = (torch.view_as_real(side.resolve_conj()) for side in (one, other))
    if bool(((one == other) | ((one != one) & (other != other))).all()):
        return None
    apart = (one.double() - other.double()).abs().nan_to_num(nan=float("inf")).max()
    return float(apart / other.double().abs().nan_to_num().max().clamp_min(1e-3))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


if __name__ == "__main__":
    main()
