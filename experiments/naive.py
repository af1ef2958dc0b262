"""Do the tests notice when a protection that they test is missing?

Each protection is removed from a copy of the package, and the test for it must fail.

    python -m experiments.naive [WORD ...]     # all, or those whose name contains a WORD

The others keep their rows. `test_never_wrong.py` and `test_computed_again.py` in `tests/promises`
remove protections themselves. Those of the other tests are here, because removing them needs an
edit of the source: the text to replace must occur exactly once, or the script stops. Writes
`experiments/results/naive.json` and `.md`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .command_line import parser_of
from .environment import environment

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "naive.json"
_TIME_LIMIT_S = 600


@dataclass(frozen=True)
class Naive:
    """A mistake.

    Attributes:
        name: what is wrong.
        path: the file that is edited.
        edits: pairs of a text that occurs once, and its replacement.
        tests: what must fail, as arguments of pytest.
    """

    name: str
    path: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, str, str]


@dataclass(frozen=True)
class Row:
    """The outcome of a mistake: the tests that failed, and whether the mistake was seen."""

    name: str
    failed: tuple[str, ...]
    outcome: str


def _naive(name: str, path: str, tests: str, *edits: tuple[str, str]) -> Naive:
    file, _, words = tests.partition(" -k ")
    return Naive(name, path, edits, (f"tests/{file}.py", "-k", words))


_FORWARD = "        return self.planned[-1].forward(run) if self.planned else run"
_NOTED = """        if not self.planned:
            return run
        inner = self.planned[-1].forward(run)

        def noted(args):
            self.latest[:] = results = list(inner(args))
            return results

        noted._boxed_call = True
        return noted"""
_BACKWARD = (
    "        return runs_once(last.meter.backward(last.tangents.backward(graph)), last, self.plain)"
)
_STALE = """        inner = runs_once(last.meter.backward(last.tangents.backward(graph)), last, self.plain)

        def stale(args):
            saved = self.latest[last.step.num_forward_outputs :]
            args[: len(saved)] = saved
            return inner(args)

        stale._boxed_call = True
        return stale"""
_LATEST = (
    "    planned: list[PlannedStep] = field(default_factory=list)",
    "    latest: list[Any] = field(default_factory=list)\n"
    "    planned: list[PlannedStep] = field(default_factory=list)",
)
_REPLAY = "        return _drawn(operator, args, kwargs, state, move_on=False)"

ALL = (
    _naive(
        "what has no phase belongs to the backward", "tracers/phases.py", "inductor/test_backend -k computes",
        ("is_forward = is_forward or any(\n", "is_forward = is_forward or False and any(\n"),
    ),
    _naive(
        "gradients of earlier steps are not counted", "remat/face/planned_module.py", "promises/test_training_loops -k earlier_steps",
        ("held_bytes = room_for(gradient_bytes(self.module, self.device_type, inputs), rooms)", "held_bytes = 0"),
    ),
    _naive(
        "gradients of earlier steps are not counted in pieces", "remat/pieces/runner.py", "pieces/test_graph_breaks -k earlier_steps",
        ("held_bytes = gradient_bytes(self.module, kind, inputs) if is_planned else 0", "held_bytes = 0"),
    ),
    _naive(
        "the last forward's values serve all backwards", "remat/run/capture.py", "promises/test_training_loops -k several_forwards",
        _LATEST, (_FORWARD, _NOTED), (_BACKWARD, _STALE),
    ),
    _naive(
        "what a forward saved stays until the next one", "remat/run/capture.py", "promises/test_training_loops -k between_forward",
        _LATEST, (_FORWARD, _NOTED),
    ),
    _naive(
        "a replay moves the generator", "remat/run/random_state.py", "promises/test_training_loops -k in_the_backward",
        (_REPLAY, "        torch.set_rng_state(state)\n        return operator(*args, **kwargs)"),
    ),
    _naive(
        "a replay borrows the generator that all threads draw from", "remat/run/random_state.py", "promises/test_training_loops -k threads",
        (_REPLAY, """        before = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            return operator(*args, **kwargs)
        finally:
            torch.set_rng_state(before)"""),
    ),
    _naive(
        "the compiled frame knows its model by a global", "remat/face/capturing.py", "promises/test_training_loops -k deleted",
        ('{"call_plain": call_plain}', '{"call_plain": call_plain, "model": module}'),
        ("return call_plain(self, *args, **kwargs)", "return call_plain(model, *args, **kwargs)"),
    ),
    _naive(
        "a percentage is one of each shape's own peak", "remat/plan/planner.py", "plan/test_shapes -k smaller_last",
        ("self._keep_all_bytes = max(self._keep_all_bytes, keep_all_bytes)", "self._keep_all_bytes = keep_all_bytes"),
    ),
    _naive(
        "declared sizes are not looked at", "remat/face/planned_module.py", "plan/test_shapes -k 'declared or largest_size'",
        ("        self._plan_largest(args, kwargs)\n", ""),
    ),
    _naive(
        "what lies in the cache is believed", "remat/plan/disk_cache.py", "plan/test_shapes -k fit_its_step",
        ("is_asked = solution.budget_bytes == budget_bytes and", "is_asked = True or"),
    ),
    _naive(
        "costs are no part of a plan's key", "remat/plan/disk_cache.py", "plan/test_shapes -k depends_on",
        ("    digest.update(arrays.cost_s.tobytes())\n", ""),
    ),
    _naive(
        "autocast's cache is off in the trace", "remat/run/capture.py", "run/test_precision -k once_per_region",
        ("        autocast_cache(module, example_inputs),\n", ""),
    ),
    _naive(
        "what changes between pieces is not copied", "remat/pieces/recording.py", "pieces/test_graph_breaks -k 'plain_step and InPlace'",
        ("and tensor._version != version", "and False"),
    ),
    _naive(
        "views of a copied input belong to the input", "remat/pieces/captured_piece.py", "pieces/test_graph_breaks -k ViewAfterwards",
        ('made.meta = {"val": source.meta["val"], ', 'made.meta = {"val": source.meta["val"].clone(), '),
        ('source.meta["val"].clone() if node is source else source.meta["val"]', 'node.meta["val"]'),
    ),
    _naive(
        "no gradient is a gradient of zeros", "remat/pieces/runner.py", "pieces/test_graph_breaks -k Unused",
        ("return as_part_of(self, compiled, read) if pieces else compiled", "return compiled"),
    ),
    _naive(
        "what gaps hold is left to luck", "remat/pieces/over_budget.py", "pieces/test_graph_breaks -k 'one_budget and Views'",
        ("        if excess == 0:", "        if True:"),
    ),
    _naive(
        "a backward runs the halves made last", "remat/pieces/runner.py", "pieces/test_graph_breaks -k overlap",
        ("piece.halves(number)[1]", "piece.halves(0)[1]"),
    ),
    _naive(
        "Inductor's random kernels run again", "remat/inductor/kernel_graph.py", "inductor/test_backend -k 'computes and nothing'",
        ("if index in step.generator_states else", "if False else"),
    ),
    _naive(
        "the peak of Inductor's kernels is not looked at", "remat/face/planned_module.py", "inductor/test_known_peaks -k budget_are_planned_again",
        ("        if excess > 0:\n", "        if False:\n"),
    ),
    _naive(
        "Inductor's kernels may hold more than the budget in a first step", "remat/inductor/backend.py", "inductor/test_known_peaks -k before_they_run",
        ("        if peak_bytes <= planned.solution.budget_bytes + compilation.room_bytes:\n", "        if True:\n"),
    ),
    _naive(
        "a backward runs as often as it is asked to", "remat/run/capture.py", "promises/test_refused -k 'kept_is_refused or gradient_of_a_gradient'",
        ("        if is_graph_kept():", "        if False:"),
    ),
    _naive(
        "whole steps count frames, one count for all threads", "remat/torch_border/dynamo.py", "pieces/test_graph_breaks -k beside",
        ("    context.fullgraph = False\n", ""),
    ),
    _naive(
        "a step in pieces that was not compiled goes unnoticed", "remat/pieces/runner.py", "pieces/test_graph_breaks -k not_compile",
        ("if not path and session.expects_pieces and _needs_gradient(result):", "if False:"),
    ),
    _naive(
        "torch's own modules are left to torch's frames", "remat/pieces/frames.py", "pieces/test_own_frames -k behind_a_cut",
        ("            ours = [", "            ours = [] and ["),
    ),
    _naive(
        "frames of ours stay on the instances", "remat/pieces/frames.py", "pieces/test_own_frames -k 'between_steps or share'",
        ('del _USERS[id(part)], vars(part)["forward"]', "del _USERS[id(part)]"),
    ),
    _naive(
        "what eager nodes hold in the backward is not seen", "remat/pieces/step_meter.py", "pieces/test_step_meter -k 'room_for or Gap'",
        ("                node.register_prehook(partial(self._begin_node, self._step))\n", ""),
    ),
    _naive(
        "the backward of an earlier forward is measured", "remat/pieces/step_meter.py", "pieces/test_step_meter -k its_own",
        ("token.untyped_storage()._cdata not in self._followed", "False"),
    ),
    _naive(
        "a budget that is not used is made smaller", "remat/pieces/over_budget.py", "pieces/test_step_meter -k room_for",
        ("plan.unplanned_bytes + unused_bytes + excess", "plan.unplanned_bytes + excess"),
    ),
    _naive(
        "what needs no gradient is compiled too", "remat/face/planned_module.py", "promises/test_still_a_module -k no_grad",
        ("if not torch.is_grad_enabled() or torch.compiler", "if torch.compiler"),
    ),
    _naive(
        "a plan is copied and pickled with its module", "remat/torch_border/modules.py", "promises/test_still_a_module -k own_getstate",
        ("def __reduce__", "def reduce"),
    ),
    _naive(
        "each rank solves", "remat/plan/distributed.py", "plan/test_distributed -k solved_on_one",
        ("    if not is_distributed():\n        return solve()\n    workspaces", "    if True:\n        return solve()\n    workspaces"),
    ),
)  # fmt: skip


def main() -> None:
    """Runs the tests on each naive copy, and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD")
    words = parser.parse_args().words
    known = (
        {row["name"]: row for row in json.loads(RESULTS.read_text())["rows"]}
        if RESULTS.exists()
        else {}
    )
    for naive in ALL:
        if not words or any(word in naive.name for word in words):
            known[naive.name] = asdict(run(naive))
            print(naive.name, known[naive.name]["outcome"], sep=": ", file=sys.stderr, flush=True)
            _save([known[other.name] for other in ALL if other.name in known])


