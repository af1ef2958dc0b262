"""Private names of Inductor's scheduler: what it fuses is read, ordered and fused again.

Supported: torch 2.11 to 2.15; each name below was checked with 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from remat.torch_border.inductor_passes import key_beside, named, run_after, users

_LIBRARY: list[Any] = []  # an operator exists as long as the library that defines it


@dataclass(frozen=True)
class Part:
    """A loop that Inductor may fuse with others, or a library operator.

    Attributes:
        name: its name.
        origins: nodes of the lowered graph that it computes; none for a part that only names one of
            several results of a library operator, which makes all of them when it runs.
        after: names of the parts that must run before it.
        reads: the buffers that it reads, by name, and their bytes.
        writes: the new buffers that it writes, by name, and their bytes. Several parts may write
            parts of one buffer, a concatenation.
        overwrites: buffers whose memory it may take for a result, if it is the last to read them.
        is_loop: whether it is a loop, whose code Inductor writes.
    """

    name: str
    origins: tuple[fx.Node, ...]
    after: frozenset[str]
    reads: dict[str, int]
    writes: dict[str, int]
    overwrites: frozenset[str]
    is_loop: bool


@dataclass(frozen=True)
class Parts:
    """All parts of a half.

    Attributes:
        parts: in an order in which each buffer is written before it is read.
        inputs: buffers that the half frees after their last use.
        outputs: buffers that it returns.
        nodes: the nodes of the lowered graph, in order.
    """

    parts: tuple[Part, ...]
    inputs: frozenset[str]
    outputs: frozenset[str]
    nodes: tuple[fx.Node, ...]


GraphPass = Callable[[fx.Graph], None]


@contextmanager
def scheduled(
    order: Callable[[list[Any]], list[Any]],
    can_fuse: Callable[[Sequence[str]], bool],
    *,
    keep_apart: GraphPass,
    realize: GraphPass,
    key: str,
) -> Iterator[None]:
    """Makes Inductor run kernels in an order of ours, and allocate each buffer separately.

    The user's own passes run first, and their choices of what may be fused hold too.

    Args:
        order: fused kernels -> the same kernels in the order in which to run them.
        can_fuse: says whether parts, given by name, may share a kernel.
        keep_apart: changes a graph before Inductor looks for patterns in it.
        realize: changes a graph before it is lowered.
        key: identifies what these functions do, in the key of Inductor's cache.
    """
    from torch._inductor import config
    from torch._inductor.virtualized import V

    # the present choices may be the user's (`inductor_choices_class`, 2.13)
    choices = _choices(V.choices, can_fuse)
    patches = {
        "reorder_for_peak_memory": False,
        "reorder_for_locality": False,
        # these would sort the kernels again, after our pass
        "combo_kernels": False,
        "reorder_for_compute_comm_overlap": False,
        "allow_buffer_reuse": False,  # reuse was no faster, measured on a CPU
        "custom_partitioner_fn": None,  # already called; its type can't be part of a key
        **_passes(order, keep_apart, realize, key),
    }
    with config.patch(patches), V.set_choices_handler(choices):
        yield


def _choices(plain: Any, can_fuse: Callable[[Sequence[str]], bool]) -> Any:
    """Returns Inductor's choices with ours of what may be fused besides."""
    choices = copy(plain)

    def fuses(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        return can_fuse(part_names(node1) + part_names(node2)) and bool(
            plain.can_fuse(scheduler, node1, node2, shared_data_score)
        )

    choices.can_fuse = fuses  # instead of the method
    return choices


def _passes(
    order: Callable[[list[Any]], list[Any]], keep_apart: GraphPass, realize: GraphPass, key: str
) -> dict[str, Any]:
    """Returns our passes by the names of their settings; the user's run before them."""
    from torch._inductor import config, custom_graph_pass

    graph_pass = custom_graph_pass.CustomGraphPass
    scheduler_pass = getattr(custom_graph_pass, "CustomSchedulerPass", object)  # torch 2.13
    own: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "post_grad_custom_pre_pass": (graph_pass, keep_apart),
        "post_grad_custom_post_pass": (graph_pass, realize),
        "_pre_fusion_custom_pass": (scheduler_pass, _note_orders),
        "_post_fusion_custom_pass": (scheduler_pass, order),
    }
    given = {name: users(getattr(config, name)) for name in own}
    whole_key = key_beside(key, [each for passes in given.values() for each in passes])
    return {
        name: named(base, run_after(given[name], run), whole_key)
        for name, (base, run) in own.items()
    }


