"""Models planned block by block: only blocks are captured; one budget covers the step.

The code between the blocks runs unchanged. This serves models whose parameters are sharded (FSDP2
gathers a block's parameters right before it runs), whose gradients are sent while the backward
still runs (DDP), or whose many similar blocks need to be captured only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from remat.core.errors import TraceError
from remat.face.executors import chosen_executor, install
from remat.face.outside_room import OutsideRoom
from remat.face.planned_module import PlannedCall
from remat.pieces.compiled_piece import released
from remat.pieces.joined_step import JoinedStep
from remat.pieces.runner import Piecewise
from remat.pieces.sharding import outside_bytes, sharding_of, with_sharding
from remat.plan.fixed_plan import FixedPlan
from remat.plan.planner import Plans
from remat.run.module_device import device_type
from remat.torch_border.backwards import is_in_backward
from remat.torch_border.modules import (
    OwnCall,
    call_plain,
    call_with_forward,
    get_call,
    own_forward,
    set_call,
)
from remat.tracers.cost_models import resolve_costs
from remat.tracers.costs import CostModel


class PlannedBlocks(PlannedCall):
    """What `model(...)` runs after `checkpoint(model, budget, blocks=...)`."""

    def __init__(
        self,
        module: nn.Module,
        blocks: Iterable[nn.Module],
        plan: Plans | FixedPlan,
        costs: str | CostModel,
    ) -> None:
        self.module, self.plan = module, plan
        self.device_type, self.differentiate = device_type(module), "all"
        self._costs_asked, self.costs = costs, resolve_costs(costs, self.device_type)
        self.pieces = []
        self.captured_s = 0.0
        self.outside = OutsideRoom(module, is_fixed=True)  # blocks run in pieces: stays empty

        self.blocks = _checked(module, list(blocks))
        self.executor = chosen_executor(self._parts, plan, self.device_type)
        self.piecewise: Piecewise
        self._outside_bytes = 0
        self._forget_plans()

    def _forget_plans(self) -> None:
        """Compiles the blocks again, for the chosen executor."""
        self.piecewise = self.executor.piecewise(self.module, self.plan, self.costs)
        self.piecewise.adjust = self._with_sharding
        install_blocks(self.blocks, self.piecewise, is_inductor=self.is_inductor)

    def _begin_anew(self) -> None:
        self.captured_s = 0.0  # the first call looks at the device

    @property
    def _is_begun(self) -> bool:
        return self.captured_s > 0

    @property
    def _parts(self) -> Sequence[nn.Module]:
        return (self.module, *self.blocks)

    def _follow_device(self) -> None:
        before = self.device_type
        super()._follow_device()
        if self.device_type != before:
            self._forget_plans()

    def _check_planned(self, result: Any) -> None:
        """Does nothing: layer drop may skip all blocks of the first call."""

    def _plan_largest(self, args: Any, kwargs: Any) -> None:
        """Does nothing: blocks are planned at the sizes they are called with."""

    def _with_sharding(self, joined: JoinedStep, num_resident: int) -> JoinedStep:
        sharding = sharding_of(self.module, joined, num_resident, self._outside_bytes)
        return joined if sharding is None else with_sharding(joined, sharding)

    def _run(self, args: Any, kwargs: Any) -> Any:
        self._outside_bytes = outside_bytes(self.module, self.blocks)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.piecewise.session.expects_pieces = False  # layer drop may skip all blocks
            return call_plain(self.module, *args, **kwargs)

        return self._run_pieces(self.piecewise, call, args, kwargs)


class BlockCall(OwnCall):
    """What `block(...)` runs inside of a planned model: its hooks, and its compiled forward."""

    def __init__(self, block: nn.Module, forwards: CompiledForwards, piecewise: Piecewise) -> None:
        self.block, self.forwards, self.piecewise = block, forwards, piecewise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the planned block; the plain one under `no_grad` or outside of the model's call.

        Raises:
            TraceError: a backward calls it.
        """
        if (
            not torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or not self.piecewise.is_running
        ):
            if is_in_backward():
                raise TraceError(
                    f"a planned block, {type(self.block).__name__}, is called in a backward: "
                    "torch.utils.checkpoint computes it again. A plan decides that itself: remove "
                    "the checkpoint around the block (model.gradient_checkpointing_disable() in "
                    "transformers)"
                )
            return call_plain(self.block, *args, **kwargs)
        forward = self.forwards.of(self.block)
        return call_with_forward(self.block, partial(self._run, forward), args, kwargs)

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.piecewise.session.expects_pieces = True
        return forward(self.block, *args, **kwargs)


class CompiledForwards:
    """The compiled forwards of blocks; blocks with the same forward share it."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self._compiled: dict[tuple[Any, bool], Callable[..., Any]] = {}

    def of(self, block: nn.Module) -> Callable[..., Any]:
        """Returns a block's present forward, compiled: (block, *args, **kwargs) -> result.

        Some libraries set a forward on the instance.
        """
        forward, takes_block = own_forward(block) or type(block).forward, True
        if isinstance(forward, MethodType) and forward.__self__ is block:
            forward = forward.__func__
        elif forward is not type(block).forward:
            takes_block = False
        key = forward, takes_block
        if key not in self._compiled:
            self._compiled[key] = _compile(forward, self.backend, takes_block=takes_block)
        return self._compiled[key]


def install_blocks(blocks: Iterable[nn.Module], piecewise: Piecewise, *, is_inductor: bool) -> None:
    """Makes each block run as a piece; blocks of one class share what is compiled."""
    forwards = CompiledForwards(released(piecewise.backend))
    for block in blocks:
        install(block, BlockCall(block, forwards, piecewise), is_inductor=is_inductor)


def remove_blocks(model: nn.Module) -> None:
    """Makes the blocks of `model` plain modules again."""
    for part in model.modules():
        if isinstance(get_call(part), BlockCall):
            set_call(part, None)


def _checked(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Returns the blocks.

    Raises:
        ValueError: there is no block, or one is outside of the model, or inside of another one.
    """
    names = {module: name for name, module in model.named_modules()}
    if not blocks:
        raise ValueError(
            "blocks is empty; leave it out to capture the model whole, or pass blocks, such as "
            "blocks=model.layers"
        )

    for block in blocks:
        if block not in names or block is model:
            raise ValueError(
                f"blocks has a {type(block).__name__} that is not part of this "
                f"{type(model).__name__}; pass submodules of the model"
            )
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"blocks has {names[block]!r}, a {type(block).__name__} that is never called; "
                "pass the modules in it"
            )

    for block in blocks:
        inner = next(
            (other for other in blocks if other is not block and other in set(block.modules())),
            None,
        )
        if inner is not None:
            raise ValueError(
                f"blocks has {names[inner]!r}, which is inside of {names[block]!r}; pass one "
                "of them"
            )

    return blocks


def _compile(forward: Callable[..., Any], backend: Any, *, takes_block: bool) -> Callable[..., Any]:
    """Returns `forward` compiled through a new frame: dynamo stores results by code object."""
    namespace: dict[str, Any] = {"forward": forward}
    given = "self, *args, **kwargs" if takes_block else "*args, **kwargs"
    exec(f"def block(self, *args, **kwargs):\n    return forward({given})", namespace)
    return torch.compile(namespace["block"], backend=backend, dynamic=False)
