"""The joint forward+backward `torch.fx` graph of AOTAutograd as a `Graph` of operators and
storages.

Fake tensors know which of them share memory; that, not the schema, decides what is a view. Each
node of the joint graph is one of:

- an *input*: a parameter, buffer, argument or constant; its storage is resident;
- a *view*: it makes no storage of its own. Views are made again where they are needed, and cost
  nothing;
- a *part*: one output of an operator that has several, taken at once;
- a *symbol*: a Python number that changes from step to step, or arithmetic on such. It takes no
  memory, and is made again where it is read;
- an *operator*: everything else.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from remat.core.graph import Graph, Operator, Phase, Value, ValueKind
from remat.narration.stages import stage
from remat.torch_border.scalars import is_symbol

from .cleaning import clean
from .costs import CostModel
from .origin import module_of, source_of
from .phases import execution_order, is_backward_input, mark_phases, phase_of
from .recomputable import InPlaceForm, in_place_forms, is_inference, is_random, pinned_reason
from .rounding import refuse_uneven_gates
from .storages import Storages, tensors_of

_LOG = logging.getLogger(__name__)

# torch.get_rng_state().nbytes; on CUDA the state is a CPU tensor and takes none of the device's
# memory
CPU_GENERATOR_BYTES = 5056
CUDA_GRANULARITY_BYTES = 512  # c10/cuda/CUDACachingAllocator: kMinBlockSize


@dataclass(frozen=True)
class TracedStep:
    """A training step as a `Graph`, and how to get from its operators back to `torch.fx` nodes.

    Attributes:
        graph: the operators and storages.
        module: the cleaned joint graph.
        num_forward_outputs: how many of the joint graph's results belong to the forward.
        nodes: the node of each operator; for a snapshot the node of the input it copies, or of
            the random operator whose generator state it takes.
        value_of: the value that each tensor node lives in.
        snapshots: mutated input node -> the value of its snapshot.
        generator_states: random operator -> the value of its generator state.
        in_place: (operator, value) -> the call that takes over the value's memory.
    """

    graph: Graph
    module: fx.GraphModule
    num_forward_outputs: int
    nodes: tuple[fx.Node, ...]
    value_of: dict[fx.Node, int]
    snapshots: dict[fx.Node, int] = field(default_factory=dict)
    generator_states: dict[int, int] = field(default_factory=dict)
    in_place: dict[tuple[int, int], InPlaceForm] = field(default_factory=dict)

    @cached_property
    def operator_of(self) -> dict[fx.Node, int]:
        """The operator that each computing node is; snapshots have none of their own."""
        virtual = ("tangent", "snapshot", "generator_state")
        return {
            node: i
            for i, node in enumerate(self.nodes)
            if self.graph.operators[i].target not in virtual
        }


def is_only_read_as_number(node: fx.Node) -> bool:
    """True for an input in which dynamo hands a Python number over.

    Only the number is read, so that it is no value: the graph is that of a step whose number is
    a constant.
    """
    return bool(node.users) and all(is_symbol(user.meta.get("val")) for user in node.users)


def is_part(node: fx.Node) -> bool:
    """True for an output taken from an operator with several."""
    return node.target is operator.getitem


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
        costs: the model that gives each operator its seconds and workspace.
        static_inputs: places of parameters and buffers among the inputs.
        model_bytes: of all parameters and buffers of the model; what the step does not read is held
            all the same.
    """
    refuse_uneven_gates(module.graph)
    storages = Storages()
    mark_phases(module.graph)
    clean(module, storages)
    return _Reader(module, num_forward_outputs, costs, frozenset(static_inputs), storages).read(
        model_bytes
    )


