"""What operators promise on fake tensors against what their kernels return.

    python -m experiments.fake_kernels [--only NAME] [--samples N]

Every operator of torch's operator database (`operator_calls.py`) runs in float32, bfloat16 and
complex64.
Each call that it makes, forward and backward, is repeated with its tensors in several layouts.
These properties of the results are compared: type, strides, conjugate and negative bits, bytes of
memory, and whether they share memory with an input. Three promises are compared with the kernel:
torch's, the one that `remat` traces with, and the one that `remat` would make for large tensors,
from a run at smaller sizes.

Each form of an elementwise operator that writes over an input is compared with the operator itself,
to the bit.

Writes `experiments/results/fake_kernels.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from remat.run.plain_kernels import as_the_kernel_lays_out
from remat.tracers import layouts
from remat.tracers.calls import Call, TensorSpec
from remat.tracers.recomputable import candidate_forms, in_place_forms

from .environment import environment
from .operator_calls import REFUSALS, Made, calls_of, copied, in_layouts, operators

RESULTS = Path(__file__).parent / "results" / "fake_kernels.json"
DTYPES = (torch.float32, torch.bfloat16, torch.complex64)
SEED = 0
CHUNK = 50
# The shape for calls whose tensors all have one shape: sizes large enough to be made smaller.
LARGE = (17, 11, 23)
PROMISES = ("torch's", "remat's", "remat's at smaller sizes")


@dataclass
class Row:
    """One operator, or one in-place form of it.

    Attributes:
        calls: number of calls that were compared.
        differ: promise (in-place forms: dtype, or "allowed") -> number of calls that differ.
        kinds: property that differs from torch's promise -> number of calls.
        example: the first call that differs.
    """

    calls: int = 0
    differ: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    example: str = ""


@dataclass
class Found:
    """All rows, by operator."""

    promises: defaultdict[str, Row] = field(default_factory=lambda: defaultdict(Row))
    in_place: defaultdict[str, Row] = field(default_factory=lambda: defaultdict(Row))
    incomparable: Counter[str] = field(default_factory=Counter)

    def add(self, other: Found) -> None:
        """Adds the rows of another search."""
        pairs = ((self.promises, other.promises), (self.in_place, other.in_place))
        for mine, rows in pairs:
            for name, row in rows.items():
                mine[name].calls += row.calls
                mine[name].differ.update(row.differ)
                mine[name].kinds.update(row.kinds)
                mine[name].example = mine[name].example or row.example
        self.incomparable.update(other.incomparable)

    def as_dict(self) -> dict[str, Any]:
        """Returns the content of the JSON file."""
        tables = {"promises": self.promises, "in_place": self.in_place}
        rows = {
            table: {name: vars(row) for name, row in sorted(found.items())}
            for table, found in tables.items()
        }
        return {**rows, "incomparable": dict(self.incomparable)}


def variants(made: Made, seen: set[Call]) -> Iterator[tuple[Made, Any]]:
    """Yields a call in all layouts that its operator takes, with what it returns.

    Skips calls in `seen`, and adds those that it yields.
    """
    for other in (made, *in_layouts(made), *in_layouts(made, LARGE)):
        call = Call.made(*other, None)
        if call in seen:
            continue

        seen.add(call)
        try:
            yield other, other.run()
        except REFUSALS:  # the kernel does not take this layout or shape
            continue


def compare(made: Made, real: Any, found: Found) -> None:
    """Compares the three promises with the kernel's result."""
    if any(map(_is_part, tree_leaves((made.args, made.kwargs)))):
        found.incomparable["an input in more memory than its fake copy"] += 1
        return

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (made.args, made.kwargs))
    try:
        with mode:
            promised = made.target(*args, **kwargs)
            corrected = as_the_kernel_lays_out(made.target, promised, args, kwargs)
            smaller = _at_smaller_sizes(made.target, promised, args, kwargs)
    except (*REFUSALS, NotImplementedError) as reason:
        found.incomparable[f"{made.target}: {type(reason).__name__}"] += 1
        return

    row = found.promises[str(made.target)]
    row.calls += 1

    given = [(made.args, made.kwargs), *[(args, kwargs)] * 3]
    truth, *others = map(_marks, (real, promised, corrected, smaller), given)

    for promise, other in zip(PROMISES, others, strict=True):
        kinds = [kind for kind in truth if truth[kind] != other[kind]]
        row.differ[promise] += bool(kinds)
        if kinds and (promise != PROMISES[0] or not row.example):
            row.example = f"{promise} {kinds}: {Call.made(*made, real)}"
        row.kinds.update(kinds if promise == PROMISES[0] else ())


def _at_smaller_sizes(target: Any, promised: Any, args: Any, kwargs: Any) -> Any:
    if all(n < layouts.FIRST_SIZE for t in tree_leaves((args, promised)) for n in _shape(t)):
        return as_the_kernel_lays_out(target, promised, args, kwargs)

    known, layouts.SMALL_BYTES = layouts.SMALL_BYTES, 0
    layouts.layouts_of.cache_clear()
    try:
        return as_the_kernel_lays_out(target, promised, args, kwargs)
    finally:
        layouts.SMALL_BYTES = known
        layouts.layouts_of.cache_clear()


def _is_part(leaf: Any) -> bool:
    """True for a tensor whose memory has an unused start or end."""
    if _memory(leaf) is None:
        return False
    return bool(leaf.untyped_storage().nbytes() != TensorSpec.of(leaf).extent_bytes)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()


def _marks(result: Any, given: Any) -> dict[str, list[Any]]:
    """Returns the compared properties of a result's tensors; strides of sizes above 1 only."""
    inputs = {_memory(leaf) for leaf in tree_leaves(given)} - {None}
    tensors = [t for t in tree_leaves(result) if _memory(t) is not None]

    return {
        "type": [t.dtype for t in tensors],
        "shape": [tuple(t.shape) for t in tensors],
        "strides": [_strides(t) for t in tensors],
        "conjugate or negative": [(t.is_conj(), t.is_neg()) for t in tensors],
        "memory": [_own_bytes(t, inputs) for t in tensors],
        "shared": [_memory(t) in inputs for t in tensors],
    }


def _memory(leaf: Any) -> int | None:
    is_strided = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
    return leaf.untyped_storage()._cdata if is_strided else None


def _strides(t: torch.Tensor) -> list[int]:
    pairs = zip(t.shape, t.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1] if t.numel() else []


def _own_bytes(t: torch.Tensor, inputs: set[int | None]) -> int:
    return 0 if _memory(t) in inputs else t.untyped_storage().nbytes()


def compare_in_place(made: Made, real: Any, found: Found) -> None:
    """Compares each form that writes over an input with the operator itself."""
    if not isinstance(real, torch.Tensor) or torch.Tag.nondeterministic_seeded in made.target.tags:
        return

    node = _node(made, real)
    allowed = {(form.target, form.taken) for form in in_place_forms(node, "cpu")}

    for form in candidate_forms(node, "cpu"):
        memo: dict[fx.Node, torch.Tensor] = {}

        def fresh(source: fx.Node, memo: dict[fx.Node, torch.Tensor] = memo) -> torch.Tensor:
            return memo.setdefault(source, copied(source.meta["val"]))

        args, kwargs = fx.node.map_arg((form.args, form.kwargs), fresh)
        is_equal = _is_equal(form.target(*args, **kwargs), real)
        row = found.in_place[f"{made.target} -> {form.target}"]
        row.calls += 1
        if not is_equal:
            row.differ[str(real.dtype)] += 1
            row.differ["allowed"] += (form.target, form.taken) in allowed
            row.example = row.example or str(Call.made(*made, real))


def _node(made: Made, real: torch.Tensor) -> fx.Node:
    graph = fx.Graph()

    def placeholder(tensor: torch.Tensor) -> fx.Node:
        node = graph.placeholder("x")
        node.meta["val"] = tensor
        return node

    args, kwargs = tree_map_only(torch.Tensor, placeholder, (made.args, made.kwargs))
    node = graph.call_function(made.target, args, kwargs)
    node.meta["val"] = real
    return node


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, and in the same layout."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = []
    for tensor in (one, other):
        plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        bits.append(plain.contiguous().view(integers[plain.itemsize]))
    return torch.equal(*bits) and one.stride() == other.stride()


