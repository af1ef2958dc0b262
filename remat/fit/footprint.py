"""The memory at the peak of a training step, by use, including the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from remat.analysis.composition import Category, Composition
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.fit.optimizer_memory import OptimizerMemory


@dataclass(frozen=True, slots=True)
class Held:
    """What training holds in memory besides the step itself.

    Attributes:
        optimizer: the memory of the optimizer.
        gradient_bytes: the gradients of all trained parameters. They are results of the step and so
            not part of `total`.
        accumulated_bytes: gradients of earlier micro-batches.
        reserve_bytes: kept free.
        library_bytes: what cuBLAS holds on a GPU.
    """

    optimizer: OptimizerMemory
    gradient_bytes: int
    accumulated_bytes: int
    reserve_bytes: int
    library_bytes: int = 0

    @property
    def throughout_bytes(self) -> int:
        """Bytes held all the time, besides the step and the optimizer."""
        return self.reserve_bytes + self.library_bytes

    @property
    def total(self) -> int:
        """Bytes held besides the step during forward and backward."""
        return self.optimizer.state_bytes + self.accumulated_bytes + self.throughout_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes in memory at the peak of a step; the parts sum to `total`.

    Attributes:
        parameters: the model's parameters.
        buffers_and_inputs: the model's buffers, and the batch.
        optimizer: the optimizer's state, the reserve, and what cuBLAS holds.
        gradients: the gradients that the step returns, as far as they exist at the peak, and
            accumulated ones.
        activations: values of the forward that are saved or recomputed.
        temporaries: other values of the forward, intermediate gradients, and operators' workspace.
    """

    parameters: int
    buffers_and_inputs: int
    optimizer: int
    gradients: int
    activations: int
    temporaries: int

    @property
    def total(self) -> int:
        """The peak in bytes."""
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
        """Returns the memory at a schedule's peak, with what is held besides the step."""
        parts = Composition.of(graph, schedule).at(simulate(graph, schedule).peak_step)
        return cls(
            parameters=parts[Category.PARAMETERS],
            buffers_and_inputs=parts[Category.INPUTS],
            optimizer=held.optimizer.state_bytes + held.throughout_bytes,
            gradients=parts[Category.PARAMETER_GRADIENTS] + held.accumulated_bytes,
            activations=parts[Category.SAVED] + parts[Category.RECOMPUTED],
            temporaries=parts[Category.TEMPORARY]
            + parts[Category.GRADIENTS]
            + parts[Category.WORKSPACE],
        )
