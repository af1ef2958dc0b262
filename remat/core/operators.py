"""What a graph is made of: values (storages), and operators, which read and write them.

A view belongs to its base and is not a value of its own. An operator with several outputs writes
several values, which are freed one by one. *Resident* values (parameters, buffers, inputs) hold
their memory for the whole step, and no operator writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from remat.core import limits
from remat.core.errors import GraphError
from remat.core.limits import shown


class Phase(StrEnum):
    """The half of a training step that an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


class ValueKind(StrEnum):
    """What a value is. Every kind but `INTERMEDIATE` is resident."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    INTERMEDIATE = "intermediate"


@dataclass(frozen=True, slots=True)
class Value:
    """A storage: `size_bytes` of memory; name, shape and dtype are for reports."""

    name: str
    size_bytes: int
    kind: ValueKind = ValueKind.INTERMEDIATE
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def __post_init__(self) -> None:
        if fault := limits.size_fault(self.size_bytes):
            raise GraphError(f"value {shown(self.name)} has {fault}")

    @property
    def is_resident(self) -> bool:
        """True if the value holds its memory for the whole step."""
        return self.kind is not ValueKind.INTERMEDIATE


@dataclass(frozen=True, slots=True)
class Operator:
    """One computation.

    Attributes:
        name: unique in its graph.
        cost_s: time of computing it once, in seconds (or in the unit of the instance).
        reads: indices of the values it needs in memory, without repetition.
        writes: indices of the values it produces, one storage each.
        workspace_bytes: memory it holds while it runs, beyond what it reads and writes.
        phase: forward or backward.
        region: the compiled piece it belongs to; it may be recomputed only during the forward or
            the backward of that piece.
        pinned: why it must never be recomputed; empty if it may be.
        reuses: values among `reads` whose memory its one output may take over if nothing reads
            them afterwards (the operator then works in place).
        is_snapshot: its values exist for recomputations only (the state of a random generator, a
            buffer before it is changed). Such a value takes memory only if one of its readers is
            recomputed.
        target: the operator that runs, such as `aten.mm.default`.
        module: the module it comes from, such as `blocks.0.attn`.
        source: the line of code it comes from, such as `model.py:31`.
    """

    name: str
    cost_s: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    workspace_bytes: int = 0
    phase: Phase = Phase.FORWARD
    region: int = 0
    pinned: str = ""
    reuses: tuple[int, ...] = ()
    is_snapshot: bool = False
    target: str = ""
    module: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        fault = (
            limits.cost_fault(self.cost_s)
            or limits.size_fault(self.workspace_bytes).replace("the size", "the workspace", 1)
            or (limits.index_fault(self.region) and f"the region {limits.index_fault(self.region)}")
        )
        if fault:
            raise GraphError(f"operator {shown(self.name)} has {fault}")

        if len(set(self.reads)) != len(self.reads) or len(set(self.writes)) != len(self.writes):
            raise GraphError(f"operator {shown(self.name)} names a value twice")
        if not set(self.reuses) <= set(self.reads):
            raise GraphError(f"operator {shown(self.name)} reuses a value that it does not read")
        if self.reuses and len(self.writes) != 1:
            raise GraphError(
                f"operator {shown(self.name)} works in place and writes {len(self.writes)} values; "
                "one is needed"
            )

    @property
    def is_recomputable(self) -> bool:
        """True if the operator may be computed more than once."""
        return not self.pinned

    @property
    def is_backward(self) -> bool:
        """True if the operator belongs to the backward pass."""
        return self.phase is Phase.BACKWARD