def part_names(kernel: Any) -> list[str]:
    """Returns the names of the parts of a kernel, in order."""
    return [part.get_name() for part in kernel.get_nodes()]


def _note_orders(nodes: list[Any]) -> list[Any]:
    """Notes, before any fusion, which parts run after others only because they change a buffer.

    If parts share a kernel, Inductor drops these dependences (`WeakDep`) from later parts. They are
    needed here, since kernels are taken apart again.
    """
    from torch._inductor.dependencies import WeakDep

    parts = [part for node in nodes for part in node.get_nodes()]
    if parts:
        parts[0].scheduler.remat_orders = {
            part.get_name(): [dep for dep in part.read_writes.reads if isinstance(dep, WeakDep)]
            for part in parts
        }
    return nodes


def fused_again(kernels: Sequence[Any]) -> list[Any]:
    """Takes kernels apart and returns the kernels into which Inductor fuses their parts now."""
    parts = [part for kernel in kernels for part in kernel.get_nodes()]
    scheduler = parts[0].scheduler
    for part in parts:
        reads = part.read_writes
        for dependence in scheduler.remat_orders[part.get_name()]:
            reads = reads if dependence in reads.reads else reads.with_read(dependence)
        if reads is not part.read_writes:
            part.set_read_writes(reads)
    scheduler.name_to_fused_node = {part.get_name(): part for part in parts}
    fused: list[Any] = scheduler.fuse_nodes(scheduler.topological_sort_schedule(parts))
    return fused


def end_functions_after(kernels: Sequence[Any], first_parts: Set[str]) -> None:
    """Makes Inductor end a function on a CPU after some kernels, named by their first parts.

    Otherwise it writes all kernels between two library operators as one function.
    """
    scheduler = kernels[0].scheduler
    backend = scheduler.get_backend(torch.device("cpu"))
    is_full = backend.ready_to_flush

    def ready_to_flush() -> bool:
        return is_full() or part_names(scheduler.current_node)[0] in first_parts

    backend.ready_to_flush = ready_to_flush


def parts_of(kernels: Sequence[Any], resident: Set[str], device_type: str) -> Parts:
    """Returns the parts of kernels, as the scheduler knows them.

    Args:
        kernels: the kernels of a half.
        resident: names of inputs that exist throughout; the result leaves them out.
        device_type: the device type whose buffers have a size; others are counted as empty.
    """
    from torch._inductor.virtualized import V

    nodes = [part for kernel in kernels for part in kernel.get_nodes()]
    reader = _Reader(nodes, resident, device_type)
    parts = tuple(map(reader.read, reader.nodes))
    outputs = frozenset(map(reader.root, V.graph.get_output_names()))
    lowered: Any = V.graph.module
    return Parts(parts, frozenset(reader.inputs), outputs, tuple(lowered.graph.nodes))