def _save(rows: list[dict[str, Any]]) -> None:
    """Writes the results after each mistake: a stopped run leaves both files consistent."""
    RESULTS.write_text(
        json.dumps({"environment": environment(seed=0), "rows": rows}, indent=1) + "\n"
    )
    lines = ["| mistake | outcome | tests that failed |", "|---|---|---|"]
    lines += [
        f"| {row['name']} | {row['outcome']} | {', '.join(f'`{name}`' for name in row['failed'])} |"
        for row in rows
    ]
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")


def run(naive: Naive) -> Row:
    """Returns which tests fail on a copy of the package with one mistake."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "remat"
        _copy_with(naive, copy)
        done = _tested(naive, copy)

    failed = [
        line.partition(" ")[2].partition(" - ")[0].partition("::")[2]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    ]
    is_run = done.returncode in (0, 1)
    outcome = (
        "seen"
        if failed
        else "NOT SEEN"
        if is_run
        else f"NOT RUN: {(done.stdout + done.stderr).strip()[-200:]}"
    )
    return Row(naive.name, tuple(failed), outcome)


def _copy_with(naive: Naive, folder: Path) -> None:
    """Copies the package to `folder` with one mistake in it."""
    shutil.copytree(
        ROOT,
        folder,
        symlinks=True,
        ignore=shutil.ignore_patterns(".*", "__pycache__", "results", "build", "instances"),
    )

    path = folder / naive.path
    text = path.read_text()
    for before, after in naive.edits:
        assert text.count(before) == 1, (
            f"{naive.path} has {before!r} {text.count(before)} times; adjust {naive.name!r}"
        )
        text = text.replace(before, after)
    path.write_text(text)


def _tested(naive: Naive, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "--show-capture=no",
        *naive.tests,
    ]
    return subprocess.run(
        [part.strip("'") for part in command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_TIME_LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )


if __name__ == "__main__":
    main()
