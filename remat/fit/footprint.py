"""What memory holds at the peak of a training step, the optimizer included."""

from __future__ import annotations

from dataclasses import dataclass

from remat.analysis.composition import Category, Composition
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.fit.optimizer_memory import OptimizerMemory


@dataclass(frozen=True, slots=True)
class Held:
    """What is held beside the step itself, throughout.

    Attributes:
        optimizer: its memory.
        gradient_bytes: of all parameters that are trained.
        accumulated_bytes: gradients of earlier micro-batches.
        reserve_bytes: kept free.
    """

    optimizer: OptimizerMemory
    gradient_bytes: int
    accumulated_bytes: int
    reserve_bytes: int

    @property
    def total(self) -> int:
        """Bytes of all of it during forward and backward."""
        return self.optimizer.state_bytes + self.accumulated_bytes + self.reserve_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """What memory holds at the peak of a step, in bytes; the parts sum to `total`.

    Attributes:
        parameters: all of the model's.
        buffers_and_inputs: the model's buffers, and the batch.
        optimizer: the optimizer's state, and what was asked to be kept free.
        gradients: of parameters, as many as are there at the peak, and those accumulated before.
        activations: saved for the backward, or computed again for it.
        temporaries: short-lived results and workspace of operators.
    """

    parameters: int
    buffers_and_inputs: int
    optimizer: int
    gradients: int
    activations: int
    temporaries: int

    @property
    def total(self) -> int:
        """The peak."""
        return (
            self.parameters
            + self.buffers_and_inputs
            + self.optimizer
            + self.gradients
            + self.activations
            + self.temporaries
        )

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, held: Held) -> Footprint:
        """Returns what a schedule holds at its peak, with what is held beside the step."""
        parts = Composition.of(graph, schedule).at(simulate(graph, schedule).peak_step)
        return cls(
            parameters=parts[Category.PARAMETERS],
            buffers_and_inputs=parts[Category.INPUTS],
            optimizer=held.optimizer.state_bytes + held.reserve_bytes,
            gradients=parts[Category.PARAMETER_GRADIENTS] + held.accumulated_bytes,
            activations=parts[Category.SAVED] + parts[Category.RECOMPUTED],
            temporaries=parts[Category.TEMPORARY]
            + parts[Category.GRADIENTS]
            + parts[Category.WORKSPACE],
        )
