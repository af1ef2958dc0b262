"""Private names of torch's autograd: the joint trace, the running backward, what its nodes save.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd  # 2.13
from torch._functorch import config as functorch_config
from torch._guards import TracingContext  # 2.13
from torch.fx.experimental import proxy_tensor  # 2.13
from torch.utils._pytree import tree_leaves

__all__ = [
    "SavedTensors",
    "aot_autograd",
    "arriving_bytes",
    "at_end_of_backward",
    "autocast_cache_left_on",
    "backward_without_autocast",
    "before_next_run",
    "compiled_node",
    "current_node",
    "descriptor_of",
    "gradient_node",
    "is_batched",
    "is_compiled_node",
    "is_graph_kept",
    "is_inside_autocast_cast",
    "is_wanted",
    "metadata_of_compilation",
    "passes_on",
    "saved_tensors",
    "sequence_number",
    "skip_without_gradients",
    "version_counter",
]


@contextmanager
def backward_without_autocast() -> Iterator[None]:
    """Traces the backward without autocast, as plain PyTorch runs it.

    It sets `backward_pass_autocast` (2.13).
    """
    with functorch_config.patch(backward_pass_autocast="off"):
        yield


@contextmanager
def autocast_cache_left_on() -> Iterator[None]:
    """Leaves autocast's cache as it is while the joint graph is traced.

    AOTAutograd turns it off otherwise (`proxy_tensor.disable_autocast_cache`, 2.13).
    """
    private: Any = proxy_tensor
    plain = private.disable_autocast_cache
    private.disable_autocast_cache = nullcontext
    try:
        yield
    finally:
        private.disable_autocast_cache = plain


def is_inside_autocast_cast(device_type: str) -> bool:
    """True in operators that autocast itself calls, with its own dispatch key excluded.

    It uses `_dispatch_tls_is_dispatch_key_excluded` (2.13).
    """
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")
    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(key))


def is_graph_kept() -> bool:
    """True inside of a backward with `retain_graph=True` or `create_graph=True`.

    It uses `_get_current_graph_task_keep_graph` (2.13).
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def current_node() -> Any:
    """Returns the autograd node that runs (`_current_autograd_node`, 2.13).

    None where a backward is called directly, without autograd.
    """
    return torch._C._current_autograd_node()


def before_next_run(check: Callable[[Sequence[Any]], None]) -> None:
    """Calls `check` with the arriving gradients if the node that runs now ever runs again."""
    node = current_node()
    if node is not None:
        node.register_prehook(check)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` at the end of the running backward, as DDP and FSDP2 do.

    It uses `queue_callback` (2.13).
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def sequence_number(node: Any) -> int:
    """Returns a node's number in the order of the forward (`Node._sequence_nr`, 2.13)."""
    return int(node._sequence_nr())


def arriving_bytes(node: Any, index: int) -> tuple[str, int]:
    """Returns the device type and the bytes of the gradient of one output of a node's operator.

    0 bytes where the node does not say (`Node._input_metadata`, 2.13), and for nested tensors.
    """
    described = getattr(node, "_input_metadata", ())
    if index >= len(described) or described[index].is_nested_tensor:
        return "", 0
    tensor = described[index]
    return tensor.device.type, math.prod(map(int, tensor.shape)) * tensor.dtype.itemsize


# Nodes whose gradients are views of the one that arrives, or that one itself (2.13).
_VIEWS = (
    "Alias", "Cat", "Permute", "ReshapeAlias", "Squeeze", "Stack", "Sum", "T",
    "Transpose", "UnsafeView", "Unsqueeze", "View",
)  # fmt: skip
_SAME_SIZE = ("Add", "Clone", "Expand", "RegisterPostBackwardFunction")


def passes_on(node: Any, size_bytes: int) -> bool:
    """True if the gradient that a node passes on, of `size_bytes`, needs no memory of its own.

    It is then the gradient that arrived, a view of it, or sparse with its rows. The names of
    autograd's nodes decide (2.13).
    """
    if getattr(node, "_saved_sparse", False):  # of embeddings (2.13)
        return True
    name = node.name().rstrip("0123456789").removesuffix("Backward")
    if name == "Add" and getattr(node, "_saved_alpha", 1) != 1:  # scaled for one input (2.13)
        return False
    return name in _VIEWS or (name in _SAME_SIZE and arriving_bytes(node, 0)[1] == size_bytes)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Turns autocast off for all devices in a `with` block (`_DisableAutocast`, 2.13)."""
    with torch._C._DisableAutocast():
        yield


def metadata_of_compilation() -> Any:
    """Returns what AOTAutograd knows of the step it compiles (`fw_metadata`, 2.13), or None."""
    context = TracingContext.try_get()
    return context.fw_metadata if context else None


class SavedTensors:
    """How many tensors AOTAutograd expects a forward to save; made while one is compiled.

    From torch 2.14 on, a list (`saved_tensor_is_graph_input`) says which saved tensors are inputs:
    only views that the graph itself makes are detached. Earlier versions detach all views.
    """

    def __init__(self) -> None:
        self._is_input = getattr(metadata_of_compilation(), "saved_tensor_is_graph_input", None)
        if self._is_input is not None:
            self._is_input[:] = [False] * len(self._is_input)

    def expect(self, count: int) -> None:
        """Makes room for the `count` tensors that the forward saves from now on."""
        if self._is_input is not None and len(self._is_input) < count:
            self._is_input.extend([False] * (count - len(self._is_input)))


def is_compiled_node(node: Any) -> bool:
    """True for the autograd node of what AOTAutograd compiled (`CompiledFunction`, 2.13)."""
    return hasattr(node, "_aot_id") or type(node).__name__ == "CompiledFunctionBackward"


def compiled_node(result: torch.Tensor) -> Any:
    """Returns the autograd node of the compiled step that made `result`; None where there is none.

    It looks behind views, since AOTAutograd makes returned views outside of what it compiled
    (2.13), and behind nodes of our own.
    """
    node: Any = result.grad_fn
    while node is not None and not is_compiled_node(node):
        behind = [other for other, _ in node.next_functions]
        node = next(filter(is_compiled_node, behind), behind[0] if len(behind) == 1 else None)
    return node


def node_of_step(results: Iterable[Any]) -> Any:
    """Returns the autograd node of the compiled step that returned `results`, or None.

    A result may be a view of an input that an earlier compiled step made, so the newest counts.
    """
    made = (t for t in results if isinstance(t, torch.Tensor) and t.requires_grad)
    nodes = filter(None, map(compiled_node, made))
    return max(nodes, key=sequence_number, default=None)


def keep_missing_gradients(results: Iterable[Any]) -> None:
    """Makes the backward of a compiled step get None, not zeros, where no gradient arrives.

    Args:
        results: what the step returned.
    """
    node = node_of_step(results)
    if node is not None:
        node.set_materialize_grads(False)


_SKIPS = "_remat_skips"


def skip_without_gradients(node: Any) -> None:
    """Makes the node of a compiled step do nothing in a backward where no gradient arrives for it.

    What it saved is kept. Without this it would get zeros, and compute all gradients from zeros
    (`_forward_cls`; `boxed_grads_call` from 2.13 on).
    """
    node.set_materialize_grads(False)
    compiled = type(node)._forward_cls
    if hasattr(compiled, _SKIPS):
        return
    backward = compiled.backward

    def run(ctx: Any, *gradients: Any) -> Any:
        is_boxed = len(gradients) == 1 and isinstance(gradients[0], list)
        if all(each is None for each in (gradients[0] if is_boxed else gradients)):
            return (None,) * len(ctx.needs_input_grad)
        return backward(ctx, *gradients)

    compiled.backward = staticmethod(run)
    setattr(compiled, _SKIPS, True)


def is_batched(gradient: Any) -> bool:
    """True for a gradient that stands for many.

    `is_grads_batched=True` makes such gradients (`is_legacy_batchedtensor`, 2.13), and so does
    `torch.vmap` (`is_batchedtensor`, 2.13).
    """
    functorch = torch._C._functorch
    return isinstance(gradient, torch.Tensor) and (
        functorch.is_legacy_batchedtensor(gradient) or functorch.is_batchedtensor(gradient)
    )


def gradient_node(tensor: torch.Tensor) -> Any:
    """Returns the autograd node where a tensor's gradient arrives; a leaf's accumulates it."""
    return torch.autograd.graph.get_gradient_edge(tensor).node


def is_wanted(tensor: torch.Tensor) -> bool:
    """True where the running backward needs the gradient of `tensor`.

    That is where it continues to what made the tensor, or returns the gradient
    (`_will_engine_execute_node`, 2.13, which fails for a leaf in `autograd.grad`).
    """
    try:
        return bool(torch._C._will_engine_execute_node(gradient_node(tensor)))
    except RuntimeError:
        return True


def descriptor_of(descriptor: Any, kind: str) -> int | None:
    """Returns the index in AOTAutograd's descriptor of an input or a result of its graph.

    None for another kind of descriptor (`PlainAOTInput`, `PlainAOTOutput`, 2.13).
    """
    return int(descriptor.idx) if type(descriptor).__name__ == kind else None


def changed_input(descriptor: Any) -> Any:
    """Returns the descriptor of the input that a result is written into after the forward.

    None for other results (`InputMutationAOTOutput`, 2.13).
    """
    return getattr(descriptor, "mutated_input", None)


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without elements whose `_version` is always that of `tensor` (2.13)."""
    counter = tensor.detach()
    counter.data = tensor.new_empty(0)
    return counter


def saved_tensors(node: Any) -> list[torch.Tensor]:
    """Returns the strided tensors that an autograd node saved (attributes `_saved_*`, 2.13).

    Tensors that a backward has freed are left out. What hooks packed is not unpacked, since that
    may compute something (`_raw_saved_*`, `SavedTensor.data`, 2.13): the tensors in it are
    returned.

    Raises:
        RuntimeError: torch would not give them to a backward, and says why.
    """
    found: list[torch.Tensor] = []
    for name in dir(node):
        if name == "saved_tensors" or (
            name.startswith("_saved_") and not name.startswith("_saved_tensors")
        ):
            try:
                value = _packed(node, name) or getattr(node, name)
            except RuntimeError as error:
                if "already been freed" in str(error):
                    continue
                raise

            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in found if tensor.layout == torch.strided]


def _packed(node: Any, name: str) -> list[Any]:
    """Returns what hooks packed in place of a node's saved tensors; empty where nothing was."""
    try:
        raw = getattr(node, f"_raw_{name.removeprefix('_')}", None)
        entries = raw if isinstance(raw, list | tuple) else [raw]
        packed = [getattr(entry, "data", None) for entry in entries]
    except RuntimeError:  # freed, or packed by hooks in C++
        return []
    is_plain = all(each is None or isinstance(each, torch.Tensor) for each in packed)
    return [] if is_plain else packed
