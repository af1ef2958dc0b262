"""Cleans a traced step: keeping everything then needs no more memory than plain PyTorch."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from remat.core.operators import Phase

from .phases import phase_of
from .recomputable import is_random, pinned_reason, unsavable_inputs
from .storages import Storages, tensors_of

aten = torch.ops.aten
_COPIES = frozenset({aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default})
_DETACHES = frozenset({aten.detach.default, aten.alias.default})


def clean(module: fx.GraphModule, storages: Storages) -> None:
    """Cleans a joint graph in place; every result stays the same to the bit.

    1. `detach` and `alias` are removed.
    2. Copies that change nothing are removed (dropout with p = 0 leaves a `clone`, autocast leaves
       redundant casts). Three kinds stay: what the forward returns, which its caller may change;
       copies without which a gradient would share memory with another result, an input or a
       constant; copies of inputs that autograd can't save.
    3. Constant parts of operators (lengths that attention kernels return) become constants.
    4. Views of views become one view.
    5. The backward of batch norm no longer reads the new running statistics, which it does not use
       in training.
    6. Nodes that nobody reads are removed, except random operators, which advance the generator.
    7. Equal computations of one phase are merged, unless a value would live longer.
    """
    graph = module.graph
    output = graph.output_node()
    unsavable = set(map(storages.of, unsavable_inputs(graph)))

    for node in list(graph.nodes):
        if node.op != "call_function":
            continue

        if (node.target in _DETACHES and output not in node.users) or (
            node.target in _COPIES
            and _changes_nothing(node)
            and not _separates_a_result(node, storages)
            and storages.of(node.args[0]) not in unsavable
        ):
            _replace(node, node.args[0], storages)
        elif isinstance(node.meta.get("val"), int | float | bool):
            _replace_by_constant(node, node.meta["val"])

    _shorten_views(graph)
    _drop_running_statistics(graph)
    _drop_unread(graph)
    _merge_equal(graph, storages)
    _drop_unread(graph)

    graph.lint()
    module.recompile()


def _changes_nothing(node: fx.Node) -> bool:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = source.meta["val"], node.meta["val"]
    layouts = [(t.device, t.layout, t.untyped_storage().nbytes()) for t in (before, after)]
    return layouts[0] == layouts[1] and _reads_alike(before, after)


def _reads_alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    """True where two tensors would be equal if they lay in the same memory."""
    marks = [(t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()) for t in (one, two)]
    return marks[0] == marks[1]


def _separates_a_result(node: fx.Node, storages: Storages) -> bool:
    """True where, without the copy, a result would share memory that it must not share."""
    source = node.args[0]
    assert isinstance(source, fx.Node)

    key, copied = storages.of(source), storages.of(node)
    graph = node.graph
    results = {storages.of(n) for n in graph.output_node().all_input_nodes}
    given = {storages.of(n) for op in ("placeholder", "get_attr") for n in graph.find_nodes(op=op)}
    is_copied_back = any(user.target is aten.copy_.default for user in node.users)

    is_returned = copied in results and phase_of(node) is Phase.FORWARD
    return (
        is_returned
        or (copied in results and (key in results or key in given))
        or (is_copied_back and key in given)
    )


def _replace(node: fx.Node, by: Any, storages: Storages) -> None:
    node.replace_all_uses_with(by)
    storages.merge(node, by)


def _replace_by_constant(node: fx.Node, constant: float) -> None:
    def swap(argument: fx.Node) -> Any:
        return constant if argument is node else argument

    for user in list(node.users):
        if user.op != "output":
            user.args = map_arg(user.args, swap)
            user.kwargs = map_arg(user.kwargs, swap)


def _drop_running_statistics(graph: fx.Graph) -> None:
    for node in graph.nodes:
        is_in_training = (
            node.target is aten.native_batch_norm_backward.default and node.args[7] is True
        )
        if is_in_training or node.target is aten.cudnn_batch_norm_backward.default:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def _shorten_views(graph: fx.Graph) -> None:
    """Makes a view of a view directly from the source, and removes views that change nothing.

    `_unsafe_view` becomes `view`: outside autograd they are the same, except for a result, since a
    caller can't change in place what a custom function returns as a view.
    """
    output = graph.output_node()
    for node in graph.nodes:
        if node.target is aten._unsafe_view.default and output not in node.users:
            node.target = aten.view.default

        source: Any = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, fx.Node) or output in node.users:
            continue

        if node.target is aten.t.default and source.target is aten.t.default:
            node.replace_all_uses_with(source.args[0])
        elif node.target is aten.view.default:
            while source.target is aten.view.default and _views_alike(node, source.args[0]):
                source = source.args[0]
                node.args = (source, node.args[1])
            if _same_layout(source, node):
                node.replace_all_uses_with(source)


def _views_alike(node: fx.Node, source: Any) -> bool:
    """True where the view can be made from `source` directly, with the same strides."""
    value = node.meta["val"]
    try:
        return bool(source.meta["val"].view(value.shape).stride() == value.stride())
    except RuntimeError:  # these strides need both steps
        return False


def _same_layout(first: fx.Node, second: fx.Node) -> bool:
    one, two = first.meta.get("val"), second.meta["val"]
    return isinstance(one, torch.Tensor) and _reads_alike(one, two)


def _drop_unread(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return is_random(node) or bool(pinned_reason(node, ""))


def _merge_equal(graph: fx.Graph, storages: Storages) -> None:
    position = {node: index for index, node in enumerate(graph.nodes)}
    results = {storages.of(n) for n in graph.output_node().all_input_nodes}
    seen: dict[Any, fx.Node] = {}

    for node in list(graph.nodes):
        if node.op != "call_function" or not (
            node.target is operator.getitem or isinstance(node.target, OpOverload)
        ):
            continue

        if node.target is not operator.getitem and _has_effect(node):
            continue

        key = _computation_key(node)
        first = seen.setdefault(key, node) if key is not None else node
        if first is node or storages.of(node) in results or storages.of(first) in results:
            continue

        if _last_use(first, position, storages) >= position[node] or _is_view(node, storages):
            _replace(node, first, storages)


def _computation_key(node: fx.Node) -> Any:
    key = (
        node.target,
        node.meta.get("partitioner_tag"),
        _frozen(node.args),
        _frozen(dict(node.kwargs)),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return tuple(map(_frozen, argument))
    if isinstance(argument, dict):
        return tuple(sorted((name, _frozen(item)) for name, item in argument.items()))
    is_number = isinstance(argument, int | float | complex)
    return (type(argument), repr(argument)) if is_number else argument  # 0.0 == -0.0 == 0


def _is_view(node: fx.Node, storages: Storages) -> bool:
    keys = {storages.key(value) for value in tensors_of(node)}
    return bool(keys) and keys <= {
        storages.key(value) for source in node.all_input_nodes for value in tensors_of(source)
    }


def _last_use(node: fx.Node, position: dict[fx.Node, int], storages: Storages) -> int:
    latest = -1
    for user in node.users:
        shares = _is_view(user, storages) or user.target is operator.getitem
        latest = max(latest, position[user], _last_use(user, position, storages) if shares else -1)
    return latest
