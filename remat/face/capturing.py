"""Captures a call of a module: compiles it through a frame of its own.

Raises remat's own errors for what can't be captured or planned.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from remat.core.errors import RematError, TraceError
from remat.core.graph import Graph
from remat.core.solution import Solution
from remat.pieces.break_messages import OUT_OF_THE_PIECES
from remat.run.capture import GraphBreak, Step, make_backend
from remat.run.cuda_graphs import only_known_steps
from remat.run.idle_hooks import IdleHooks
from remat.run.module_device import device_type
from remat.run.refusals import nested_is_refused
from remat.run.transformers_paths import install_capturing_hooks, plain_paths
from remat.torch_border.dynamic_marks import at_its_largest, largest_shape
from remat.torch_border.dynamo import (
    capture_settings,
    compile_frame,
    failure_text,
    is_compilers_own,
    is_graph_break,
    unwrap_failure,
)
from remat.torch_border.fakes import on_fakes
from remat.torch_border.layouts import dense_parts
from remat.torch_border.modules import call_plain
from remat.torch_border.other_compiles import own_capture
from remat.torch_border.sharded import held_bytes, local_part
from remat.tracers.cost_models import resolve_costs
from remat.tracers.costs import CostModel
from remat.tracers.retarget import allocated_bytes
from remat.tracers.traced_step import TracedStep

_LOG = logging.getLogger(__name__)


def captured_step(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    *,
    costs: str | CostModel,
    differentiate: str,
    on_device_type: str = "",
) -> TracedStep:
    """Captures one step on fake copies of parameters, buffers and inputs, without running it."""
    costs = resolve_costs(costs, on_device_type or device_type(model))
    options = {"differentiate": differentiate, "on_device_type": on_device_type}
    step = _captured(make_backend, model, args, kwargs, costs, **options)
    assert isinstance(step, TracedStep), "a step on fake tensors is captured as one graph"
    return step


def captured_at_largest(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    *,
    costs: CostModel,
    differentiate: str,
    on_device_type: str,
) -> TracedStep | None:
    """Captures one step for the largest sizes that the inputs declare.

    Returns None if they declare none, or if the step runs in pieces, which only a step can find.
    """
    if not any(largest_shape(tensor) for tensor in tensors_in(args, kwargs)):
        return None

    largest = pytree.tree_map_only(torch.Tensor, at_its_largest, (args, kwargs))
    try:
        return captured_step(
            model,
            *largest,
            costs=costs,
            differentiate=differentiate,
            on_device_type=on_device_type,
        )
    except GraphBreak:
        return None


def captured_kernels(
    model: nn.Module, args: Any, kwargs: Any, *, costs: str | CostModel, differentiate: str
) -> Graph:
    """Returns the graph of one step in Inductor's kernels; captures it like `captured_step`."""
    # Inductor takes seconds to import
    from remat.inductor.backend import make_inductor_backend

    model_costs = resolve_costs(costs, device_type(model))
    make = make_inductor_backend
    return _captured(make, model, args, kwargs, model_costs, differentiate=differentiate).graph


def _captured(
    make: Callable[..., Any],
    model: nn.Module,
    args: Any,
    kwargs: Any,
    costs: CostModel,
    *,
    differentiate: str,
    on_device_type: str = "",
) -> Step:
    captured: list[Step] = []

    def plan(step: Step, **_: Any) -> Solution:
        captured.append(step)
        raise _CapturedError

    with on_fakes(model, args, kwargs, on_device_type) as (fake_args, fake_kwargs):
        backend = make(
            plan,
            costs,
            lambda _: None,
            differentiate=differentiate,
            model_bytes=partial(model_bytes, model),
        )
        compiled = compile_call(model, backend)

        try:
            run_compiled(compiled, fake_args, fake_kwargs, numbers_are_inputs=False)
        except Exception as error:
            if not isinstance(unwrap_failure(error), _CapturedError):
                raise

    if not captured:
        raise TraceError(nothing_to_differentiate(model))
    return captured[0]


class _CapturedError(RematError):
    """Ends a trace once the graph exists, before anything runs."""


def tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the tensors among a call's arguments."""
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def model_bytes(module: nn.Module) -> int:
    """Returns the bytes of all parameters and buffers on the module's type of device.

    Shared storages count once, and sizes are rounded as the device's allocator does.
    """
    kind = device_type(module)
    held = (part for t in (*module.parameters(), *module.buffers()) for part in dense_parts(t))
    tensors = [tensor for tensor in held if tensor.device.type == kind]
    sizes = {local_part(t).untyped_storage()._cdata: held_bytes(t) for t in tensors}
    return sum(allocated_bytes(size, kind) for size in sizes.values())