def search(infos: list[Any], dtypes: tuple[torch.dtype, ...], num_samples: int) -> Found:
    """Compares all calls of all operators."""
    found = Found()
    seen: set[Call] = set()
    for info in infos:
        for dtype in dtypes:
            for made in calls_of(info, dtype, num_samples):
                for other, real in variants(made, seen):
                    compare(other, real, found)
                    compare_in_place(other, real, found)
    return found


def search_apart(infos: list[Any], dtypes: tuple[torch.dtype, ...], num_samples: int) -> Found:
    """Compares all calls in a separate process, because some kernels crash on odd layouts.

    After a crash each half is searched again, down to the operator that crashes, which is noted.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(
        target=lambda: theirs.send(search(infos, dtypes, num_samples)), daemon=True
    )

    child.start()
    theirs.close()

    try:
        found: Found = ours.recv()
    except EOFError:
        found = Found()
        if len(infos) == 1:
            found.incomparable[f"{infos[0].name}: crashes"] += 1
        else:
            half = len(infos) // 2
            for part in (infos[:half], infos[half:]):
                found.add(search_apart(part, dtypes, num_samples))

    child.join()
    return found


def table(found: Found) -> str:
    """Returns both tables as Markdown: what differs, and how many were compared."""
    rows = {name: row for name, row in sorted(found.promises.items()) if any(row.differ.values())}
    totals = Counter[str]()
    for row in found.promises.values():
        totals.update(row.differ)

    lines = [
        f"{len(found.promises)} operators, {sum(r.calls for r in found.promises.values()):,} calls "
        f"on the CPU. {totals[PROMISES[0]]:,} results differ from torch's fake tensors; "
        f"{totals[PROMISES[1]]:,} differ from what `remat` traces; {totals[PROMISES[2]]:,} differ "
        "from what `remat` predicts from smaller sizes only.",
        "",
        "| operator | calls | what differs | torch's | remat's | at smaller sizes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]

    for name, row in rows.items():
        counts = " | ".join(str(row.differ[promise]) for promise in PROMISES)
        kinds = ", ".join(row.kinds) or "-"
        lines.append(f"| `{name}` | {row.calls} | {kinds} | {counts} |")

    differing = {name: row for name, row in sorted(found.in_place.items()) if row.differ}
    lines += [
        "",
        f"{len(found.in_place)} forms that write over an input, "
        f"{sum(row.calls for row in found.in_place.values()):,} calls. The forms below return bits "
        "or a layout that differ from the operator's own; the last column counts the differing "
        "calls that a plan may make.",
        "",
        "| form | calls | differ | differ and allowed |",
        "| --- | --- | --- | --- |",
    ]

    for name, row in differing.items():
        counts_of = {kind: count for kind, count in row.differ.items() if kind != "allowed"}
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts_of.items())
        lines.append(f"| `{name}` | {row.calls} | {kinds} | {row.differ['allowed']} |")

    return "\n".join(lines) + "\n"


def main(only: str, num_samples: int) -> None:
    """Searches, prints both tables and writes them."""
    found, infos = Found(), operators(only)
    for start in range(0, len(infos), CHUNK):
        found.add(search_apart(infos[start : start + CHUNK], DTYPES, num_samples))
        print(f"{start + CHUNK} of {len(infos)} operators", flush=True)

    print(table(found))
    print(*found.incomparable.most_common(), sep="\n")

    if only:
        return

    record = {"environment": environment(seed=SEED), "samples": num_samples, **found.as_dict()}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(table(found))
    print(f"wrote {RESULTS} and {RESULTS.with_suffix('.md').name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="operators whose name contains this; writes no results"
    )
    parser.add_argument("--samples", type=int, default=1, help="sample inputs per operator")
    options = parser.parse_args()
    main(options.only, options.samples)
