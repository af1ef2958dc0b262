"""Which operators may be computed again, and why not, and which may write in place.

The schemas and tags of operators and the tables below decide, never a node's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from remat.torch_border.autograd import changed_input
from remat.torch_border.kernels import has_kernel

from .storages import tensors_of

_COLLECTIVES = frozenset(
    {
        "_c10d_functional",
        "_c10d_functional_autograd",
        "c10d_functional",
        "c10d",
        "symm_mem",
        "_dtensor",
    }
)
_KNOWN_NAMESPACES = frozenset({"aten", "prims", "remat"})
# Operators, or overloads, whose CUDA kernels give different results in each run: atomics add in any
# order, or of several writes to one place any may be the last. Sources: documentation of
# torch.use_deterministic_algorithms, torch 2.13; what calls alertNotDeterministic in torch 2.14;
# adaptive_max_pool3d_backward by its kernel, which uses atomics where sizes don't divide. cuDNN's
# convolutions forward are deterministic, and those backward only with cudnn.deterministic.
_NONDETERMINISTIC_ON_CUDA = frozenset({
    "aten::scatter_add", "aten::index_add", "aten::index_put", "aten::_unsafe_index_put",
    "aten::_index_put_impl_", "aten::put", "aten::scatter.src", "aten::scatter.reduce",
    "aten::index_copy",
    "aten::histc", "aten::bincount", "aten::cumsum", "aten::median", "aten::nanmedian",
    "aten::kthvalue",
    "aten::scatter_reduce", "aten::index_reduce",
    "aten::embedding_dense_backward", "aten::_embedding_bag_backward",
    "aten::_embedding_bag_dense_backward",
    "aten::convolution_backward",
    "aten::max_pool3d_with_indices_backward",
    "aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward",
    "aten::adaptive_avg_pool3d_backward", "aten::adaptive_max_pool2d_backward",
    "aten::adaptive_max_pool3d_backward",
    "aten::avg_pool3d_backward", "aten::fractional_max_pool2d_backward",
    "aten::fractional_max_pool3d_backward",
    "aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward",
    "aten::cudnn_grid_sampler_backward",
    "aten::max_unpool2d", "aten::max_unpool3d",
    "aten::reflection_pad1d_backward", "aten::reflection_pad2d_backward",
    "aten::reflection_pad3d_backward",
    "aten::replication_pad1d_backward", "aten::replication_pad2d_backward",
    "aten::replication_pad3d_backward",
    "aten::nll_loss2d_forward", "aten::upsample_linear1d_backward",
    "aten::upsample_bilinear2d_backward", "aten::_upsample_bilinear2d_aa_backward",
    "aten::upsample_bicubic2d_backward", "aten::_upsample_bicubic2d_aa_backward",
    "aten::upsample_trilinear3d_backward",
    "aten::_ctc_loss_backward", "aten::_cudnn_ctc_loss",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward", "aten::_flash_attention_backward",
    "aten::_efficient_attention_backward", "aten::_cudnn_attention_backward",
})  # fmt: skip
# Operators whose kernels on a CPU add float32 numbers by atomics, in threads, if they accumulate.
_ACCUMULATING = frozenset({"aten::index_put", "aten::_unsafe_index_put", "aten::put"})
NONDETERMINISTIC = "its CUDA kernel gives another result at every run"
_ADDS_IN_THREADS = "its threads add numbers in another order at every run"
_COMMUTATIVE = frozenset({"aten::add.Tensor", "aten::mul.Tensor"})
_COMPLEX_SUMS = frozenset({"aten::add.Tensor", "aten::sub.Tensor"})


def are_inference(inputs: Sequence[Any]) -> tuple[bool, ...]:
    """Says which inputs were made under `torch.inference_mode()`; fake tensors do not show it."""
    return tuple(isinstance(each, torch.Tensor) and each.is_inference() for each in inputs)


def mark_inference_inputs(joint: fx.GraphModule, are_marked: Sequence[bool]) -> None:
    """Notes which inputs of a joint graph were made under `torch.inference_mode()`.

    Autograd can't save such a tensor for the backward.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    for node, is_marked in zip(placeholders, are_marked, strict=False):
        if is_marked:
            node.meta["is_inference"] = True


