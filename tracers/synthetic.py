"""Graphs made by rule: small, exactly known, and one for each way in which a graph can be awkward.

A training-like graph is a forward DAG with a loss and its mirror image: the backward operator of
node i reads the gradients of i's users, what i read and what i wrote. `chain`, `chain_with_skips`,
`unet`, `diamond`, `random_layered` and `transformer` are what networks look like; `FAMILIES` adds
the pathological ones at sizes that a test can afford.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from remat.core.graph import Graph, Operator, Phase, Value, ValueKind


def training_step(
    parents: Sequence[Sequence[int]],
    cost: Sequence[float],
    size: Sequence[int],
    *,
    backward_ratio: float = 1.0,
    has_phases: bool = True,
) -> Graph:
    """Returns the training step of a forward DAG: its nodes, a loss, and one backward node each.

    Args:
        parents: for each forward node, the earlier nodes that it reads.
        cost: cost of each forward node; the loss costs 1, or 0 where every node does.
        size: size of each forward node's output and of its gradient; the loss has the smallest.
        backward_ratio: cost of a backward node over that of its forward node.
        has_phases: False leaves out which nodes are backward, as plain DAG files do.

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
    """Returns a U-Net: `depth` halvings with two layers each, a bottom, and the way up with skips.

    A level's outputs halve in size on the way down; its cost stays, as channels double.
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
    """Returns `count` diamonds in a row: a node, two branches of unlike cost, and their join."""
    parents: list[list[int]] = [[]]
    cost = [1.0]
    for _ in range(count):
        top = len(parents) - 1
        parents += [[top], [top], [top + 1, top + 2]]
        cost += [5.0, 1.0, 2.0]
    return training_step(parents, cost, [size] * len(parents))


def random_layered(num_nodes: int, *, seed: int, width: int = 4, is_training: bool = True) -> Graph:
    """Returns a random DAG in layers of `width`: most edges from the layer before, a few from far.

    Args:
        num_nodes: forward nodes, or all nodes where `is_training` is False.
        seed: the same seed gives the same graph.
        width: nodes a layer.
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
    """Returns one node that reads every other one: they must all be in memory at once."""
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
    """Returns a chain in which computing is free."""
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


@dataclass
class _Tape:
    """Records forward operators and what their backward needs, then plays them backwards."""

    values: list[Value] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    # (forward operator, what its backward reads)
    saved_by: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    states: set[int] = field(default_factory=set)  # what snapshots write
    outputs: list[int] = field(default_factory=list)

    def value(self, name: str, size_bytes: int, kind: ValueKind = ValueKind.INTERMEDIATE) -> int:
        self.values.append(Value(name, size_bytes, kind))
        return len(self.values) - 1

    def call(
        self,
        name: str,
        target: str,
        reads: Sequence[int],
        sizes: Sequence[int],
        *,
        cost_s: float,
        module: str,
        saves: Sequence[int] = (),
    ) -> list[int]:
        """Appends a forward operator; `saves` counts reads from 0 and writes from -1 downwards."""
        writes = [self.value(f"{name}.{i}", size) for i, size in enumerate(sizes)]
        operator = Operator(
            name,
            cost_s,
            tuple(reads),
            tuple(writes),
            workspace_bytes=min(sizes),
            target=target,
            module=module,
        )
        needed = tuple(dict.fromkeys(reads[i] if i >= 0 else writes[-1 - i] for i in saves))
        self.saved_by.append((len(self.operators), needed))
        self.operators.append(operator)
        return writes

    def snapshot(self, name: str) -> int:
        """Appends the saved state of a random generator, which only recomputations need."""
        state = self.value(name, 16)
        self.operators.append(
            Operator(name, 0.0, (), (state,), pinned="reads the random generator", is_snapshot=True)
        )
        self.states.add(state)
        return state

    def backward(self, loss: int) -> Graph:
        """Returns the graph with the mirror image of every call.

        Gradients of parameters are outputs.
        """
        gradient_of = {loss: loss}
        for index, needed in reversed(self.saved_by):
            op = self.operators[index]
            reads = dict.fromkeys(
                [*(gradient_of[v] for v in op.writes if v in gradient_of), *needed]
            )
            targets = [
                v
                for v in op.reads
                if self.values[v].kind is not ValueKind.INPUT and v not in self.states
            ]
            writes = [self.value(f"grad.{op.name}.{v}", self.values[v].size_bytes) for v in targets]
            if writes:
                self.operators.append(
                    Operator(
                        f"{op.name}_backward",
                        2 * op.cost_s,
                        tuple(reads),
                        tuple(writes),
                        phase=Phase.BACKWARD,
                        module=op.module,
                    )
                )
            for value, written in zip(targets, writes, strict=True):
                gradient_of[value] = (
                    self._accumulate(gradient_of[value], written)
                    if value in gradient_of
                    else written
                )
        self.outputs += [
            g for v, g in gradient_of.items() if self.values[v].kind is ValueKind.PARAMETER
        ]
        return Graph(tuple(self.values), tuple(self.operators), (loss, *self.outputs))

    def _accumulate(self, old: int, new: int) -> int:
        total = self.value(f"sum.{old}.{new}", self.values[new].size_bytes)
        self.operators.append(
            Operator(
                f"add.{old}.{new}",
                0.1,
                (old, new),
                (total,),
                phase=Phase.BACKWARD,
                target="aten.add.Tensor",
                reuses=(old, new),
            )
        )
        return total


def transformer(num_blocks: int, *, width: int = 64, has_names: bool = True) -> Graph:
    """Returns the training step of a small transformer, with all that a traced one has.

    Blocks `blocks.0`, ... of attention (with dropout on its weights) and a two-layer perceptron,
    resident parameters, operators with several outputs, workspaces, gradients added in place and
    kept as outputs, and a snapshot of the random generator before each dropout.

    Args:
        num_blocks: number of blocks.
        width: bytes of an activation; attention weights take four times that.
        has_names: False leaves targets and modules out.
    """
    tape = _Tape()
    stream = tape.value("tokens", width, ValueKind.INPUT)
    table = tape.value("embed.weight", width, ValueKind.PARAMETER)
    (stream,) = tape.call(
        "embed",
        "aten.embedding.default",
        [table, stream],
        [width],
        cost_s=1,
        module="embed",
        saves=[1],
    )
    for i in range(num_blocks):
        stream = _attention(tape, stream, f"blocks.{i}", width)
        stream = _perceptron(tape, stream, f"blocks.{i}", width)
    (loss, _) = tape.call(
        "loss",
        "aten.nll_loss_forward.default",
        [stream],
        [4, 4],
        cost_s=1,
        module="",
        saves=[0, -2],
    )
    graph = tape.backward(loss)
    if has_names:
        return graph
    return replace(
        graph, operators=tuple(replace(op, target="", module="") for op in graph.operators)
    )


def _attention(tape: _Tape, stream: int, block: str, width: int) -> int:
    module = f"{block}.attn"
    weights = [
        tape.value(f"{module}.{name}.weight", width, ValueKind.PARAMETER)
        for name in ("qkv", "proj")
    ]
    norm, mean = tape.call(
        f"{block}.norm1",
        "aten.native_layer_norm.default",
        [stream],
        [width, 4],
        cost_s=1,
        module=f"{block}.norm1",
        saves=[0, -2],
    )
    del mean
    (qkv,) = tape.call(
        f"{module}.qkv",
        "aten.mm.default",
        [norm, weights[0]],
        [3 * width],
        cost_s=12,
        module=f"{module}.qkv",
        saves=[0, 1],
    )
    (scores,) = tape.call(
        f"{module}.scores",
        "aten.bmm.default",
        [qkv],
        [4 * width],
        cost_s=6,
        module=module,
        saves=[0],
    )
    (soft,) = tape.call(
        f"{module}.softmax",
        "aten._softmax.default",
        [scores],
        [4 * width],
        cost_s=2,
        module=module,
        saves=[-1],
    )
    state = tape.snapshot(f"{module}.rng")
    dropped, mask = tape.call(
        f"{module}.dropout",
        "aten.native_dropout.default",
        [soft, state],
        [4 * width, width],
        cost_s=2,
        module=module,
        saves=[-2],
    )
    del mask
    (context,) = tape.call(
        f"{module}.context",
        "aten.bmm.default",
        [dropped, qkv],
        [width],
        cost_s=6,
        module=module,
        saves=[0, 1],
    )
    (out,) = tape.call(
        f"{module}.proj",
        "aten.mm.default",
        [context, weights[1]],
        [width],
        cost_s=4,
        module=f"{module}.proj",
        saves=[0, 1],
    )
    (stream,) = tape.call(
        f"{block}.add1", "aten.add.Tensor", [stream, out], [width], cost_s=1, module=block
    )
    return stream


def _perceptron(tape: _Tape, stream: int, block: str, width: int) -> int:
    module = f"{block}.mlp"
    weights = [tape.value(f"{module}.{i}.weight", 4 * width, ValueKind.PARAMETER) for i in (0, 2)]
    (hidden,) = tape.call(
        f"{module}.0",
        "aten.mm.default",
        [stream, weights[0]],
        [4 * width],
        cost_s=16,
        module=f"{module}.0",
        saves=[0, 1],
    )
    (active,) = tape.call(
        f"{module}.1",
        "aten.gelu.default",
        [hidden],
        [4 * width],
        cost_s=2,
        module=f"{module}.1",
        saves=[0],
    )
    (out,) = tape.call(
        f"{module}.2",
        "aten.mm.default",
        [active, weights[1]],
        [width],
        cost_s=16,
        module=f"{module}.2",
        saves=[0, 1],
    )
    (stream,) = tape.call(
        f"{block}.add2", "aten.add.Tensor", [stream, out], [width], cost_s=1, module=block
    )
    return stream


def random_step(num_operators: int, *, seed: int) -> Graph:
    """Returns a random small graph that has whatever a graph can have.

    Resident values, several or no outputs, workspaces, zero sizes and costs, in-place operators,
    pinned operators and snapshots, results that must outlive the step, and a backward phase that
    begins anywhere; one region.
    """
    random = np.random.default_rng(seed)
    values = [
        Value(f"resident{i}", int(random.integers(0, 4)), ValueKind.PARAMETER)
        for i in range(int(random.integers(0, 3)))
    ]
    operators: list[Operator] = []
    boundary = int(random.integers(1, num_operators + 1)) if num_operators else 0
    for i in range(num_operators):
        count = min(len(values), int(random.integers(0, 4)))
        recent = values[-6:]
        reads = sorted(
            len(values) - len(recent) + int(j)
            for j in random.choice(len(recent), min(count, len(recent)), replace=False)
        )
        is_snapshot = bool(random.random() < 0.1)
        num_writes = 1 if is_snapshot else int(random.choice([0, 1, 1, 1, 1, 2]))
        writes = tuple(range(len(values), len(values) + num_writes))
        values += [Value(f"v{w}", int(random.integers(0, 9))) for w in writes]
        operators.append(
            Operator(
                f"op{i}",
                float(random.integers(0, 6)),
                tuple(reads),
                writes,
                workspace_bytes=int(random.choice([0, 0, 3])),
                phase=Phase.FORWARD if i < boundary else Phase.BACKWARD,
                pinned="snapshot"
                if is_snapshot
                else str(random.choice(["", "", "", "", "effect"])),
                reuses=tuple(reads[:1])
                if num_writes == 1 and not is_snapshot and random.random() < 0.4
                else (),
                is_snapshot=is_snapshot,
            )
        )
    written = [w for op in operators for w in op.writes]
    outputs = (
        tuple(int(v) for v in random.choice(written, min(2, len(written)), replace=False))
        if written
        else ()
    )
    return Graph(tuple(values), tuple(operators), outputs)


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
"""One small graph of every kind, by name: what a test runs over."""
