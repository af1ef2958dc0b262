"""The values of a joint graph: the storage that each tensor is in, with sizes and kinds."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from remat.core.operators import Value, ValueKind
from remat.torch_border.higher_order import is_token
from remat.torch_border.scalars import is_symbol

from .phases import is_backward_input
from .recomputable import unsavable_inputs
from .retarget import allocated_bytes, is_for_cuda, statistics_on_cuda
from .storages import Storages


def is_only_read_as_number(node: fx.Node) -> bool:
    """True for an input tensor in which dynamo passes a Python number.

    Only the number is read, so the tensor is not a value: the graph is the same as if the number
    were a constant.
    """
    return bool(node.users) and all(is_symbol(user.meta.get("val")) for user in node.users)


def is_part(node: fx.Node) -> bool:
    """True for one output, taken from an operator with several outputs."""
    return node.target is operator.getitem


class StepValues:
    """The values of a joint graph, and which of them each tensor node is in.

    Attributes:
        device_type: where the step will run: `cuda` if any tensor is there, otherwise `cpu`.
        traced_on: where its tensors are; values of tensors elsewhere have size 0.
        values: the values so far.
        value_of: tensor node -> the value of its storage.
        value_of_storage: key of a storage -> its value.
        unsavable: values of inputs that the backward can't read.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        gradients: Sequence[Any],
        static_inputs: frozenset[int],
        storages: Storages,
    ) -> None:
        self.module, self.gradients = module, gradients
        self.static_inputs, self.storages = static_inputs, storages
        self.traced_on = _device_type(module)
        self.device_type = "cuda" if is_for_cuda() else self.traced_on
        self.values: list[Value] = []
        self.value_of: dict[fx.Node, int] = {}
        self.value_of_storage: dict[int, int] = {}
        self.unsavable: set[int] = set()

    def size(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
        """Returns the bytes of a tensor's storage, as the device's allocator rounds them.

        With `dtype`, returns the bytes of the same storage with elements of that type.
        """
        if tensor.device.type != self.traced_on:
            return 0

        size_bytes = tensor.untyped_storage().nbytes()
        if dtype is not None:
            size_bytes = size_bytes // tensor.dtype.itemsize * dtype.itemsize

        return allocated_bytes(size_bytes, self.traced_on)

    def add(
        self, name: str, tensor: torch.Tensor, kind: ValueKind, dtype: torch.dtype | None = None
    ) -> int:
        """Adds the value of a tensor's storage, and returns its index.

        With `dtype`, the value has that type instead of the tensor's.
        """
        self.values.append(
            Value(
                name,
                self.size(tensor, dtype),
                kind,
                tuple(map(int, tensor.shape)),
                str(dtype or tensor.dtype).removeprefix("torch."),
            )
        )

        index = len(self.values) - 1
        key = self.storages.key(tensor)
        assert key is not None
        self.value_of_storage[key] = index

        return index

    def add_inputs(self, order: list[fx.Node]) -> None:
        """Adds the resident values: parameters, buffers, inputs and constants."""
        primals = -1
        inputs = [node for node in order if node.op == "placeholder"]
        numbers = {node for node in inputs if is_only_read_as_number(node)}
        # effect tokens come first, and have no gradients
        num_tokens = sum(is_token(node) and not is_backward_input(node) for node in inputs)
        gradients = [*[None] * num_tokens, *self.gradients]
        unsavable = set(unsavable_inputs(self.module.graph))

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
                self.add(node.name, tensor, self._input_kind(node, primals, gradients))
            self.value_of[node] = self.value_of_storage[key]

            if node in unsavable:
                self.unsavable.add(self.value_of[node])

    def _input_kind(self, node: fx.Node, place: int, gradients: Sequence[Any]) -> ValueKind:
        if node.op == "get_attr":
            return ValueKind.BUFFER
        if place not in self.static_inputs:
            return ValueKind.INPUT
        # the step returns its gradient
        is_trained = gradients[place] is not None
        return ValueKind.PARAMETER if is_trained else ValueKind.BUFFER

    def add_unread(self, model_bytes: int) -> None:
        """Adds the parameters and buffers that the step does not read, as one value."""
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

    def add_results(self, node: fx.Node, fresh: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Adds the values of the storages that a node makes, and returns them."""
        wide = set(map(id, statistics_on_cuda(node))) if is_for_cuda() else set()
        writes = tuple(
            self.add(
                self._part_name(node, tensor),
                tensor,
                ValueKind.INTERMEDIATE,
                torch.float32 if id(tensor) in wide else None,
            )
            for tensor in fresh
        )

        if isinstance(node.meta.get("val"), torch.Tensor):
            self.value_of[node] = self.value_of_storage[self.storages.of(node) or 0]

        for part in node.users:
            if is_part(part) and isinstance(part.meta.get("val"), torch.Tensor):
                self.value_of[part] = self.value_of_storage[self.storages.of(part) or 0]

        return writes

    def _part_name(self, node: fx.Node, tensor: torch.Tensor) -> str:
        if node.meta.get("val") is tensor:
            return node.name
        return next(
            (p.name for p in node.users if is_part(p) and p.meta.get("val") is tensor),
            f"{node.name}.{len(self.values)}",
        )

    def add_view(self, node: fx.Node) -> None:
        """Notes which value a view is in."""
        for source in node.all_input_nodes:
            if source in self.value_of:
                self.value_of[node] = self.value_of[source]
        key = self.storages.of(node)
        if key is not None:
            self.value_of[node] = self.value_of_storage[key]


def _device_type(module: fx.GraphModule) -> str:
    types = {
        n.meta["val"].device.type
        for n in module.graph.nodes
        if isinstance(n.meta.get("val"), torch.Tensor)
    }
    return "cuda" if "cuda" in types else "cpu"


def sources(node: fx.Node) -> list[fx.Node]:
    """Returns what a node reads, and for each symbol the nodes that it is made from.

    A symbol is made again in the backward, from the same tensors.
    """
    found: dict[fx.Node, None] = {}
    waiting = list(node.all_input_nodes)
    while waiting:
        source = waiting.pop(0)
        if source not in found:
            found[source] = None
            waiting += source.all_input_nodes if is_symbol(source.meta.get("val")) else []
    return list(found)
