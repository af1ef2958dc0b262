"""Reads the joint graph of AOTAutograd, forward and backward, into a `Graph`.

Whether a node is a view is decided by the memory that its fake tensor shares, not by the operator's
schema. Each node of the joint graph is one of:

- an *input*: a parameter, buffer, argument or constant; its storage is resident;
- a *view*: it has no storage of its own. Views are made again where they are read, at no cost;
- a *part*: one of an operator's several outputs, unpacked when the operator runs;
- a *symbol*: a Python number that changes from step to step, or arithmetic on such numbers. It
  takes no memory, and is made again where it is read;
- an *operator*: everything else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx

from remat.core.graph import Graph
from remat.core.operators import Operator, Phase, Value, ValueKind
from remat.narration.stages import stage
from remat.torch_border.scalars import is_symbol

from .cleaning import clean
from .costs import CostModel
from .origin import module_of, source_of
from .phases import execution_order, is_backward_input, mark_phases, phase_of
from .recomputable import InPlaceForm, in_place_forms, is_random, pinned_reason
from .rounding import refuse_uneven_gates
from .step_values import StepValues, is_part, sources
from .storages import Storages, tensors_of
from .traced_step import CPU_GENERATOR_BYTES, TracedStep

_LOG = logging.getLogger(__name__)


def read_joint(
    module: fx.GraphModule,
    num_forward_outputs: int,
    costs: CostModel,
    *,
    static_inputs: Sequence[int] = (),
    model_bytes: int = 0,
) -> TracedStep:
    """Returns the step of a joint graph, which is cleaned in place.

    Args:
        module: forward and backward in one graph, under fake tensors.
        num_forward_outputs: how many of its results belong to the forward.
        costs: the cost model of the operators.
        static_inputs: indices of parameters and buffers among the inputs.
        model_bytes: size of all parameters and buffers of the model, including those that the step
            does not read.
    """
    refuse_uneven_gates(module.graph)
    storages = Storages()
    mark_phases(module.graph, num_forward_outputs)
    _check_every_version(module.graph)
    clean(module, storages)
    return _Reader(module, num_forward_outputs, costs, frozenset(static_inputs), storages).read(
        model_bytes
    )


def _check_every_version(graph: fx.Graph) -> None:
    """Makes autograd check that no saved tensor was changed, as for `save_for_backward`.

    AOTAutograd marks what a custom `autograd.Function` stores as an attribute of `ctx`. It expects
    such tensors to be the last that are saved, and neither checks nor frees as many (torch 2.13).
    """
    for node in graph.nodes:
        node.meta.pop("saved_tensor_with_no_vc_check", None)


class _Reader:
    """Walks the joint graph once in execution order, and collects values and operators."""

    def __init__(
        self,
        module: fx.GraphModule,
        num_forward_outputs: int,
        costs: CostModel,
        static_inputs: frozenset[int],
        storages: Storages,
    ) -> None:
        self.module, self.num_forward_outputs, self.costs = module, num_forward_outputs, costs
        self.storages = storages

        self.operators: list[Operator] = []
        self.nodes: list[fx.Node] = []
        self.target_of_writer: dict[int, str] = {}
        self.snapshots: dict[fx.Node, int] = {}
        self.generator_states: dict[int, int] = {}
        self.in_place: dict[tuple[int, int], InPlaceForm] = {}

        results = module.graph.output_node().args[0]
        assert isinstance(results, list | tuple)
        self.results = results

        self.table = StepValues(module, results[num_forward_outputs:], static_inputs, storages)
        self.held_tangents: list[int] = []
        self.mutated = self._mutated_inputs()

    def _add_nodes(self, order: Sequence[fx.Node]) -> None:
        """Adds the operators with their costs, which may have to be measured."""
        with stage(f"costs of {len(order):,} operators by {self.costs.name}") as progress:
            for number, node in enumerate(order):
                progress.say(f"{number:,} done")
                if node.op == "call_function" and node not in self.table.value_of:
                    self._add_node(node)

        _LOG.info(
            "captured %d operators; their costs by %s took %.1f s",
            len(self.operators),
            self.costs.name,
            progress.elapsed_s,
        )

    def read(self, model_bytes: int) -> TracedStep:
        order = execution_order(self.module.graph, self.storages)
        self.table.add_inputs(order)
        self.read_in_backward = self._mutated_inputs_read_in_backward(order)
        self.kept_storages = {
            self.storages.of(node)
            for node in self.results[: self.num_forward_outputs]
            if isinstance(node, fx.Node)
        }

        self._add_nodes(order)
        self._add_tangents()  # if the backward has no operator, like that of `x + noise`
        self.table.add_unread(model_bytes)

        return TracedStep(
            graph=self._graph(),
            module=self.module,
            num_forward_outputs=self.num_forward_outputs,
            nodes=tuple(self.nodes),
            value_of=self.table.value_of,
            snapshots=self.snapshots,
            generator_states=self.generator_states,
            in_place=self.in_place,
        )

    def _graph(self) -> Graph:
        values, value_of = self.table.values, self.table.value_of
        results = [node for node in self.results if isinstance(node, fx.Node) and node in value_of]
        held = {*(value_of[node] for node in results), *self.held_tangents}

        return Graph(
            values=tuple(values),
            operators=tuple(self.operators),
            outputs=tuple(sorted(value for value in held if not values[value].is_resident)),
            device=self.table.device_type,
            costs=self.costs.name,
        )

    def _mutated_inputs(self) -> dict[int | None, fx.Node]:
        """Returns storage -> input for the inputs that the step changes."""
        changed = {
            self.storages.of(node.args[0])
            for node in self.module.graph.nodes
            if node.target is torch.ops.aten.copy_.default and isinstance(node.args[0], fx.Node)
        }
        inputs = self.module.graph.find_nodes(op="placeholder")
        return {key: node for node in inputs if (key := self.storages.of(node)) in changed}

    def _mutated_inputs_read_in_backward(self, order: list[fx.Node]) -> set[int | None]:
        return {
            self.storages.of(source)
            for node in order
            if node.op == "call_function" and phase_of(node) is Phase.BACKWARD
            for source in node.all_input_nodes
        } & set(self.mutated)

    def _add_tangents(self) -> None:
        """Adds the gradients that arrive from outside, each written by an operator of cost 0."""
        for node in self.module.graph.find_nodes(op="placeholder"):
            if (
                not is_backward_input(node)
                or node in self.table.value_of
                or not isinstance(node.meta.get("val"), torch.Tensor)
            ):
                continue

            value = self.table.add(node.name, node.meta["val"], ValueKind.INTERMEDIATE)
            self.table.value_of[node] = value
            if node.meta["val"].dim() == 0:
                # `loss.backward()` itself holds the gradient of 1.0 that it starts from
                self.held_tangents.append(value)

            self._append(
                Operator(
                    node.name,
                    0.0,
                    (),
                    (value,),
                    phase=Phase.BACKWARD,
                    pinned="it arrives from outside",
                    target="tangent",
                ),
                node,
            )

    def _append(self, op: Operator, node: fx.Node) -> int:
        self.operators.append(op)
        self.nodes.append(node)
        self.target_of_writer |= dict.fromkeys(op.writes, op.target)
        return len(self.operators) - 1

    def _add_node(self, node: fx.Node) -> None:
        if phase_of(node) is Phase.BACKWARD and not any(
            op.phase is Phase.BACKWARD for op in self.operators[-1:]
        ):
            self._add_tangents()

        if is_symbol(node.meta.get("val")):
            return

        tensors = tensors_of(node)
        fresh = {
            key: t
            for t in tensors
            if (key := self.storages.key(t)) not in self.table.value_of_storage
        }

        if not fresh and not _is_effect(node):
            self.table.add_view(node)
            return

        reads = self._reads(node)
        writes = self.table.add_results(node, fresh.values())
        pinned = self._pinned(node, reads, fresh)
        index = self._append(self._operator(node, reads, writes, pinned), node)
        self._find_in_place_forms(index, node)

    def _operator(
        self, node: fx.Node, reads: tuple[int, ...], writes: tuple[int, ...], pinned: str
    ) -> Operator:
        """Returns a node's operator with its cost; one that draws reads a generator's state."""
        cost = self.costs.measure(node)
        workspace_bytes = cost.workspace_bytes
        if not pinned and is_random(node):
            reads = (*reads, self._add_generator_state(node))
            workspace_bytes = max(workspace_bytes, self._moving_on_bytes(node))

        return Operator(
            name=node.name,
            cost_s=cost.cost_s,
            reads=reads,
            writes=writes,
            workspace_bytes=workspace_bytes,
            phase=phase_of(node),
            pinned=pinned,
            target=str(node.target),
            module=module_of(node),
            source=source_of(node),
        )

    def _pinned(self, node: fx.Node, reads: Sequence[int], fresh: Iterable[int | None]) -> str:
        """Returns why an operator may not be computed again; empty where it may."""
        pinned = pinned_reason(node, self.table.device_type)
        if not pinned and not self.table.unsavable.isdisjoint(reads):
            pinned = "it reads an input that autograd can't keep for the backward"
        if not pinned and any(key in self.kept_storages for key in fresh):
            pinned = "its result leaves the forward, and is kept anyway"
        return pinned

    def _reads(self, node: fx.Node) -> tuple[int, ...]:
        reads: dict[int, None] = {}
        for source in sources(node):
            if source not in self.table.value_of:
                continue

            value = self.table.value_of[source]
            key = self.storages.of(source)
            if key in self.mutated and not _is_in_place(node):
                value = self._snapshot(self.mutated[key])
            reads[value] = None
        return tuple(reads)

    def _snapshot(self, source: fx.Node) -> int:
        """Returns the value that holds `source` as it was before the step changes it."""
        if source not in self.snapshots:
            tensor = source.meta["val"]
            name, dtype = f"{source.name}_before", str(tensor.dtype).removeprefix("torch.")
            self.table.values.append(
                Value(
                    name,
                    self.table.size(tensor),
                    ValueKind.INTERMEDIATE,
                    tuple(tensor.shape),
                    dtype,
                )
            )

            self.snapshots[source] = len(self.table.values) - 1
            is_idle_until_recomputed = self.storages.key(tensor) not in self.read_in_backward
            pinned = "it copies a buffer that the step changes"

            operator_ = Operator(
                name,
                0.0,
                (self.table.value_of[source],),
                (self.snapshots[source],),
                pinned=pinned,
                is_snapshot=is_idle_until_recomputed,
                target="snapshot",
            )

            self._append(operator_, source)

        return self.snapshots[source]

    def _add_generator_state(self, node: fx.Node) -> int:
        """Adds the state of the random generator before `node`, for recomputation to replay."""
        size_bytes = CPU_GENERATOR_BYTES if self.table.device_type == "cpu" else 0
        self.table.values.append(
            Value(f"{node.name}_generator", size_bytes, dtype="uint8", shape=(size_bytes,))
        )

        value = len(self.table.values) - 1
        pinned = "it takes the state of the random generator"
        op = Operator(
            f"{node.name}_generator",
            0.0,
            (),
            (value,),
            phase=phase_of(node),
            pinned=pinned,
            is_snapshot=True,
            target="generator_state",
        )

        self._append(op, node)
        self.generator_states[len(self.operators)] = value  # the random operator comes next

        return value

    def _moving_on_bytes(self, node: fx.Node) -> int:
        """Returns the memory that updating the default generator takes beyond the results.

        Dropout updates the generator before its first result exists (`random_state`).
        """
        if self.table.device_type != "cpu":
            return 0
        is_dropout = node.target is torch.ops.aten.native_dropout.default
        return max(
            0, CPU_GENERATOR_BYTES - (self.table.size(tensors_of(node)[0]) if is_dropout else 0)
        )

    def _find_in_place_forms(self, index: int, node: fx.Node) -> None:
        op = self.operators[index]
        if len(op.writes) != 1:
            return

        for form in in_place_forms(node, self.table.device_type):
            value = self.table.value_of.get(form.taken)
            if (
                value is None
                or not self._may_be_taken(value, form.taken, node)
                or (index, value) in self.in_place
            ):
                continue

            self.in_place[index, value] = form

        taken = tuple(value for i, value in self.in_place if i == index)
        self.operators[index] = replace(op, reuses=taken)

    def _may_be_taken(self, value: int, taken: fx.Node, node: fx.Node) -> bool:
        if self.table.values[value].is_resident or value not in self.operators[-1].reads:
            return False
        # a tangent's memory is the caller's, and a snapshot is read later
        if self.target_of_writer[value] in ("tangent", "snapshot"):
            return False
        others = [source for source in node.all_input_nodes if source is not taken]
        return all(self.table.value_of.get(source) != value for source in others)


def _is_effect(node: fx.Node) -> bool:
    return not is_part(node) and bool(node.op == "call_function") and _mutates(node)


def _is_in_place(node: fx.Node) -> bool:
    """True for an ATen operator that changes an input; higher-order operators only read them."""
    return isinstance(node.target, torch._ops.OpOverload) and _is_effect(node)


def _mutates(node: fx.Node) -> bool:
    target = node.target
    return not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable
