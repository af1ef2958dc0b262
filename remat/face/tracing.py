"""Traces a step to a graph, on fake tensors, for this machine or for another device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from remat.core.errors import TraceError
from remat.core.graph import Graph
from remat.face.capturing import (
    captured_kernels,
    captured_step,
    check_module,
    compile_call,
    nothing_to_differentiate,
    run_compiled,
    tensors_in,
)
from remat.face.step_function import as_step
from remat.pieces.runner import Piecewise
from remat.run.capture import GraphBreak
from remat.run.module_device import device_type
from remat.torch_border.fakes import on_fakes
from remat.torch_border.sharded import called_directly, ddps_in
from remat.tracers.cost_models import resolve_costs, roofline
from remat.tracers.costs import CostModel
from remat.tracers.devices import Device
from remat.tracers.retarget import as_on, traced_on
from remat.tracers.traced_step import TracedStep


def check_traced(executor: str) -> None:
    """Raises `ValueError` for an executor whose graph can't be traced."""
    if executor not in ("eager", "inductor"):
        raise ValueError(f'executor={executor!r} is neither "eager" nor "inductor"')


def trace_kernels(
    device: Device | None,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    costs: str | CostModel,
    autocast: torch.dtype | None = None,
    differentiate: str = "scalars",
) -> Graph:
    """Returns the graph of a step in Inductor's kernels.

    If `device` is None, it is the model's own.

    Raises:
        ValueError: this machine has no device of that kind.
    """
    step = _checked(model, args, kwargs)
    kind = device.type if device else device_type(step)
    is_here = kind == traced_on(device) if device else torch.cuda.is_available()
    if kind == "cuda" and not is_here:
        wanted = device.name if device else "that of the model"
        raise ValueError(
            'executor="inductor" plans kernels for devices of this machine, and this machine has no'
            f' GPU such as {wanted}; use executor="eager", which traces for any device'
        )

    if device:
        costs = _costs_on(device, costs)
    with as_on(device, autocast=autocast) if device else nullcontext():
        try:
            with called_directly(ddps_in(step)):
                return captured_kernels(
                    step, args, kwargs or {}, costs=costs, differentiate=differentiate
                )
        except GraphBreak as found:
            # Inductor takes seconds to import
            from remat.inductor.fused_pieces import FusedPiecewise

            return trace_pieces(
                step, args, kwargs, costs=costs, found=found, make_runner=FusedPiecewise
            )


def trace_for(
    device: Device,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    costs: str | CostModel,
    autocast: torch.dtype | None = None,
    differentiate: str = "scalars",
) -> Graph:
    """Returns the graph of a step as `device` would run it; this machine need not have it."""
    with as_on(device, autocast=autocast):
        return trace_operators(
            model,
            args,
            kwargs,
            costs=_costs_on(device, costs),
            differentiate=differentiate,
            on_device_type=traced_on(device),
        )


def _costs_on(device: Device, costs: str | CostModel) -> str | CostModel:
    """Returns the costs on `device`, which may not be there.

    Raises:
        ValueError: these costs are measured on this machine.
    """
    if costs == "profile":
        raise ValueError(
            f'costs="profile" times operators on this machine, and device={device.name!r} may be '
            'another device; use costs="roofline", or leave device= out'
        )
    return roofline(device) if costs == "roofline" else costs


def trace_operators(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    costs: str | CostModel,
    differentiate: str,
    on_device_type: str = "",
) -> Graph:
    """Returns the graph of a step, captured whole, or joined from its pieces.

    `on_device_type` is that of `trace_step`.
    """
    try:
        return trace_step(
            model,
            args,
            kwargs,
            costs=costs,
            differentiate=differentiate,
            on_device_type=on_device_type,
        ).graph
    except GraphBreak as found:
        return trace_pieces(
            model, args, kwargs, costs=costs, found=found, on_device_type=on_device_type
        )


def trace_step(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    costs: str | CostModel = "roofline",
    differentiate: str = "scalars",
    on_device_type: str = "",
) -> TracedStep:
    """Returns the graph of a step together with the `torch.fx` graph it was read from.

    `on_device_type` puts the fake copies on `cpu` or `cuda`, wherever the model is.
    """
    step = _checked(model, args, kwargs)
    with called_directly(ddps_in(step)):
        return captured_step(
            step,
            args,
            kwargs or {},
            costs=costs,
            differentiate=differentiate,
            on_device_type=on_device_type,
        )


def _checked(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> nn.Module:
    """Returns the step as a module, if this call of it can be planned."""
    if not isinstance(args, list | tuple):
        raise TypeError(
            f"args must be a tuple of the model's arguments, and {type(args).__name__} was "
            "given; write args=(batch,)"
        )
    step = as_step(model, args, kwargs)
    check_module(step, args, kwargs or {})
    return step


def trace_pieces(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    costs: str | CostModel,
    found: GraphBreak,
    on_device_type: str = "",
    make_runner: type[Piecewise] = Piecewise,
) -> Graph:
    """Returns the graph of a step that can't be captured whole, joined from its pieces.

    Args:
        model: any module, or a step function.
        args: its inputs.
        kwargs: its keyword inputs.
        costs: the cost model.
        found: why the step can't be captured whole.
        on_device_type: that of `trace_step`.
        make_runner: the class that runs the pieces.
    """
    step = as_step(model, args, kwargs)
    with (
        called_directly(ddps_in(step)),
        on_fakes(step, args, kwargs or {}, on_device_type) as (fake_args, fake_kwargs),
    ):
        runner = make_runner(step, None, resolve_costs(costs, device_type(step)))
        compiled = compile_call(step, runner.backend, is_whole=False)

        try:
            runner.run(
                lambda: run_compiled(compiled, fake_args, fake_kwargs, numbers_are_inputs=False),
                tensors_in(fake_args, fake_kwargs),
            )
        except RuntimeError as error:
            raise GraphBreak(
                f"{found}\nIts pieces can't be traced without data either "
                f"({type(error).__name__}: {error}). "
                "remat.checkpoint finds them in the first real step.",
                found.place,
            ) from error

    if runner.joined is None:
        raise TraceError(nothing_to_differentiate(step))
    return runner.joined.graph
