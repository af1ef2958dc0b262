"""Generated graphs: small, exactly known, and one for each special case of a graph.

The graph of a training step is a forward DAG with a loss and its mirror image: the backward
operator of node i reads the gradients of i's users, what i read and what i wrote. `chain`,
`chain_with_skips`, `unet`, `diamond`, `random_layered` and `transformer` resemble networks;
`FAMILIES` adds special cases, at sizes that a test can afford.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from remat.core.graph import Graph
from remat.core.operators import Operator, Phase, Value, ValueKind

from .synthetic_transformer import transformer as transformer


def training_step(
    parents: Sequence[Sequence[int]],
    cost: Sequence[float],
    size: Sequence[int],
    *,
    backward_ratio: float = 1.0,
    has_phases: bool = True,
) -> Graph:
    """Returns the training step of a forward DAG: its nodes, a loss, one backward node each.

    Args:
        parents: for each forward node, the earlier nodes that it reads.
        cost: cost of each forward node; the loss costs 1, or 0 if every node costs 0.
        size: size of each forward node's output and of its gradient; the loss has the smallest
            of these sizes.
        backward_ratio: cost of a backward node over that of its forward node.
        has_phases: if False, nodes have no phase, as in plain DAG files.

    >>> [operator.reads for operator in training_step([[], [0]], [1, 1], [1, 1]).operators]
    [(), (0,), (1,), (0, 1, 2), (0, 3)]
    """
    length = len(parents)
    edges = [(p, i) for i, reads in enumerate(parents) for p in reads]
    users: list[list[int]] = [[v for u, v in edges if u == i] for i in range(length)]

    for i in range(length):
        back = 2 * length - i
        gradients = [2 * length - user for user in users[i]] or [length]
        edges += [(u, back) for u in (i, *parents[i], *gradients)]
    edges += [(i, length) for i in range(length) if not users[i]]

    return Graph.from_arrays(
        [*cost, float(any(cost)), *(c * backward_ratio for c in reversed(cost))],
        [*size, min(size, default=1), *reversed(size)],
        edges,
        first_backward=length + 1 if has_phases else None,
    )


def chain(length: int, *, cost: float = 1.0, size: int = 1, has_phases: bool = True) -> Graph:
    """Returns the training step of `length` equal layers, each reading the one before.

    >>> chain(36).num_operators
    73
    """
    return training_step(
        [[i - 1] if i else [] for i in range(length)],
        [cost] * length,
        [size] * length,
        has_phases=has_phases,
    )


def chain_with_skips(length: int, *, span: int = 3, cost: float = 1.0, size: int = 4) -> Graph:
    """Returns a chain in which every `span`-th layer also reads the layer `span` before it."""
    parents = [
        sorted({i - 1, i - span} if i >= span and i % span == 0 else {i - 1}) if i else []
        for i in range(length)
    ]
    return training_step(parents, [cost] * length, [size] * length)


def unet(depth: int) -> Graph:
    """Returns a U-Net: `depth` levels of two layers down, a bottom, the levels up with skips.

    On the way down, sizes halve from level to level; costs stay equal, because channels double.
    """
    parents: list[list[int]] = []
    size: list[int] = []
    ends: list[int] = []

    for level in range(depth):
        for _ in range(2):
            parents.append([len(parents) - 1] if parents else [])
            size.append(2 ** (depth - level + 2))
        ends.append(len(parents) - 1)

    parents.append([len(parents) - 1] if parents else [])
    size.append(4)

    for level in reversed(range(depth)):
        parents.append(sorted({len(parents) - 1, ends[level]}))
        parents.append([len(parents) - 1])
        size += [2 ** (depth - level + 2)] * 2

    return training_step(parents, [3.0] * len(parents), size)


def diamond(count: int, *, size: int = 2) -> Graph:
    """Returns `count` diamonds in a row: a node, two branches of different cost, their join."""
    parents: list[list[int]] = [[]]
    cost = [1.0]
    for _ in range(count):
        top = len(parents) - 1
        parents += [[top], [top], [top + 1, top + 2]]
        cost += [5.0, 1.0, 2.0]
    return training_step(parents, cost, [size] * len(parents))


def random_layered(num_nodes: int, *, seed: int, width: int = 4, is_training: bool = True) -> Graph:
    """Returns a random DAG in layers of `width`.

    Most edges come from the layer before, a few from earlier ones.

    Args:
        num_nodes: forward nodes, or all nodes where `is_training` is False.
        seed: the same seed gives the same graph.
        width: nodes per layer.
        is_training: mirror the DAG into a training step; otherwise it has no phases.
    """
    random = np.random.default_rng(seed)
    parents: list[list[int]] = []

    for i in range(num_nodes):
        first = (i // width) * width
        near = range(max(0, first - width), first)

        chosen = (
            {
                int(p)
                for p in random.choice(
                    near, size=min(len(near), int(random.integers(1, 3))), replace=False
                )
            }
            if near
            else set()
        )

        if first > width and random.random() < 0.15:
            chosen.add(int(random.integers(0, first - width)))
        parents.append(sorted(chosen))

    cost = [float(c) for c in random.integers(1, 20, num_nodes)]
    size = [int(s) for s in random.integers(1, 50, num_nodes)]

    if is_training:
        return training_step(parents, cost, size)
    return Graph.from_arrays(cost, size, [(p, i) for i, reads in enumerate(parents) for p in reads])


def star(leaves: int) -> Graph:
    """Returns a hub that every leaf reads."""
    return training_step(
        [[], *([0] for _ in range(leaves))], [1.0] * (leaves + 1), [2] * (leaves + 1)
    )


def wide_fan_in(leaves: int) -> Graph:
    """Returns one node that reads all others, which have to be in memory together."""
    return training_step(
        [*([] for _ in range(leaves)), range(leaves)], [1.0] * (leaves + 1), [2] * (leaves + 1)
    )


def all_pinned(length: int) -> Graph:
    """Returns a chain in which no operator may be computed again."""
    graph = chain(length)
    return replace(
        graph,
        operators=tuple(replace(op, pinned="runs once by construction") for op in graph.operators),
    )


def half_zero_size(length: int) -> Graph:
    """Returns a chain in which every second value takes no memory."""
    return training_step(
        [[i - 1] if i else [] for i in range(length)],
        [1.0] * length,
        [i % 2 for i in range(length)],
    )


def zero_cost(length: int) -> Graph:
    """Returns a chain in which every operator has cost 0."""
    return chain(length, cost=0.0)


def two_regions(length: int) -> Graph:
    """Returns a chain of two compiled pieces: forward, forward, backward, backward.

    As in a traced step, each backward begins with the gradient that arrives from outside.
    """
    order = [("forward", i) for i in range(2 * length)] + [("loss", 1)]
    for region in (1, 0):
        order += [
            ("tangent", region),
            *(("backward", i) for i in reversed(range(region * length, (region + 1) * length))),
        ]

    place = {node: position for position, node in enumerate(order)}
    edges = [(position - 1, position) for position in range(1, len(order))]
    for i in range(2 * length):
        edges += [(place["forward", j], place["backward", i]) for j in (i - 1, i) if j >= 0]

    plain = Graph.from_arrays(
        [float(kind != "tangent") for kind, _ in order],
        [1] * len(order),
        edges,
        first_backward=place["tangent", 1],
    )

    operators = [
        replace(
            op,
            region=i if kind in ("loss", "tangent") else int(i >= length),
            pinned="it arrives from outside" if kind == "tangent" else "",
            target="tangent" if kind == "tangent" else "",
        )
        for op, (kind, i) in zip(plain.operators, order, strict=True)
    ]

    return replace(plain, operators=tuple(operators), outputs=(place["loss", 1],))


def random_step(num_operators: int, *, seed: int) -> Graph:
    """Returns a random small graph with all features that a graph of one region can have.

    These are resident values, operators with several or no outputs, workspaces, zero sizes and
    costs, in-place operators, pinned operators and snapshots, results that outlive the step, and a
    backward phase that begins anywhere.
    """
    random = np.random.default_rng(seed)
    values = [
        Value(f"resident{i}", int(random.integers(0, 4)), ValueKind.PARAMETER)
        for i in range(int(random.integers(0, 3)))
    ]

    operators: list[Operator] = []
    boundary = int(random.integers(1, num_operators + 1)) if num_operators else 0

    for i in range(num_operators):
        phase = Phase.FORWARD if i < boundary else Phase.BACKWARD
        operator, fresh = _random_operator(random, values, i, phase)
        operators.append(operator)
        values += fresh

    written = [w for op in operators for w in op.writes]
    outputs = (
        tuple(int(v) for v in random.choice(written, min(2, len(written)), replace=False))
        if written
        else ()
    )

    return Graph(tuple(values), tuple(operators), outputs)


def _random_operator(
    random: np.random.Generator, values: Sequence[Value], index: int, phase: Phase
) -> tuple[Operator, list[Value]]:
    """Returns a random operator that reads some of the latest values, and what it writes."""
    count = min(len(values), int(random.integers(0, 4)))
    recent = values[-6:]
    reads = sorted(
        len(values) - len(recent) + int(j)
        for j in random.choice(len(recent), min(count, len(recent)), replace=False)
    )

    is_snapshot = bool(random.random() < 0.1)
    num_writes = 1 if is_snapshot else int(random.choice([0, 1, 1, 1, 1, 2]))
    writes = tuple(range(len(values), len(values) + num_writes))
    written = [Value(f"v{w}", int(random.integers(0, 9))) for w in writes]

    operator = Operator(
        f"op{index}",
        float(random.integers(0, 6)),
        tuple(reads),
        writes,
        workspace_bytes=int(random.choice([0, 0, 3])),
        phase=phase,
        pinned="snapshot" if is_snapshot else str(random.choice(["", "", "", "", "effect"])),
        reuses=tuple(reads[:1])
        if num_writes == 1 and not is_snapshot and random.random() < 0.4
        else (),
        is_snapshot=is_snapshot,
    )

    return operator, written


FAMILIES: Mapping[str, Callable[[], Graph]] = MappingProxyType(
    {
        "chain": lambda: chain(25),
        "chain_without_phases": lambda: chain(16, has_phases=False),
        "chain_with_skips": lambda: chain_with_skips(18),
        "unet": lambda: unet(3),
        "diamond": lambda: diamond(5),
        "random_layered": lambda: random_layered(24, seed=1),
        "random_layered_without_phases": lambda: random_layered(30, seed=2, is_training=False),
        "transformer": lambda: transformer(3),
        "transformer_without_names": lambda: transformer(2, has_names=False),
        "star": lambda: star(8),
        "wide_fan_in": lambda: wide_fan_in(8),
        "all_pinned": lambda: all_pinned(6),
        "half_zero_size": lambda: half_zero_size(10),
        "zero_cost": lambda: zero_cost(10),
        "two_regions": lambda: two_regions(6),
        "single": lambda: Graph.from_arrays([1.0], [3], []),
        "empty": lambda: Graph.from_arrays([], [], []),
        "random_step": lambda: random_step(14, seed=6),
    }
)
"""One small graph of every kind, by name, for tests."""