def unsavable_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Returns the inputs of a joint graph that the backward can't read.

    They were made under `torch.inference_mode()`, or AOTAutograd writes into them after the forward
    (an input that needs a gradient and that the step changes).
    """
    described = graph.output_node().meta.get("desc") or ()
    changed = [found for found in map(changed_input, described) if found is not None]
    return [
        node
        for node in graph.find_nodes(op="placeholder")
        if node.meta.get("is_inference") or node.meta.get("desc") in changed
    ]


def pinned_reason(node: fx.Node, device_type: str) -> str:
    """Returns why the operator at `node` must never be computed twice; empty where it may be.

    These texts are part of a graph's fingerprint: plans on disk no longer fit once one changes.
    """
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return f"{target.name()} is a higher-order operator, whose body can have effects"

    if not isinstance(target, OpOverload):
        return f"{target} is no operator of the dispatcher, and may have effects"

    if target.namespace in _COLLECTIVES:
        return "it is a collective: every rank would have to repeat it"
    if target._schema.is_mutable:
        return "it changes a tensor in place"
    if target.namespace not in _KNOWN_NAMESPACES:
        return f"{target} is a custom operator, not known to give the same result twice"

    if torch.Tag.data_dependent_output in target.tags or not all(
        isinstance(n, int) for t in tensors_of(node) for n in t.shape
    ):
        return "its result decides shapes or Python values"
    if is_nondeterministic(str(target), device_type):
        return NONDETERMINISTIC
    return _ADDS_IN_THREADS if device_type == "cpu" and _adds_in_threads(node) else ""


def is_nondeterministic(target: str, device_type: str) -> bool:
    """True where an operator's kernel gives a different result in every run.

    `target` is its name, such as `aten.scatter_add.default`.
    """
    if device_type != "cuda":
        return False
    overload = target.replace(".", "::", 1)
    return not _NONDETERMINISTIC_ON_CUDA.isdisjoint((overload, overload.split(".")[0]))


def _adds_in_threads(node: fx.Node) -> bool:
    """True where an operator's result on a CPU depends on the order of its threads."""
    value, target = node.meta.get("val"), node.target
    return (
        isinstance(target, OpOverload)
        and target._schema.name in _ACCUMULATING
        and isinstance(value, torch.Tensor)
        and value.dtype is torch.float32
        and bool(named_arguments(node)["accumulate"])
    )


def is_random(node: fx.Node) -> bool:
    """True where the operator draws from a random generator."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False

    arguments = named_arguments(node)
    if arguments.get("generator") is not None:
        return True
    if "dropout_p" in arguments:  # the scaled_dot_product_attention family
        return bool(arguments["dropout_p"] != 0.0)
    return True


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Returns all arguments of an operator node by their schema names, defaults included."""
    assert isinstance(node.target, OpOverload)
    values: dict[str, Any] = {}

    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            values[argument.name] = node.args[index]
        elif argument.name in node.kwargs:
            values[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            values[argument.name] = argument.default_value
    return values


@dataclass(frozen=True)
class InPlaceForm:
    """Another way to call an operator, which writes the result over one of its inputs.

    Attributes:
        taken: the input that is overwritten.
        target: the overload to call.
        args: its positional arguments, as nodes and constants.
        kwargs: its keyword arguments.
    """

    taken: fx.Node
    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def in_place_forms(node: fx.Node, device_type: str) -> Iterator[InPlaceForm]:
    """Yields the ways in which an elementwise operator may write over one of its inputs.

    Each gives the same bits as the operator itself. The caller checks whether an input is read
    later.
    """
    if rounds_in_place_alike(node):
        yield from candidate_forms(node, device_type)


def rounds_in_place_alike(node: fx.Node) -> bool:
    """True where an operator gives the same bits whether it writes over an input or not.

    All operators on real numbers do. Products of complex numbers round several times, and the
    compiler's vectorised loop, which runs only where outputs and inputs don't overlap, fuses other
    operations than the plain loop (`experiments/fake_kernels.py`, torch 2.13). Sums of complex
    numbers round once per component.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_complex():
        return True
    target = node.target
    are_tensors = len(node.args) == 2 and not node.kwargs and len(node.all_input_nodes) == 2
    return isinstance(target, OpOverload) and target.name() in _COMPLEX_SUMS and are_tensors


def candidate_forms(node: fx.Node, device_type: str) -> Iterator[InPlaceForm]:
    """Yields the ways to write over an input that torch has kernels for; bits may differ.

    Only kernels written for the device count: generated `out=` overloads of composite operators
    compute into new memory and copy, which saves nothing.
    """
    target = node.target
    if (
        not isinstance(target, OpOverload)
        or torch.Tag.pointwise not in target.tags
        or target._schema.is_mutable
    ):
        return

    output = node.meta["val"]
    candidates = [
        arg for arg in node.all_input_nodes if _has_same_layout(arg.meta.get("val"), output)
    ]
    if not candidates:
        return

    method = _in_place_overload(target, device_type)
    if method is not None and node.args and node.args[0] in candidates:
        assert isinstance(node.args[0], fx.Node)
        yield InPlaceForm(node.args[0], method, node.args, dict(node.kwargs))
        candidates = [arg for arg in candidates if arg is not node.args[0]]

    if (
        method is not None
        and target.name() in _COMMUTATIVE
        and len(node.args) == 2
        and not node.kwargs
        and node.args[1] in candidates
        and _has_type_of(node.args[0], output)
    ):
        assert isinstance(node.args[1], fx.Node)
        yield InPlaceForm(node.args[1], method, (node.args[1], node.args[0]), {})
        candidates = [arg for arg in candidates if arg is not node.args[1]]

    found = _out_overload(target, device_type)
    if found is not None:
        overload, out_name = found
        for arg in candidates:
            yield InPlaceForm(arg, overload, node.args, {**node.kwargs, out_name: arg})


def _has_type_of(argument: Any, output: Any) -> bool:
    """True for a tensor in the type of the output.

    A float32 scalar is rounded to bfloat16 as the first operand, and not as the second one.
    """
    return isinstance(argument, fx.Node) and argument.meta["val"].dtype == output.dtype


def _has_same_layout(value: Any, output: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and isinstance(output, torch.Tensor)
        and value.layout == output.layout == torch.strided
        and value.dtype == output.dtype
        and value.shape == output.shape
        and value.stride() == output.stride()
        and value.device == output.device
        and value.untyped_storage().nbytes() == output.untyped_storage().nbytes()
        and not (value.is_conj() or value.is_neg() or output.is_conj() or output.is_neg())
    )


@cache
def _in_place_overload(target: OpOverload, device_type: str) -> OpOverload | None:
    packet = getattr(
        getattr(torch.ops, target.namespace), target._schema.name.split("::")[1] + "_", None
    )
    overload = getattr(packet, target._overloadname, None) if packet is not None else None
    if not isinstance(overload, OpOverload) or not has_kernel(overload, device_type):
        return None

    same = [a.name for a in overload._schema.arguments] == [
        a.name for a in target._schema.arguments
    ]
    return overload if same else None


@cache
def _out_overload(target: OpOverload, device_type: str) -> tuple[OpOverload, str] | None:
    names = [argument.name for argument in target._schema.arguments]
    for overload_name in target.overloadpacket.overloads():
        overload = getattr(target.overloadpacket, overload_name)
        outs = [argument.name for argument in overload._schema.arguments if argument.is_out]
        rest = [argument.name for argument in overload._schema.arguments if not argument.is_out]
        types = [str(a.type) for a in overload._schema.arguments if not a.is_out] == [
            str(a.type) for a in target._schema.arguments
        ]

        if len(outs) == 1 and rest == names and types and has_kernel(overload, device_type):
            return overload, outs[0]

    return None
