"""Valid files, and damaged copies as a hostile or broken machine would make them.

`seeds` writes one valid file of each kind. `damaged` returns a changed copy of one: usually a field
is replaced by a value that some program might write, sometimes bytes are cut off or flipped. It
draws a kind of field first, then a field of that kind: a graph's one `version` is changed as often
as its hundred costs together. The random generator determines everything.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import remat
from remat.core import serialize
from remat.tracers.synthetic import chain

KINDS = ("plain", "graph", "schedule", "plan", "curve", "measured")
_NESTED = 60_000  # levels; deeper than any reader's stack
_RAW = re.compile(r'"\\u0001(\d+)\\u0001"')  # marks text that `json` would not write
_BYTES = 0.12  # share of files that are damaged without regard to their structure

_INTEGERS = (
    *(-1, 0, 1, 2, 7),
    *(2**31 - 1, 2**31, 2**32, 2**53 - 1, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64),
    *(-(2**31), -(2**63), -(2**63) - 1, 10**30, 10**400),
)
_REALS = (
    *(-1.0, -0.0, 0.5, 1.5, 5e-324, 1e-310, 1e-150, 1e-30, 1e15, 1e20, 1e30, 1e100, 1e154, 1e300),
    1.7976931348623157e308,
)
_TEXTS = (
    *("", " ", "²", "model.py:²: x", "model.py:99999999999999999999: x", "model.py:-3:", ":::"),
    *("\x00", "\x1b[31m", "a\nb", "\u202eabc", "\ud800", "𝕏" * 50, "a" * 100_000, "-", "=1+1"),
    *("[/bold]", "[red]", "$\\frac{$", "$x$", "<script>alert(1)</script>", "{0}", "%s", "\\"),
    *("forward", "backward", "parameter", "intermediate", "optimal", "feasible", "infeasible"),
    *("no_solution", "cpu", "cuda", "flops", "roofline:nothing", "profile", "nan", "1e5", "../.."),
)
_TOKENS = (
    *("1e999", "-1e999", "NaN", "Infinity", "1e400", "0x10", "01", "1.", "truee", "'a'", ""),
    *("[" * _NESTED, "[" * _NESTED + "]" * _NESTED, '{"a":' * _NESTED, '"\\ud800"', '"\x00"'),
)
_BUDGETS = (
    *("60%", "100%", "101%", "0%", "1e9%", "9" * 400, "9" * 400 + "%", "0." + "0" * 400 + "1GiB"),
    *("9007199254740993", str(2**63), "1e9", "-1", "0", "nan", "inf", "٣", "²", "8 GiB", "", "1B"),
)

Path_ = tuple[str | int, ...]


def seeds(folder: Path) -> tuple[remat.Graph, dict[str, bytes]]:
    """Returns a traced graph and one valid file of each kind; plans are for that graph."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.nn.functional.dropout(block(x).relu().sin(), 0.1)
            return x.square().mean()

    graph = remat.trace(Net(), (torch.zeros(32, 16),), costs="flops")
    plans = [remat.solve(graph, b, solver="chen-greedy") for b in ("100%", "96%", "90%")]
    assert plans[-1].schedule is not None and plans[-1].schedule.num_recomputations

    records = {
        "graph": graph,
        "schedule": plans[-1].schedule,
        "plan": plans[-1],
        "curve": plans,
        "measured": {"cpu: mm": (1e-4, 4096.0), "cpu: sin": (2e-5, 0.0)},
    }

    found = {"plain": json.dumps(_plain()).encode()}
    for kind, record in records.items():
        serialize.save(record, folder / kind)
        found[kind] = (folder / kind).read_bytes()

    return graph, found


def budget(chance: random.Random) -> str:
    """Returns a budget as a user might type it."""
    return chance.choice(_BUDGETS) if chance.random() < 0.3 else f"{chance.randint(40, 110)}%"


def damaged(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Returns a changed copy of a JSON file, and what was changed."""
    if chance.random() < _BYTES:
        change = chance.choice(_BYTE_CHANGES)
        return change(content, chance), change.__name__.strip("_")

    tree, raw, done = json.loads(content), list[str](), []
    for _ in range(1 if chance.random() < 0.8 else 2):
        patterns: dict[tuple[str, ...], list[Path_]] = {}
        for path in _paths(tree):
            key = tuple("*" if isinstance(part, int) else part for part in path)
            patterns.setdefault(key, []).append(path)
        pattern = chance.choice(sorted(patterns))
        tree, how = _change(tree, chance.choice(patterns[pattern]), chance, raw)
        done.append(f"{'.'.join(pattern) or 'all'}: {how}")

    text = _RAW.sub(lambda match: raw[int(match[1])], json.dumps(tree))
    return text.encode("utf-8", "surrogatepass"), "; ".join(done)


def _plain() -> dict[str, Any]:
    graph = chain(8)
    return {
        "cost": [1.0 + op.workspace_bytes for op in graph.operators],
        "size": [4 + i % 3 for i in range(graph.num_operators)],
        "edges": [[u, v] for v, op in enumerate(graph.operators) for u in op.reads],
        "first_backward": graph.num_forward,
    }


def _paths(tree: Any, path: Path_ = ()) -> Iterator[Path_]:
    yield path
    lists: Iterable[Any] = enumerate(tree) if isinstance(tree, list) else ()
    items = tree.items() if isinstance(tree, dict) else lists
    for key, inside in items:
        yield from _paths(inside, (*path, key))


def _change(tree: Any, path: Path_, chance: random.Random, raw: list[str]) -> tuple[Any, str]:
    if not path:
        return _other(tree, chance, raw)

    holder = tree
    for part in path[:-1]:
        holder = holder[part]

    key, where = path[-1], chance.random()
    if where < 0.05:
        del holder[key]
        return tree, "removed"

    if where < 0.1 and isinstance(holder, list) and isinstance(key, int):
        holder.insert(chance.randrange(len(holder) + 1), deepcopy(holder[key]))
        return tree, "twice"

    if where < 0.15 and isinstance(holder, list) and isinstance(key, int):
        other = chance.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
        return tree, "swapped"

    holder[key], how = _other(holder[key], chance, raw)
    return tree, how


def _other(value: Any, chance: random.Random, raw: list[str]) -> tuple[Any, str]:
    """Returns a replacement for a field: often of its own type, sometimes of any type."""
    found: Any
    if chance.random() < 0.06:
        raw.append(chance.choice(_TOKENS))
        return f"\x01{len(raw) - 1}\x01", f"the token {raw[-1][:12]}"

    if chance.random() < 0.08:
        found = chance.choice((None, True, False, [], {}, [[]], [None], {"a": 1}, "x", 3, 0.25))
    elif isinstance(value, str):
        found = chance.choice(_TEXTS)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        near = (value + 1, value - 1, 2 * value, 1000 * value, value // 2, -value, 0, 1, 5)
        far = (*_INTEGERS, *_REALS) if isinstance(value, float) else _INTEGERS
        found = chance.choice(near if chance.random() < 0.5 else far)
    elif isinstance(value, list) and value:
        cut = chance.randrange(len(value))
        found = chance.choice((value[:cut], value[::-1], [*value, *value], [value], value[cut]))
    else:
        found = chance.choice((*_INTEGERS, *_REALS, *_TEXTS))

    return found, repr(found)[:40]


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def _flipped(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _inserted(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + chance.randbytes(chance.randint(1, 4)) + content[at:]


def _doubled(content: bytes, chance: random.Random) -> bytes:
    return content + content[: chance.randrange(len(content))]


def _recoded(content: bytes, chance: random.Random) -> bytes:
    return content.decode().encode(chance.choice(("utf-16", "utf-8-sig", "utf-32-be")))


def _zeroed(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))  # a block that never reached the disk
    return content[:at] + bytes(len(content) - at)


_BYTE_CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_cut, _flipped, _inserted, _doubled, _recoded, _zeroed),
)
