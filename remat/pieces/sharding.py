"""Adds to a joined step what FSDP2 holds: gathered parameters and gradients, until freed.

For a block with U bytes of full parameters, FSDP2 (torch 2.13, `_fsdp_param_group.py`) holds:

- forward: the gathered buffer and the parameters copied out of it, 2 U, until the block returns;
- backward: the parameters, U; the buffer into which the next block was gathered ahead of time (that
  of the last block exists from the beginning, if the model has parameters outside of the blocks);
  gradients of U bytes; the buffer they are reduced from, U, until the next block's gradients are
  reduced; and the shard of the gradients, which stays.

Pinned operators write and read all of it: collectives are never planned, and never repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import nn

from remat.core.graph import Graph
from remat.core.operators import Operator, Phase, Value, ValueKind
from remat.pieces.joined_step import JoinedStep
from remat.torch_border.sharded import held_bytes, is_sharded

_PINNED = "it is a collective of FSDP2, and is not planned"


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the parameters of a model's blocks are sharded.

    Attributes:
        share: bytes of a block's shard over bytes of its full parameters, in the dtype of the
            computation.
        num_resident: how many values of a joined graph are the model's own: shards, buffers,
            inputs.
        outside_bytes: bytes of full parameters outside of all blocks. FSDP2 holds them from the
            forward to the end of the backward; their gradients, and the buffer that these are
            reduced from, take as much each.
    """

    share: float
    num_resident: int
    outside_bytes: int


def sharding_of(
    model: nn.Module, joined: JoinedStep, num_resident: int, outside_bytes: int
) -> Sharding | None:
    """Returns how the parameters of a model's blocks are sharded; None where they are not.

    To be called after a forward.
    """
    shard_bytes = sum(held_bytes(p) for p in model.parameters() if is_sharded(p))
    full_bytes = sum(joined.graph.values[v].size_bytes for v in _gathered(joined, num_resident))
    if not shard_bytes or not full_bytes:
        return None
    return Sharding(shard_bytes / full_bytes, num_resident, outside_bytes)


def outside_bytes(model: nn.Module, blocks: Iterable[nn.Module]) -> int:
    """Returns the full size of sharded parameters outside of `blocks`.

    To be called before a forward.
    """
    within = {id(p) for block in blocks for p in block.parameters()}
    return sum(
        p.numel() * p.element_size()
        for p in model.parameters()
        if is_sharded(p) and id(p) not in within
    )


def _gathered(joined: JoinedStep, num_resident: int) -> list[int]:
    """Returns the runs' full parameters: resident values that are not the model's own."""
    values = joined.graph.values
    return [v for v in range(num_resident, len(values)) if values[v].kind is ValueKind.PARAMETER]


def with_sharding(joined: JoinedStep, sharding: Sharding) -> JoinedStep:
    """Returns the joined step with FSDP2's memory in place of permanently full parameters."""
    return _Timeline(joined, sharding).build()