class _Reader:
    """Walks the joint graph once in execution order, collecting values and operators."""

    def __init__(
        self,
        module: fx.GraphModule,
        num_forward_outputs: int,
        costs: CostModel,
        static_inputs: frozenset[int],
        storages: Storages,
    ) -> None:
        self.module, self.num_forward_outputs, self.costs = module, num_forward_outputs, costs
        self.static_inputs, self.storages = static_inputs, storages
        self.values: list[Value] = []
        self.operators: list[Operator] = []
        self.nodes: list[fx.Node] = []
        self.value_of: dict[fx.Node, int] = {}
        self.value_of_storage: dict[int, int] = {}
        self.target_of_writer: dict[int, str] = {}
        self.snapshots: dict[fx.Node, int] = {}
        self.generator_states: dict[int, int] = {}
        self.in_place: dict[tuple[int, int], InPlaceForm] = {}
        self.unsavable: set[int] = set()
        results = module.graph.output_node().args[0]
        assert isinstance(results, list | tuple)
        self.results = results
        self.held_tangents: list[int] = []
        self.mutated = self._mutated_inputs()
        self.device_type = self._device_type()

    def _add_nodes(self, order: Sequence[fx.Node]) -> None:
        """Adds the operators, and what each costs, which may have to be measured."""
        with stage(f"costs of {len(order):,} operators by {self.costs.name}") as told:
            for number, node in enumerate(order):
                told.say(f"{number:,} done")
                if node.op == "call_function" and node not in self.value_of:
                    self._add_node(node)

        _LOG.info(
            "captured %d operators; their costs by %s took %.1f s",
            len(self.operators),
            self.costs.name,
            told.elapsed_s,
        )

    def read(self, model_bytes: int) -> TracedStep:
        order = execution_order(self.module.graph, self.storages)
        self._add_inputs(order)
        self.read_in_backward = self._mutated_inputs_read_in_backward(order)
        self.kept_storages = {
            self.storages.of(node)
            for node in self.results[: self.num_forward_outputs]
            if isinstance(node, fx.Node)
        }
        self._add_nodes(order)
        self._add_tangents()  # where the backward computes nothing, such as that of `x + noise`
        self._add_unread(model_bytes)
        # no mesh of devices
        tensors = [
            node for node in self.results if isinstance(node, fx.Node) and node in self.value_of
        ]
        outputs = [self.value_of[node] for node in tensors]
        graph = Graph(
            values=tuple(self.values),
            operators=tuple(self.operators),
            outputs=tuple(
                sorted(
                    {
                        value
                        for value in (*outputs, *self.held_tangents)
                        if not self.values[value].is_resident
                    }
                )
            ),
            device=self.device_type,
            costs=self.costs.name,
        )
        return TracedStep(
            graph=graph,
            module=self.module,
            num_forward_outputs=self.num_forward_outputs,
            nodes=tuple(self.nodes),
            value_of=self.value_of,
            snapshots=self.snapshots,
            generator_states=self.generator_states,
            in_place=self.in_place,
        )

    def _device_type(self) -> str:
        types = {
            n.meta["val"].device.type
            for n in self.module.graph.nodes
            if isinstance(n.meta.get("val"), torch.Tensor)
        }
        return "cuda" if "cuda" in types else "cpu"

    def _mutated_inputs(self) -> dict[int | None, fx.Node]:
        """Storages of inputs that the step changes, and the input of each."""
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

    def _size(self, tensor: torch.Tensor) -> int:
        size_bytes = tensor.untyped_storage().nbytes()
        if tensor.device.type != self.device_type:
            return 0
        return (
            -(-size_bytes // CUDA_GRANULARITY_BYTES) * CUDA_GRANULARITY_BYTES
            if self.device_type == "cuda"
            else size_bytes
        )

    def _add_value(self, name: str, tensor: torch.Tensor, kind: ValueKind) -> int:
        self.values.append(
            Value(
                name,
                self._size(tensor),
                kind,
                tuple(map(int, tensor.shape)),
                str(tensor.dtype).removeprefix("torch."),
            )
        )
        index = len(self.values) - 1
        key = self.storages.key(tensor)
        assert key is not None
        self.value_of_storage[key] = index
        return index

    def _add_inputs(self, order: list[fx.Node]) -> None:
        primals = -1
        numbers = {
            node for node in order if node.op == "placeholder" and is_only_read_as_number(node)
        }
        for node in order:
            if node.op not in ("placeholder", "get_attr"):
                continue
            tensor = node.meta.get("val")
            if tensor is None and node.op == "get_attr":
                tensor = getattr(self.module, str(node.target), None)
                node.meta["val"] = tensor
            is_tangent = node.op == "placeholder" and is_backward_input(node)
            primals += node.op == "placeholder" and not is_tangent
            key = self.storages.key(tensor)
            if key is None or is_tangent or node in numbers:
                continue
            if key not in self.value_of_storage:
                assert isinstance(tensor, torch.Tensor)
                self._add_value(node.name, tensor, self._input_kind(node, primals))
            self.value_of[node] = self.value_of_storage[key]
            if is_inference(node):
                self.unsavable.add(self.value_of[node])

    def _input_kind(self, node: fx.Node, place: int) -> ValueKind:
        if node.op == "get_attr":
            return ValueKind.BUFFER
        if place not in self.static_inputs:
            return ValueKind.INPUT
        # the step returns its gradient
        is_trained = self.results[self.num_forward_outputs + place] is not None
        return ValueKind.PARAMETER if is_trained else ValueKind.BUFFER

    def _add_unread(self, model_bytes: int) -> None:
        """What the model holds beside the parameters and buffers that the step reads."""
        constants = {self.value_of[node] for node in self.value_of if node.op == "get_attr"}
        held = (ValueKind.PARAMETER, ValueKind.BUFFER)
        read_bytes = sum(
            value.size_bytes
            for i, value in enumerate(self.values)
            if value.kind in held and i not in constants
        )
        if model_bytes > read_bytes:
            self.values.append(
                Value("unread_parameters_and_buffers", model_bytes - read_bytes, ValueKind.BUFFER)
            )

    def _add_tangents(self) -> None:
        """The gradients that arrive from outside.

        Written by an operator of no cost, before the backward.
        """
        for node in self.module.graph.find_nodes(op="placeholder"):
            if (
                not is_backward_input(node)
                or node in self.value_of
                or not isinstance(node.meta.get("val"), torch.Tensor)
            ):
                continue
            value = self._add_value(node.name, node.meta["val"], ValueKind.INTERMEDIATE)
            self.value_of[node] = value
            if node.meta["val"].dim() == 0:
                # `loss.backward()` itself holds the 1.0 it starts from
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
            key: t for t in tensors if (key := self.storages.key(t)) not in self.value_of_storage
        }
        if not fresh and not _is_effect(node):
            self._add_view(node)
            return
        reads = self._reads(node)
        writes = tuple(
            self._add_value(self._part_name(node, t), t, ValueKind.INTERMEDIATE)
            for t in fresh.values()
        )
        if isinstance(node.meta.get("val"), torch.Tensor):
            self.value_of[node] = self.value_of_storage[self.storages.of(node) or 0]
        for part in node.users:
            if is_part(part) and isinstance(part.meta.get("val"), torch.Tensor):
                self.value_of[part] = self.value_of_storage[self.storages.of(part) or 0]
        pinned = pinned_reason(node, self.device_type)
        if not pinned and not self.unsavable.isdisjoint(reads):
            pinned = "it reads an inference tensor, which autograd can't keep for the backward"
        if not pinned and any(key in self.kept_storages for key in fresh):
            pinned = "its result leaves the forward, and is kept anyway"
        cost = self.costs.measure(node)
        workspace_bytes = cost.workspace_bytes
        if not pinned and is_random(node):
            reads = (*reads, self._add_generator_state(node))
            workspace_bytes = max(workspace_bytes, self._moving_on_bytes(node))
        index = self._append(
            Operator(
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
            ),
            node,
        )
        self._find_in_place_forms(index, node)

    def _part_name(self, node: fx.Node, tensor: torch.Tensor) -> str:
        if node.meta.get("val") is tensor:
            return node.name
        return next(
            (p.name for p in node.users if is_part(p) and p.meta.get("val") is tensor),
            f"{node.name}.{len(self.values)}",
        )

    def _add_view(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in self.value_of:
                self.value_of[node] = self.value_of[source]
        key = self.storages.of(node)
        if key is not None:
            self.value_of[node] = self.value_of_storage[key]

    def _reads(self, node: fx.Node) -> tuple[int, ...]:
        reads: dict[int, None] = {}
        for source in node.all_input_nodes:
            if source not in self.value_of:
                continue
            value = self.value_of[source]
            key = self.storages.of(source)
            if key in self.mutated and not _is_effect(node):
                value = self._snapshot(self.mutated[key])
            reads[value] = None
        return tuple(reads)

    def _snapshot(self, source: fx.Node) -> int:
        """The value that holds what `source` was before the step changes it."""
        if source not in self.snapshots:
            tensor = source.meta["val"]
            name, dtype = f"{source.name}_before", str(tensor.dtype).removeprefix("torch.")
            self.values.append(
                Value(name, self._size(tensor), ValueKind.INTERMEDIATE, tuple(tensor.shape), dtype)
            )
            self.snapshots[source] = len(self.values) - 1
            is_idle_until_recomputed = self.storages.key(tensor) not in self.read_in_backward
            pinned = "it copies a buffer that the step changes"
            operator_ = Operator(
                name,
                0.0,
                (self.value_of[source],),
                (self.snapshots[source],),
                pinned=pinned,
                is_snapshot=is_idle_until_recomputed,
                target="snapshot",
            )
            self._append(operator_, source)
        return self.snapshots[source]

    def _add_generator_state(self, node: fx.Node) -> int:
        """The state of the random generator at `node`: what a recomputation replays."""
        size_bytes = CPU_GENERATOR_BYTES if self.device_type == "cpu" else 0
        self.values.append(
            Value(f"{node.name}_generator", size_bytes, dtype="uint8", shape=(size_bytes,))
        )
        value = len(self.values) - 1
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
        # of the random operator, which comes next
        self.generator_states[len(self.operators)] = value
        return value

    def _moving_on_bytes(self, node: fx.Node) -> int:
        """What moving the default generator on takes beside the results.

        Dropout does so before it writes its first (`random_state`).
        """
        if self.device_type != "cpu":
            return 0
        is_dropout = node.target is torch.ops.aten.native_dropout.default
        return max(0, CPU_GENERATOR_BYTES - (self._size(tensors_of(node)[0]) if is_dropout else 0))

    def _find_in_place_forms(self, index: int, node: fx.Node) -> None:
        op = self.operators[index]
        if len(op.writes) != 1:
            return
        for form in in_place_forms(node, self.device_type):
            value = self.value_of.get(form.taken)
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
        if self.values[value].is_resident or value not in self.operators[-1].reads:
            return False
        # a caller's memory; a later reader's
        if self.target_of_writer[value] in ("tangent", "snapshot"):
            return False
        others = [source for source in node.all_input_nodes if source is not taken]
        return all(self.value_of.get(source) != value for source in others)


def _is_effect(node: fx.Node) -> bool:
    return not is_part(node) and bool(node.op == "call_function") and _mutates(node)


def _mutates(node: fx.Node) -> bool:
    target = node.target
    return not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable
