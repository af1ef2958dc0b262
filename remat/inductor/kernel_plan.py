"""What Inductor is told while it compiles one half of a planned step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import fx

from remat.core.budget import describe_bytes
from remat.inductor.kernel_order import Kernel, Loop, Loops
from remat.inductor.realize import is_of_loop, products_to_keep_apart, values_to_realize
from remat.torch_border.kernel_scheduler import (
    Part,
    Parts,
    end_functions_after,
    fused_again,
    part_names,
    parts_of,
    realize_operator,
    scheduled,
)
from remat.tracers.calls import Call

_ROUNDS = 12  # of fusing again; each halves a blamed loop's distance to the rest of its kernel


@dataclass(eq=False)
class KernelPlan:
    """Makes the kernels of a half run in the plan's order, within a limit where possible.

    Attributes:
        limit_bytes: the most that the half's kernels may hold, including the inputs that they free.
        resident: names of inputs that exist throughout.
        device_type: `cpu` or `cuda`.
        workspace_of: call of a library operator -> its workspace.
        num_parts: number of loops and library operators.
        num_kernels: number of kernels that they were fused into.
        peak_bytes: an upper bound on what the kernels hold.
    """

    limit_bytes: int
    resident: frozenset[str]
    device_type: str
    workspace_of: Callable[[Call], int]
    num_parts: int = 0
    num_kernels: int = 0
    peak_bytes: int = 0
    _place_of: dict[str, int] = field(default_factory=dict)
    # part -> maximum distance to the other parts of its kernel
    _reach: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Makes Inductor follow the plan while it compiles the half."""
        with scheduled(
            self._order,
            self._is_near,
            keep_apart=lambda graph: _realize(graph, products_to_keep_apart(graph)),
            realize=self._realize,
            key=f"{_code_digest()} {self.limit_bytes} {self.device_type} {sorted(self.resident)}",
        ):
            yield

    def summary(self) -> str:
        """Says in one line what was compiled."""
        if not self.num_parts:
            return "as it was compiled before"
        return (
            f"{self.num_parts} loops and library operators in {self.num_kernels} kernels, "
            f"which hold at most {describe_bytes(self.peak_bytes)} of "
            f"{describe_bytes(self.limit_bytes)}"
        )

    def _realize(self, graph: fx.Graph) -> None:
        found = values_to_realize(graph, self.resident, self.limit_bytes, self.workspace_of)
        _realize(graph, found)

    def _is_near(self, names: Sequence[str]) -> bool:
        limited = [name for name in names if name in self._reach]
        if not limited:
            return True

        places = [self._place_of[name] for name in names]
        first, last = min(places), max(places)
        return all(
            max(last - self._place_of[name], self._place_of[name] - first) <= self._reach[name]
            for name in limited
        )

    def _order(self, kernels: list[Any]) -> list[Any]:
        """Returns the kernels in the plan's order; fuses again while they exceed the limit."""
        if not kernels:
            return kernels

        parts = parts_of(kernels, self.resident, self.device_type)
        number = {part.name: index for index, part in enumerate(parts.parts)}
        loops = _loops(parts, self.workspace_of)
        self._place_of = {
            part.name: loop.place for part, loop in zip(parts.parts, loops.loops, strict=True)
        }

        def in_order() -> list[Kernel]:
            return loops.in_order([[number[n] for n in part_names(k)] for k in kernels])

        order = in_order()
        for _ in range(_ROUNDS):
            if max(loops.bytes_at(order)) <= self.limit_bytes:
                break
            blamed = loops.to_blame(order, self.limit_bytes)
            if not blamed:
                break

            for loop, reach in blamed.items():
                name = parts.parts[loop].name
                self._reach[name] = min(reach, self._reach.get(name, reach))
            kernels = fused_again(kernels)
            order = in_order()

        self.peak_bytes = max(loops.bytes_at(order))
        self.num_parts, self.num_kernels = len(number), len(order)

        by_first = {number[part_names(kernel)[0]]: kernel for kernel in kernels}
        ordered = [by_first[kernel[0]] for kernel in order]
        if self.device_type == "cpu":
            launches = loops.launches(order, self.limit_bytes)
            self.peak_bytes = max(loops.bytes_together(launches))
            end_functions_after(ordered, {parts.parts[launch[-1][0]].name for launch in launches})
        return ordered


@cache
def _code_digest() -> str:
    """Returns a digest of our code that steers Inductor."""
    folder = Path(__file__).parent
    border = folder.parent / "torch_border"
    files = [
        *sorted(folder.glob("*.py")),
        border / "kernel_scheduler.py",
        border / "inductor_passes.py",
    ]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _realize(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        users = list(node.users)
        with graph.inserting_after(node):
            realized = graph.call_function(realize_operator(), (node,))
        realized.meta = dict(node.meta)
        for user in users:
            user.replace_input_with(node, realized)


def _loops(parts: Parts, workspace_of: Callable[[Call], int]) -> Loops:
    place_of = {node: place for place, node in enumerate(parts.nodes)}
    number = {part.name: index for index, part in enumerate(parts.parts)}
    size_bytes: dict[str, int] = {}
    for part in parts.parts:
        size_bytes |= part.reads | part.writes
    buffer = {name: index for index, name in enumerate(size_bytes)}

    def loop(part: Part) -> Loop:
        called = [] if part.is_loop else [n for n in part.origins if n.op == "call_function"]
        workspaces = (workspace_of(Call.of(node)) for node in called)
        # Inductor also names the library operator that a loop's result was stored for
        computed = [n for n in part.origins if not part.is_loop or is_of_loop(n)] or part.origins
        return Loop(
            place=max((place_of.get(node, -1) for node in computed), default=-1),
            after=frozenset(number[name] for name in part.after),
            reads=tuple(buffer[name] for name in part.reads),
            writes=tuple(buffer[name] for name in part.writes),
            is_fusible=part.is_loop,
            overwrites=frozenset(buffer[name] for name in part.overwrites),
            workspace_bytes=max(workspaces, default=0),
        )

    return Loops(
        tuple(map(loop, parts.parts)),
        tuple(size_bytes.values()),
        frozenset(buffer[name] for name in parts.inputs),
        frozenset(buffer[name] for name in parts.outputs if name in buffer),
    )