class _Timeline:
    """Copies a joined graph and adds FSDP2's operators around each run of a sharded block."""

    def __init__(self, joined: JoinedStep, sharding: Sharding) -> None:
        self.joined, self.sharding = joined, sharding
        self.values = list(joined.graph.values)
        self.operators: list[Operator] = []
        self.origin: dict[int, tuple[int, int]] = {}
        self.outputs = dict.fromkeys(joined.graph.outputs)

        self.full_bytes = self._full_bytes()
        self.order = [i for i, size in enumerate(self.full_bytes) if size]  # runs of sharded blocks
        self.buffer: dict[int, int] = {}  # run -> buffer gathered ahead for its backward
        self.reduced = -1  # the buffer that the latest gradients were reduced from

    def _full_bytes(self) -> list[int]:
        sizes = [0] * len(self.joined.runs)
        readers = self.joined.graph.users_of
        for value in _gathered(self.joined, self.sharding.num_resident):
            region = (
                self.joined.graph.operators[readers[value][0]].region
                if readers[value]
                else len(sizes)
            )

            if region < len(sizes):
                sizes[region] += self.values[value].size_bytes
            self.values[value] = replace(self.values[value], size_bytes=0)
        return sizes

    def build(self) -> JoinedStep:
        graph = self.joined.graph
        for index, op in enumerate(graph.operators):
            is_first = index == 0 or self._half(index - 1) != self._half(index)
            is_last = index + 1 == graph.num_operators or self._half(index + 1) != self._half(index)
            is_sharded_run = op.region in self.order

            if op.phase is Phase.BACKWARD and graph.operators[index - 1].phase is Phase.FORWARD:
                self._begin_backward()
            if is_sharded_run and is_first:
                self._begin(op.region, op.phase)
            if index in self.joined.origin:
                self.origin[len(self.operators)] = self.joined.origin[index]
            self.operators.append(op)
            if is_sharded_run and is_last:
                self._end(op.region, op.phase)

        if self.sharding.outside_bytes:
            self.values.append(
                Value(
                    "gradients_outside_of_blocks", 2 * self.sharding.outside_bytes, ValueKind.BUFFER
                )
            )

        joined = Graph(
            tuple(self.values),
            tuple(self._numbered()),
            tuple(sorted(self.outputs)),
            device=graph.device,
            costs=graph.costs,
        )
        return replace(self.joined, graph=joined, origin=self.origin)

    def _half(self, index: int) -> tuple[int, Phase]:
        op = self.joined.graph.operators[index]
        return op.region, op.phase

    def _numbered(self) -> Iterator[Operator]:
        """Gives each operator between the runs a region of its own."""
        for index, op in enumerate(self.operators):
            yield (
                op
                if op.region < len(self.joined.runs)
                else replace(op, region=len(self.joined.runs) + index)
            )

    def _begin_backward(self) -> None:
        """Gathers the last block ahead, as the group of the parameters outside of blocks does."""
        if self.sharding.outside_bytes and self.order:
            self._add("gather_ahead", (), (self._gathered_ahead(self.order[-1]),), Phase.BACKWARD)

    def _gathered_ahead(self, run: int) -> int:
        self.buffer[run] = self._value(f"{run}.gathered_ahead", self.full_bytes[run])
        return self.buffer[run]

    def _begin(self, run: int, phase: Phase) -> None:
        size, place = self.full_bytes[run], self.order.index(run)
        before = self.order[place - 1] if place else None

        if phase is Phase.FORWARD:
            self.parameters = self._value(f"{run}.gathered", 2 * size)
            previous = self.full_bytes[before] if before is not None else 0
            self._add(
                f"{run}.gather",
                (),
                (self.parameters,),
                phase,
                workspace_bytes=previous + self._shard(size),
            )
            return

        self.parameters = self._value(f"{run}.gathered_again", size)
        own = self.buffer.pop(run, None)
        writes = [self.parameters]
        if before is not None:
            writes.append(self._gathered_ahead(before))
        workspace_bytes = self._shard(size) + (size if own is None else 0)

        self._add(
            f"{run}.gather_again",
            () if own is None else (own,),
            writes,
            phase,
            workspace_bytes=workspace_bytes,
        )

    def _end(self, run: int, phase: Phase) -> None:
        self._add(f"{run}.reshard_{phase}", (self.parameters,), (), phase)
        if phase is Phase.FORWARD:
            return

        gradients = self._gradients(run)
        for gradient in gradients:
            self.outputs.pop(gradient, None)

        size = sum(self.values[v].size_bytes for v in gradients)
        reads = gradients if self.reduced < 0 else (*gradients, self.reduced)
        self.reduced = self._value(f"{run}.reduced", size)
        shard = self._value(f"{run}.gradient_shard", self._shard(size))
        self._add(f"{run}.reduce", reads, (self.reduced, shard), phase)
        self.outputs[shard] = None

    def _gradients(self, run: int) -> tuple[int, ...]:
        """Returns the full gradients of a run's gathered parameters."""
        own = self.joined.value_of[run]
        found = dict.fromkeys(
            own[v] for v in self.joined.runs[run].parameter_gradients() if v in own
        )
        return tuple(v for v in found if v in self.outputs)

    def _shard(self, size_bytes: int) -> int:
        return int(size_bytes * self.sharding.share) + 1

    def _value(self, name: str, size_bytes: int) -> int:
        self.values.append(Value(name, size_bytes))
        return len(self.values) - 1

    def _add(
        self,
        name: str,
        reads: Iterable[int],
        writes: Iterable[int],
        phase: Phase,
        *,
        workspace_bytes: int = 0,
    ) -> None:
        region = len(self.joined.runs)  # `_numbered` gives it a region of its own
        self.operators.append(
            Operator(
                name,
                0.0,
                tuple(reads),
                tuple(writes),
                workspace_bytes,
                phase=phase,
                region=region,
                pinned=_PINNED,
                target="collective",
            )
        )
