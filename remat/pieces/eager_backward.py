"""The backward of eager operators between the pieces of a step, read off the autograd graph.

Nothing runs: autograd's nodes say what they saved, how large each gradient is that they pass on,
and in which order the engine will run them. What a node holds only while it runs is not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.core.errors import TraceError
from remat.pieces.break_messages import OUT_OF_THE_PIECES
from remat.pieces.unplanned_memory import autograd_nodes
from remat.torch_border.autograd import (
    arriving_bytes,
    is_compiled_node,
    passes_on,
    saved_tensors,
    sequence_number,
)
from remat.torch_border.sharded import local_part
from remat.tracers.retarget import allocated_bytes


@dataclass(frozen=True)
class EagerNode:
    """The backward of one eager operator. Gradients are indices into `EagerBackward.sizes`.

    Attributes:
        name: autograd's name of the node.
        gap: how many runs came before the operator.
        saved: storage -> bytes of what it saved.
        takes: gradients of eager operators that it reads.
        makes: gradients that it allocates.
        is_from_run: it also reads the gradients that a run passes on.
        is_to_run: it makes a gradient for a run.
    """

    name: str
    gap: int
    saved: Mapping[int, int]
    takes: tuple[int, ...]
    makes: tuple[int, ...]
    is_from_run: bool
    is_to_run: bool


@dataclass(frozen=True)
class EagerBackward:
    """The backward of all eager operators of a step.

    Attributes:
        nodes: in the order in which they run.
        sizes: bytes of each gradient that an eager operator reads or makes.
        arriving: gradients of what the model returned -> whether it is a scalar.
        of_leaves: storage of a parameter or input -> its gradient.
        returned: storage -> bytes of what the model returned.
    """

    nodes: Sequence[EagerNode] = ()
    sizes: Sequence[int] = ()
    arriving: Mapping[int, bool] = field(default_factory=dict)
    of_leaves: Mapping[int, int] = field(default_factory=dict)
    returned: Mapping[int, int] = field(default_factory=dict)

    def before(self, gap: int) -> list[EagerNode]:
        """Returns the nodes of the operators that ran right before run `gap`."""
        return [node for node in self.nodes if node.gap == gap]


def eager_backward(
    results: Iterable[torch.Tensor], inputs: Iterable[Any], kind: str
) -> EagerBackward:
    """Returns the backward of the eager operators of a forward.

    Tensors on devices of another type than `kind` have a size of 0.

    Raises:
        TraceError: torch would refuse the backward.
    """
    return _Walk(results, inputs, kind).found()


_OF_A_RUN = -1  # a gradient that a run made; the joined graph has it already


class _Walk:
    """Goes through the autograd graph in the order of the backward, and follows each gradient."""

    def __init__(self, results: Iterable[torch.Tensor], inputs: Iterable[Any], kind: str) -> None:
        self.results, self.kind = list(results), kind
        # sequence numbers rise along the forward, and the engine takes the highest first
        inputs = list(inputs)
        nodes = autograd_nodes(self.results, inputs)
        self.order = sorted(nodes, key=sequence_number, reverse=True)

        self.nodes: list[EagerNode] = []
        self.sizes: list[int] = []
        self.arriving: dict[int, bool] = {}
        self.of_leaves: dict[int, int] = {}
        # where the gradient of an input arrives -> its storage
        self.of_inputs = {
            (t.grad_fn, t.output_nr): t.untyped_storage()._cdata
            for t in inputs
            if isinstance(t, torch.Tensor) and t.grad_fn is not None
        }
        # node -> index of its output -> the gradients that arrive for it
        self.waiting: defaultdict[Any, dict[int, list[int]]] = defaultdict(dict)

    def found(self) -> EagerBackward:
        saved = [_saved(node) for node in self.order]
        is_run = list(map(_is_run, self.order, saved))
        self._arrive()

        gap = sum(is_run)
        for node, tensors, is_ours in zip(self.order, saved, is_run, strict=True):
            if is_ours:
                gap -= 1
                for after, index in node.next_functions:
                    self.waiting[after].setdefault(index, []).append(_OF_A_RUN)
            else:
                self._follow(node, gap, tensors)
        returned = self._storages(self.results)
        return EagerBackward(self.nodes, self.sizes, self.arriving, self.of_leaves, returned)

    def _arrive(self) -> None:
        """Adds gradients for those results from which no other result was made."""
        reached = {after for node in self.order for after, _ in node.next_functions}
        for result in self.results:
            node, index = result.grad_fn, result.output_nr
            if node is None or node in reached or is_compiled_node(node):
                continue
            if index not in self.waiting[node]:
                made = self._new(node, index)
                self.arriving[made] = result.dim() == 0
                self.waiting[node][index] = [made]

    def _follow(self, node: Any, gap: int, saved: Iterable[torch.Tensor]) -> None:
        """Adds a node, and hands on its gradients."""
        takes = [g for gradients in self.waiting.pop(node, {}).values() for g in gradients]
        makes: list[int] = []
        is_to_run = False
        for after, index in node.next_functions:
            if after is None:
                continue
            if is_compiled_node(after):
                is_to_run = True
            else:
                self._hand_on(node, takes, after, index, makes)

        own = tuple(dict.fromkeys(gradient for gradient in takes if gradient != _OF_A_RUN))
        self.nodes.append(
            EagerNode(
                name=node.name(),
                gap=gap,
                saved=self._storages(saved),
                takes=own,
                makes=tuple(makes),
                is_from_run=_OF_A_RUN in takes,
                is_to_run=is_to_run,
            )
        )

    def _hand_on(
        self, node: Any, takes: Sequence[int], after: Any, index: int, makes: list[int]
    ) -> None:
        """Passes a gradient on to a node or a leaf; adds it to `makes` if it is a new tensor."""
        there = self.waiting[after].setdefault(index, [])
        if takes and passes_on(node, arriving_bytes(after, index)[1]):
            there.append(takes[0])
        else:
            made = self._new(after, index)
            makes.append(made)
            if not there or there == [_OF_A_RUN]:
                there.append(made)  # a later one is added to it in place, and freed

        leaf = self._leaf(after, index)
        if leaf is not None:
            self.of_leaves[leaf] = max(there)

    def _leaf(self, node: Any, index: int) -> int | None:
        """Returns the storage of the parameter or input whose gradient arrives at `node`."""
        if hasattr(node, "variable"):
            storage: int = local_part(node.variable).untyped_storage()._cdata
            return storage
        return self.of_inputs.get((node, index))

    def _new(self, node: Any, index: int) -> int:
        """Adds the gradient that arrives for an output of `node`."""
        kind, size_bytes = arriving_bytes(node, index)
        self.sizes.append(allocated_bytes(size_bytes, kind) if kind == self.kind else 0)
        return len(self.sizes) - 1

    def _storages(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Returns storage -> bytes."""
        return {
            tensor.untyped_storage()._cdata: (
                allocated_bytes(tensor.untyped_storage().nbytes(), self.kind)
                if tensor.device.type == self.kind
                else 0
            )
            for tensor in tensors
        }


def _saved(node: Any) -> list[torch.Tensor]:
    try:
        return saved_tensors(node)
    except RuntimeError as error:
        why = str(error).split(". ", maxsplit=1)[0]
        raise TraceError(
            f"torch can't run the backward of this step cut into pieces: {why} (saved by "
            f"{node.name()}). {OUT_OF_THE_PIECES}"
        ) from None


def _is_run(node: Any, saved: Sequence[torch.Tensor]) -> bool:
    """True for the node of a piece, by the token that its forward saves first."""
    is_token = bool(saved) and saved[0].dim() == 3 and saved[0].numel() == 0
    return is_token and is_compiled_node(node)
