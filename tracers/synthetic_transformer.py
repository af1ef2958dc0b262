"""The training step of a small transformer, generated with all features of a traced step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from remat.core.graph import Graph
from remat.core.operators import Operator, Phase, Value, ValueKind


@dataclass
class _Tape:
    """Records forward operators and what their backward reads, then makes the backward."""

    values: list[Value] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    # (forward operator, what its backward reads)
    saved_by: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    states: set[int] = field(default_factory=set)  # values that snapshots write
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
        """Appends a forward operator, and returns what it writes.

        `saves` lists what its backward reads: reads by index from 0, writes as -1, -2, ...
        """
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
        """Appends a snapshot of the random generator, which only recomputation reads."""
        state = self.value(name, 16)
        self.operators.append(
            Operator(name, 0.0, (), (state,), pinned="reads the random generator", is_snapshot=True)
        )
        self.states.add(state)
        return state

    def backward(self, loss: int) -> Graph:
        """Returns the graph with a backward for every call; gradients of parameters are outputs."""
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
    """Returns the training step of a small transformer, with all features of a traced one.

    It has blocks `blocks.0`, ... of attention (with dropout on its weights) and a two-layer
    perceptron, resident parameters, operators with several outputs, workspaces, gradients added in
    place and kept as outputs, and a snapshot of the random generator before each dropout.

    Args:
        num_blocks: number of blocks.
        width: bytes of an activation; attention weights are four times as large.
        has_names: if False, operators have no targets and modules.
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

    qkv = _queries_keys_values(tape, stream, weights[0], block, width)
    dropped = _attention_weights(tape, qkv, module, width)
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


def _queries_keys_values(tape: _Tape, stream: int, weight: int, block: str, width: int) -> int:
    """Appends the norm and the projection, and returns queries, keys and values as one value."""
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
        f"{block}.attn.qkv",
        "aten.mm.default",
        [norm, weight],
        [3 * width],
        cost_s=12,
        module=f"{block}.attn.qkv",
        saves=[0, 1],
    )
    return qkv


def _attention_weights(tape: _Tape, qkv: int, module: str, width: int) -> int:
    """Appends scores, softmax and dropout, and returns the weights after dropout."""
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

    return dropped


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