def compile_call(
    module: nn.Module,
    backend: Any,
    *,
    is_whole: bool = True,
    frame: str = "",
    on_recapture: Callable[[str], None] = _LOG.debug,
) -> Callable[..., Any]:
    """Returns `module(...)` compiled, as one graph or in pieces, through a frame of its own.

    Dynamo does not compile frames of torch's own modules, so an `nn.Sequential` would never be
    captured; and it stores what it compiled by code object, which here belongs to this module only.
    The module is passed as an argument, since dynamo never releases a frame's globals
    (`CleanupManager`, torch 2.13).

    Args:
        module: the module.
        backend: the backend that compiles its graphs.
        is_whole: whether a graph break is an error.
        frame: file name of the frame. Dynamo uses it to remember which numbers changed, so all
            frames of one module share a name, and two modules never do.
        on_recapture: called with the reasons why the module is captured again.
    """
    install_capturing_hooks(module)
    namespace: dict[str, Any] = {"call_plain": call_plain}
    source = "def step(self, /, *args, **kwargs):\n    return call_plain(self, *args, **kwargs)"
    exec(compile(source, frame or new_frame(), "exec"), namespace)
    step = namespace["step"]
    compiled = compile_frame(step, backend, is_whole=is_whole, on_recapture=on_recapture)

    if not is_whole:  # eager parts may use checkpointing, which needs hooks
        return partial(compiled, module)

    hooks = IdleHooks(module)

    def run(*args: Any, **kwargs: Any) -> Any:
        with hooks.removed():
            return compiled(module, *args, **kwargs)

    return run


def new_frame() -> str:
    """Returns a file name for the frames of one planned module."""
    return f"<remat frame {next(_FRAMES)}>"


_FRAMES = itertools.count()


def check_module(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raises `TraceError` for a call that can't be planned.

    Either no parameter or input needs a gradient, or a parameter has no shape yet, or an argument
    is a nested tensor.
    """
    if any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise TraceError(
            f"{type(module).__name__} has lazy modules, whose parameters get their shapes from a "
            "first batch; run it once under torch.no_grad() before it is planned"
        )

    if any(tensor.is_nested for tensor in tensors_in(args, kwargs)):
        raise TraceError(nested_is_refused("an argument"))
    if not _needs_gradient(module, tensors_in(args, kwargs)):
        raise TraceError(nothing_to_differentiate(module))


def _needs_gradient(module: nn.Module, tensors: Sequence[torch.Tensor]) -> bool:
    """True where a parameter or an input requires a gradient."""
    return any(p.requires_grad for p in module.parameters()) or any(
        t.requires_grad for t in tensors
    )


def nothing_to_differentiate(module: nn.Module) -> str:
    """Returns the message for a step without a backward."""
    return (
        f"{type(module).__name__} has nothing to differentiate: no parameter or input that its "
        "outputs depend on has requires_grad=True, so there is no backward to save memory for; "
        "unfreeze a parameter, or call the module under torch.no_grad()"
    )


def run_compiled(
    compiled: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    is_whole: bool = True,
    numbers_are_inputs: bool = True,
) -> Any:
    """Calls a compiled function; raises remat's own errors if it can't be captured or planned.

    Args:
        compiled: what `compile_call` returned.
        args: arguments of the call.
        kwargs: keyword arguments of the call.
        is_whole: whether the function is compiled as one graph.
        numbers_are_inputs: whether numbers that change become inputs, see `capture_settings`.

    Raises:
        GraphBreak: it can't be captured as one graph.
        TraceError: it can't be compiled, even in pieces, or it can't be planned.
    """
    try:
        with (
            capture_settings(numbers_are_inputs=numbers_are_inputs),
            own_capture(),
            plain_paths(),
            only_known_steps(),
        ):
            return compiled(*args, **kwargs)
    except Exception as error:
        cause = unwrap_failure(error)
        if isinstance(cause, RematError):
            raise cause from None

        if is_graph_break(error):
            raise _uncapturable(error, is_whole=is_whole) from None

        # the backend failed: AOTAutograd could not trace the step, or it could not be planned
        if cause is not error:
            raise TraceError(
                f"this step can't be traced and planned: {type(cause).__name__}: {cause}"
            ) from error
        raise


def _uncapturable(error: Exception, *, is_whole: bool) -> TraceError:
    """Returns the error for a step that torch.compile can't capture as one graph, or at all."""
    why, place = failure_text(error)
    if not is_whole:
        hint = f". {OUT_OF_THE_PIECES}" if is_compilers_own(error) else ""
        return TraceError(
            f"torch.compile fails on this step, whole and in pieces: {why}{place}{hint}"
        )

    return GraphBreak(
        f"torch.compile can't capture this step as one graph: {why}{place}\n"
        "Rewrite that line, or move it out of the forward; TORCH_LOGS=graph_breaks shows "
        "the place.",
        why.split("\n")[0] + place,
    )