class _Reader:
    """Reads nodes of Inductor's scheduler that are not fused."""

    def __init__(self, nodes: list[Any], resident: Set[str], device_type: str) -> None:
        from torch._inductor.memory import compute_size_for_scheduler_buffer

        self.nodes, self.inputs, self._resident = nodes, set[str](), resident
        self._scheduler, self._device_type = nodes[0].scheduler, device_type
        self._sizes = {
            name: size_bytes if self._is_counted(self._scheduler.name_to_buf[name].node) else 0
            for name, (_, size_bytes) in compute_size_for_scheduler_buffer(
                self._scheduler.name_to_buf
            ).items()
        }
        self._writer = {b.get_name(): node.get_name() for node in nodes for b in node.get_outputs()}

        self._results: dict[str, list[str]] = {}  # operator with several results -> their buffers
        for node in nodes:
            if self._is_result(node):
                (taken_from,) = node.node.inputs
                operator = self._writer[taken_from.get_name()]
                self._results.setdefault(operator, []).extend(self._written(node))

    @staticmethod
    def _is_result(node: Any) -> bool:
        from torch._inductor.ir import MultiOutput

        return isinstance(node.node, MultiOutput)

    @staticmethod
    def _written(node: Any) -> list[str]:
        return [buffer.get_name() for buffer in node.get_outputs()]

    def _is_counted(self, buffer: Any) -> bool:
        device = buffer.get_device()  # None for what holds no memory of its own
        return device is None or device.type == self._device_type

    def root(self, name: str) -> str:
        """Returns the buffer that a name stands for.

        Each change gives a buffer a new name, and a part of a concatenation has a name of its own.
        """
        while name in self._scheduler.mutation_real_name:
            name = self._scheduler.mutation_real_name[name]
        whole = self._whole(name)
        return name if whole is None else self.root(whole)

    def _whole(self, name: str) -> str | None:
        """Returns the concatenation whose memory a buffer is part of."""
        from torch._inductor.ir import NonOwningLayout

        buffer = self._scheduler.name_to_buf.get(name)
        layout = getattr(buffer and buffer.node, "layout", None)
        return layout.view.get_name() if isinstance(layout, NonOwningLayout) else None

    def read(self, node: Any) -> Part:
        """Returns one node as a part."""
        from torch._inductor.scheduler import SchedulerNode

        awaited = {*node.unmet_dependencies, *self._scheduler.remat_orders[node.get_name()]}
        before = {self._writer[dep.name] for dep in awaited if dep.name in self._writer}
        is_loop, reads = isinstance(node, SchedulerNode), self._read_bytes(node)
        is_result = self._is_result(node)
        written = [] if is_result else self._written(node)
        written += self._results.get(node.get_name(), [])
        is_part = any(map(self._whole, written))
        new = {self.root(name) for name in written if self._whole(name) or self.root(name) == name}

        return Part(
            node.get_name(),
            () if is_result or node.node is None else tuple(node.node.get_origins()),
            frozenset(before - {node.get_name()}),
            reads,
            {name: self._sizes[name] for name in sorted(new)},
            frozenset(filter(partial(self._may_overwrite, node), reads))
            if is_loop and not is_part
            else frozenset(),
            is_loop,
        )

    def _may_overwrite(self, node: Any, name: str) -> bool:
        """True where a node may write each element of a result over the one it reads there."""
        from torch._inductor.codegen.wrapper import can_match_buffer_size

        donated = self._scheduler.name_to_donated_buffer
        buffer = donated.get(name) or self._scheduler.name_to_buf.get(name)
        uses = [user for user in buffer.users if user.node is node] if buffer else []

        return bool(uses) and all(
            user.can_inplace
            and any(can_match_buffer_size(buffer.node, out.node) for out in node.get_outputs())
            for user in uses
        )

    def _read_bytes(self, node: Any) -> dict[str, int]:
        from torch._inductor.virtualized import V

        reads = {}
        for dependency in node.read_writes.reads:
            name = self.root(dependency.name)
            if getattr(dependency, "is_fake", False):  # for the order only
                continue

            if name in self._writer:
                reads[name] = self._sizes[name]
            elif name in V.graph.graph_inputs and name not in self._resident:
                given = V.graph.graph_inputs[name]  # a kernel may read each element several times
                layout = given.get_layout()
                num_elements = int(layout.storage_size()) if self._is_counted(given) else 0
                reads[name] = num_elements * layout.dtype.itemsize
                self.inputs.add(name)
        return reads


def realize_operator() -> Any:
    """Returns the identity as an operator; Inductor computes its input at its place.

    On a CPU, the input gets memory of its own, even if it is part of a concatenation.
    """
    _define_operators()
    return torch.ops.remat.realize.default


def copy_operator() -> Any:
    """Returns an operator that copies a tensor; Inductor removes none of its copies.

    Its namespace is not among those whose operators may be computed again.
    """
    _define_operators()
    return torch.ops.remat_pieces.copy.default


@cache
def _define_operators() -> None:
    from torch._inductor.ir import StorageBox
    from torch._inductor.lowering import clone, register_lowering

    for namespace, name in (("remat", "realize"), ("remat_pieces", "copy")):
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(f"{name}(Tensor self) -> Tensor", tags=(torch.Tag.pointwise,))
        for key in ("CPU", "CUDA", "Meta"):
            library.impl(name, torch.clone, key)
        _LIBRARY.append(library)

    @register_lowering(torch.ops.remat.realize.default, type_promotion_kind=None)
    def realize(value: Any) -> Any:
        value.realize()
        if value.get_device().type == "cpu" and isinstance(value.data, StorageBox):
            value.freeze_layout()  # it will not be written into a concatenation
        return value

    @register_lowering(torch.ops.remat_pieces.copy.default, type_promotion_kind=None)
    def copy(value: Any) -> Any:
        made = clone(value)
        made.realize()
        return made
