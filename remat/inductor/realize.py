"""Which values and matrix products Inductor has to compute at their place in the plan.

Inductor inlines an elementwise operator into every loop that reads it. So the value itself is never
stored: its sources are held instead, until its last reader has run. If they are larger than the
value, and there is no room for them, the value has to be computed at its place. An example is a
dropout mask of one byte per element, made from random numbers in float.

On a CPU, a value is also computed at its place, if there is room, where a loop would compute each
entry several times: a causal mask, for example, once for each head of each sequence.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx
from torch._ops import OpOverload

from remat.inductor.byte_masks import is_in_loop_of_mask
from remat.inductor.kernel_graph import REDUCTIONS
from remat.tracers.calls import Call
from remat.tracers.phases import is_backward_input

aten = torch.ops.aten
_GATHERS = frozenset({
    aten.embedding, aten.index, aten.gather, aten.clone, aten.slice_scatter, aten.select_scatter,
    aten.cat, aten.constant_pad_nd, aten._to_copy, aten.flip, aten.copy, aten.full,
    aten.upsample_nearest2d, aten.index_select, aten.arange, aten.repeat, aten.roll,
})  # fmt: skip
_BY_NAME = frozenset({
    "prims.convert_element_type.default", "prims.iota.default",
    "prims._low_memory_max_pool_with_offsets.default",
    "prims._low_memory_max_pool_offsets_to_indices.default",
})  # fmt: skip
_MOST_READ = 4  # tensors; Inductor stores a value with several readers that is made from more
_MOST_REPEATED = 4  # times that a loop on a CPU may compute an entry of a value
_SCATTERS = frozenset({
    aten.index_put, aten._unsafe_index_put, aten.scatter, aten.scatter_add, aten.scatter_reduce,
    aten.avg_pool2d_backward, aten.max_pool2d_with_indices_backward,
})  # fmt: skip


def values_to_realize(
    graph: fx.Graph,
    resident: frozenset[str],
    limit_bytes: int,
    workspace_of: Callable[[Call], int] = lambda _: 0,
) -> list[fx.Node]:
    """Returns the operators whose results have to be stored, in order; O(V^2 + E) time.

    Args:
        graph: the graph of a half, in the order of its plan.
        resident: names of inputs that exist throughout, whoever reads them.
        limit_bytes: the most that the half may hold besides these.
        workspace_of: call of a library operator -> its workspace.
    """
    storages = _Storages(graph)
    held_bytes = storages.held_bytes(resident, workspace_of)
    parts = _parts_to_keep_apart(storages, held_bytes, limit_bytes)

    kept = frozenset(filter(storages.is_repeated, storages.makers))
    found, needed, last_use = _values_not_inlined(storages, held_bytes, resident, limit_bytes, kept)
    has_no_room = {
        node
        for node in kept
        if needed[storages.first(node) : last_use[node] + 1].max() > limit_bytes
    }
    if has_no_room:
        kept -= has_no_room
        found, *_ = _values_not_inlined(storages, held_bytes, resident, limit_bytes, kept)
    return sorted(parts + found, key=storages.place.__getitem__)


def _values_not_inlined(
    storages: _Storages,
    held_bytes: NDArray[np.int64],
    resident: frozenset[str],
    limit_bytes: int,
    kept: frozenset[fx.Node],
) -> tuple[list[fx.Node], NDArray[np.int64], dict[fx.Node, int]]:
    """Returns the values to store, the bytes then held at each place, and each value's last use.

    Values in `kept` are stored whether or not there is room for what they are made from.
    """
    found = []
    last_use = dict(storages.last_use)
    made_from: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in storages.makers:
        made_from[node] = frozenset([node])
        users = storages.users.get(node, [])
        if not _is_inlined(node) or any(map(_needs_storage, users)):
            continue
        if node in kept:
            found.append(node)
            continue

        makers = map(storages.maker.__getitem__, node.all_input_nodes)
        sources = frozenset[fx.Node]().union(*map(made_from.__getitem__, makers))
        if len(users) > 1 and len(sources) > _MOST_READ:
            continue  # Inductor stores it
        if isinstance(node.meta.get("val"), tuple) or is_in_loop_of_mask(node):
            made_from[node] = sources  # each of its results is stored or not
            continue
        first = storages.first(node)
        last = max(map(storages.place.__getitem__, users), default=first)
        ends = {x: last_use.get(x, 0) for x in sources if x.name not in resident}
        longer = {source: end for source, end in ends.items() if end < last}
        inlined = _held_if_inlined(node, slice(first, last + 1), longer, held_bytes)

        is_larger = sum(map(_size_bytes, longer)) > _size_bytes(node)
        if is_larger and inlined[first : last + 1].max() > limit_bytes:
            found.append(node)
        else:
            made_from[node], held_bytes = sources, inlined
            last_use |= dict.fromkeys(longer, last)
    return found, held_bytes, last_use


def _held_if_inlined(
    node: fx.Node, life: slice, longer: dict[fx.Node, int], held_bytes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the bytes held at each place if a value is inlined.

    Args:
        node: its operator.
        life: the places from its computation to its last use.
        longer: the sources that then live to its last use, with the places of their own last uses.
        held_bytes: at each place, if it is stored.
    """
    inlined = held_bytes.copy()
    inlined[life] -= _size_bytes(node)
    for source, last in longer.items():
        inlined[last + 1 : life.stop] += _size_bytes(source)
    return inlined


class _Storages:
    """Who makes and who uses the storages of a graph.

    Attributes:
        place: node -> its place in the graph.
        maker: node -> the node that stands for its storage; see `_makers`.
        makers: these nodes, in order.
        users: maker -> the makers that read it, views of it included.
        last_use: maker -> the place of the last node that reads it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.place = {node: place for place, node in enumerate(graph.nodes)}
        self.maker = _makers(list(graph.nodes))
        self.makers = [node for node in graph.nodes if self.maker[node] is node]
        self.users: dict[fx.Node, list[fx.Node]] = {}
        self.last_use: dict[fx.Node, int] = {}

        for node, place in self.place.items():
            for source in map(self.maker.__getitem__, node.all_input_nodes):
                self.last_use[source] = place
                if self.maker[node] is node:
                    self.users.setdefault(source, []).append(node)

    def first(self, node: fx.Node) -> int:
        """Returns the place at which a node's memory is allocated."""
        return self.place[_producer(node)]

    def is_repeated(self, node: fx.Node) -> bool:
        """Says whether a loop that reads a value, inlined, would compute each entry several times.

        That costs a GPU nothing, whose loops wait for memory; on a CPU it takes longer than
        reading. What stays the same in an innermost loop is computed before that loop.
        """
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return False
        if not node.all_input_nodes or not _is_inlined(node):
            return False  # a constant is as fast as reading it
        most = _MOST_REPEATED * _num_entries(node)
        return any(
            _num_entries(user) > most
            and any(self.maker[x] is node and _varies_in_rows(x) for x in user.all_input_nodes)
            for user in self.users.get(node, [])
        )

    def held_bytes(
        self, resident: frozenset[str], workspace_of: Callable[[Call], int]
    ) -> NDArray[np.int64]:
        """Returns the bytes held at each place if each value is stored."""
        found = np.zeros(len(self.place) + 1, np.int64)
        for node in self.makers:
            first = self.first(node)
            if node.name not in resident:
                found[first : self.last_use.get(node, first) + 1] += _size_bytes(node)
            if _is_of_library(node):
                found[first] += workspace_of(Call.of(node))
        return found


def _parts_to_keep_apart(
    storages: _Storages, held_bytes: NDArray[np.int64], limit_bytes: int
) -> list[fx.Node]:
    """Returns the parts of concatenations that need memory of their own.

    On a CPU, Inductor writes parts straight into the concatenation. So the concatenation exists
    from its first part to the last use of any part. If there is room for it, `held_bytes` changes.
    """
    place, last_use, users = storages.place, storages.last_use, storages.users
    found = []
    for node in filter(_is_stored_concatenation, place):
        parts = [
            part
            for part in node.all_input_nodes
            if part in users
            and _is_inlined(part)
            # a library operator that read it has fixed its layout, so that it is copied
            and not any(_is_of_library(u) for u in users[part] if place[u] < place[node])
        ]
        if not parts:
            continue

        first, joined = min(map(place.__getitem__, parts)), place[node]
        last = max(last_use[part] for part in parts)
        end = last_use.get(node, joined)

        together = held_bytes.copy()
        together[first:joined] += _size_bytes(node)
        together[end + 1 : last + 1] += _size_bytes(node)
        for part in parts:
            together[place[part] : last_use[part] + 1] -= _size_bytes(part)

        if together[first : last + 1].max() > limit_bytes:
            found += parts
        else:
            held_bytes[:] = together
    return list(dict.fromkeys(found))


def products_to_keep_apart(graph: fx.Graph) -> list[fx.Node]:
    """Returns the matrix products that Inductor would move to an addition that reads them.

    Inductor fuses the two into an `addmm` at the place of the addition, and holds the factors until
    then: for example the logits' gradient, until the gradients of a tied weight are added. A
    product right before its addition may be fused with it.
    """
    operators = [n for n in graph.nodes if n.op == "call_function" and not _is_view(n)]
    place = {node: number for number, node in enumerate(operators)}
    return [
        node
        for node in operators
        if node.target is aten.mm.default
        and any(
            user.target is aten.add.Tensor and place[user] > place[node] + 1 for user in node.users
        )
    ]


def _makers(nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Returns, for each node, the node that stands for its storage.

    Each result of an operator with several results has its own storage, unless they are views
    of its input, like `aten.split`.
    """
    maker: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        first = next(iter(node.all_input_nodes), node)
        is_result = node.target is operator.getitem and maker[first] is first
        is_view = _is_view(node) and first is not node and not is_result
        maker[node] = maker[first] if is_view else node
    return maker


def _producer(node: fx.Node) -> fx.Node:
    """Returns the operator that makes a result."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    returns = list(schema.returns) if schema else []
    is_alias = any(result.alias_info is not None for result in returns[:1])
    return is_alias or node.target in (aten.reshape.default, aten._unsafe_view.default)


def _is_inlined(node: fx.Node) -> bool:
    """True for elementwise operators and those that gather, and for their results."""
    target = _producer(node).target
    if node.op != "call_function" or is_backward_input(node) or _is_stored_concatenation(node):
        return False
    return isinstance(target, OpOverload) and (
        torch.Tag.pointwise in target.tags
        or target.overloadpacket in _GATHERS
        or str(target) in _BY_NAME
    )


def is_of_loop(node: fx.Node) -> bool:
    """Says whether Inductor writes the operator as a loop, rather than calling a library."""
    is_operator = isinstance(node.target, OpOverload) and not _is_view(node)
    return is_operator and not _is_of_library(node)


def _needs_storage(user: fx.Node) -> bool:
    """Says whether Inductor stores what this operator reads."""
    return user.op == "output" or _is_of_library(user)


def _is_of_library(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or _is_inlined(node):
        return False
    return target.overloadpacket not in REDUCTIONS | _SCATTERS


def _is_stored_concatenation(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.target is aten.cat.default and value is not None and value.device.type == "cpu"


def _size_bytes(node: fx.Node) -> int:
    entries = _num_entries(node)
    return entries * node.meta["val"].element_size() if entries else 0


def _num_entries(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or any(not isinstance(s, int) for s in value.shape):
        return 0
    return value.numel()


def _varies_in_rows(node: fx.Node) -> bool:
    value: torch.Tensor = node.meta["val"]
    return value.dim() > 0 and value.shape[-1] != 1 and value.stride(-1) != 0
