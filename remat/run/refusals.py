"""Errors for steps that can't be planned, raised at capture, with the line of code.

A plan needs every size beforehand. A size is not known where data decides it, for sparse and nested
tensors, and for memory that a library allocates itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from remat.core.errors import TraceError
from remat.torch_border.dynamo import SIZE_CHECK, is_associative_scan, is_decided_by_data
from remat.tracers.origin import module_of, source_of
from remat.tracers.retarget import is_for_cuda
from remat.tracers.storages import tensors_of


def refuse_modes(modes: list[str]) -> None:
    """Refuses to run a planned step under dispatch modes.

    Dynamo would leave the step plain, and would do so after the mode ended too.
    """
    if modes:
        raise TraceError(
            f"a planned step can't run under {', '.join(modes)}, a TorchDispatchMode, since "
            "torch.compile compiles nothing there. Run the step outside of the mode, or use the "
            "mode with the plain model (remat.unwrap, or under torch.no_grad())"
        )


def refuse_scans(module: fx.GraphModule) -> None:
    """Refuses a scan that is one operator, which runs only where Inductor compiles it."""
    if any(
        is_associative_scan(node)
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
    ):
        raise TraceError(
            'an associative_scan with combine_mode="pointwise" is one operator that only Inductor '
            'runs, and can\'t be planned; write combine_mode="generic", or a loop'
        )


def refuse_cudnn_rnns(module: fx.GraphModule) -> None:
    """Refuses recurrent layers in cuDNN, on a GPU or as a GPU would run them.

    cuDNN keeps a reserve for the backward, which has no bytes according to fake tensors.
    """
    for node in module.graph.nodes:
        if node.target not in _RNNS or not torch.backends.cudnn.enabled:
            continue
        value = node.args[0].meta.get("example_value")
        if is_for_cuda() or (
            isinstance(value, torch.Tensor) and torch.backends.cudnn.is_acceptable(value)
        ):
            raise TraceError(_CUDNN.format(name=node.target.__name__.upper()))


_RNNS = frozenset([torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu])
_CUDNN = (
    "{name} on a GPU runs in cuDNN, which keeps memory for the backward whose size is not known "
    "before it runs; train with `torch.backends.cudnn.enabled = False`, or keep the layer outside "
    "of the planned part"
)


def refuse_fused_cells(module: fx.GraphModule) -> None:
    """Refuses LSTM and GRU cells that are traced on the CPU as a GPU would run them.

    CUDA runs a cell's gates in one kernel (RNN.cpp, `_thnn_fused_lstm_cell` and
    `_thnn_fused_gru_cell`), which saves other values than the CPU's operators. Layers run it too if
    cuDNN is off. Only the LSTM's kernel has shapes without a GPU.
    """
    for node in module.graph.nodes:
        if node.target in _CELLS and is_for_cuda():
            raise TraceError(_FUSED.format(cell=named(node)))


_CELLS = frozenset([torch.lstm_cell, torch.gru_cell, torch.lstm, torch.gru])
_FUSED = (
    "on a GPU the gates of {cell} are one fused kernel, whose memory is not known on a machine "
    "without that GPU; plan the step there, or keep the cell outside of the planned part"
)


def size_that_data_decides(module: fx.GraphModule) -> fx.Node | None:
    """Returns the first operator of a captured forward whose result has a size that data decides.

    None where there is none. Dynamo captures such operators where a step has to be one graph
    (`fullgraph=True`, torch 2.13), and cuts the step there otherwise.
    """
    for node in module.graph.nodes:
        if node.target is SIZE_CHECK or is_decided_by_data(node.meta.get("example_value")):
            return _first_source(node) if node.target is SIZE_CHECK else node
    return None


def _first_source(node: fx.Node) -> fx.Node:
    """Returns the operator whose size a check tests."""
    while node.all_input_nodes and not _returns_a_tensor(node):
        node = node.all_input_nodes[0]
    return node


def _returns_a_tensor(node: fx.Node) -> bool:
    """True for a node of a captured forward that returns a tensor."""
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def refuse_what_has_no_size(joint: fx.GraphModule) -> None:
    """Refuses tensors whose memory has no size that is known beforehand.

    Raises:
        TraceError: for the first such tensor, with its operator and line.
    """
    for node in joint.graph.nodes:
        if node.target is torch.ops.aten.mkldnn_rnn_layer.default:
            raise TraceError(_ONEDNN)

        for tensor in tensors_of(node):
            if tensor.layout is not torch.strided:
                raise TraceError(_no_storage(joint, node, tensor))
            if not all(isinstance(size, int) for size in tensor.shape):
                raise TraceError(_no_size(node, tensor))


_ONEDNN = (
    "an LSTM on the CPU runs in oneDNN, which allocates memory of its own that can't be planned; "
    "build and train the model with `torch.backends.mkldnn.set_flags(False)`; on a GPU, with "
    "`torch.backends.cudnn.enabled = False`"
)


def _no_storage(joint: fx.GraphModule, node: fx.Node, tensor: torch.Tensor) -> str:
    sparse = [named(each) for each in joint.graph.nodes if _has_sparse_gradient(each)]
    if sparse:
        return (
            f"the gradient of {sparse[0]} is sparse, and its memory can't be planned: data decides "
            "its size; build the embedding with sparse=False, or keep it outside of the planned "
            "part"
        )

    layout = str(tensor.layout).removeprefix("torch.")
    return (
        f"{named(node)} is a {layout} tensor, whose memory can't be planned; make it dense "
        "(.to_dense()), or keep it outside of the planned part"
    )


def _has_sparse_gradient(node: fx.Node) -> bool:
    """True for the forward operator of an embedding with `sparse=True`."""
    target: Any = node.target
    if "embedding" not in str(target) or "backward" in str(target):
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return bool(given.get("sparse"))


def _no_size(node: fx.Node, tensor: torch.Tensor) -> str:
    return (
        f"data decides the size of {named(node)}, {tuple(tensor.shape)}, and a plan needs it "
        "beforehand; pad to a known size, or keep it outside of the planned part"
    )


def nested_is_refused(what: str) -> str:
    """Returns the message for a nested tensor."""
    return (
        f"{what} is a nested tensor, and data decides the sizes of its parts, which a plan needs "
        "beforehand; pad it (torch.nested.to_padded_tensor), or plan the part that gets its values"
    )


def refuse_nested(module: fx.GraphModule) -> None:
    """Refuses nested tensors in a captured forward, whether inputs or results."""
    for node in module.graph.nodes:
        value: Any = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise TraceError(nested_is_refused(named(node)))


def refuse_new_storage(module: fx.GraphModule) -> None:
    """Refuses a forward that gives a tensor another storage, by `x.data = ...`.

    A value computed again would read the new data, and the new storage would not be counted.
    """
    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
        if name in ("set_", "shallow_copy_data_"):  # the second from torch 2.14 on
            raise TraceError(
                f"the forward gives a tensor other data by `.data =` in {named(node)}; what is "
                "computed again would read it. Change the tensor in place, under torch.no_grad(): "
                "`x.copy_(new)`, or `x.mul_(m).add_(y, alpha=1 - m)` for a moving average"
            )


def named(node: fx.Node) -> str:
    """Returns the name of an input, or an operator with the line of code that it comes from."""
    if node.op == "placeholder":
        return f"the input {node.name}"
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    module = module_of(node)
    place = source_of(node) or (f"module {module}" if module else "")
    operator = name.split(".")[0]  # without its overload
    return f"{operator} ({place})" if place else operator
