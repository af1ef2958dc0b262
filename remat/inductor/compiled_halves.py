"""The two halves of a split step as Inductor's kernels, and how much memory they hold."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

from torch import fx

from remat.core.errors import TraceError
from remat.inductor.dry_run import HalfMemory, Shared, dry_run
from remat.inductor.kernel_plan import KernelPlan
from remat.inductor.paddings import pads_products
from remat.narration.stages import stage
from remat.run.measured_forward import storages_of
from remat.run.rewrite import SplitStep
from remat.torch_border.inductor import (
    CompiledModule,
    compile_options,
    compiled_module,
    inductor_compilers,
    kernels_later,
)
from remat.torch_border.scalars import is_symbol
from remat.tracers.calls import Call
from remat.tracers.traced_step import TracedStep

_, compile_fx_inner = inductor_compilers()

_LOG = logging.getLogger(__name__)


class CompiledHalves:
    """Compiles the forward of a split step, then its backward, in the plan's order.

    How much the kernels hold is known before they are compiled. The forward's kernels are compiled
    in other processes while Inductor writes the backward's. The kernels of a plan that holds too
    much are not compiled.

    Attributes:
        step: the step, operator by operator.
        limits_bytes: the most that the forward's and the backward's kernels may hold, in addition
            to the tensors that exist throughout.
        workspace_of: call of a library operator -> its workspace.
        keeps_layouts: convolutions get no copies of their inputs in another layout; no plan counts
            the memory of such copies. On a CPU they never get any.
        memory: whether it is the backward -> the memory of that half; no entry if a dry run is not
            possible.
    """

    def __init__(
        self,
        step: TracedStep,
        split: SplitStep,
        limits_bytes: tuple[int, int],
        workspace_of: Callable[[Call], int],
        *,
        keeps_layouts: bool = False,
    ) -> None:
        self.step, self.limits_bytes, self.workspace_of = step, limits_bytes, workspace_of
        self.keeps_layouts = keeps_layouts or step.graph.device == "cpu"
        self.memory: dict[bool, HalfMemory] = {}
        self._shared: dict[str, Shared] = {}  # saved tensors that share memory with others
        self._arriving_bytes = 0  # of the gradients that arrive for the backward
        self._modules: list[CompiledModule] = []

        inputs = step.module.graph.find_nodes(op="placeholder")
        # names of tensors that exist throughout a half: inputs, and what the forward returned
        self._resident = {node.name for node in inputs}
        given = split.backward.graph.find_nodes(op="placeholder")
        num_saved = len(_results(split.forward)) - step.num_forward_outputs
        saved = [node.name for node in given[:num_saved]]
        # the backward takes numbers first, the forward returns them last
        num_numbers = sum(is_symbol(node.meta.get("val")) for node in inputs)
        self._saved = saved[num_numbers:] + saved[:num_numbers]

    def compile(self, graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Returns a half compiled by Inductor, whose options are `kwargs`.

        Raises:
            TraceError: Inductor can't compile it.
        """
        is_backward, device = bool(kwargs.get("is_backward")), self.step.graph.device
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        is_resident = [name in self._resident for name in names]
        half = "backward" if is_backward else "forward"

        beside_bytes = self._held_beside(names, inputs, is_resident) if is_backward else 0
        limit_bytes = self.limits_bytes[is_backward] - beside_bytes
        kernels = KernelPlan(limit_bytes, frozenset(self._resident), device, self.workspace_of)
        padding = pads_products(graph.graph)
        options = compile_options(keeps_layouts=self.keeps_layouts, pads_products=padding)

        writing = stage(f"writing the kernels of the {half}")
        with _refusing(), writing, kernels_later(), kernels.followed(), options:
            compiled = compile_fx_inner(graph, inputs, **kwargs)
        _LOG.info("%s: %s", half, kernels.summary())

        module = compiled_module(compiled)
        if module is not None:
            num_returned = 0 if is_backward else self.num_returned(graph)
            shared = [self._shared.get(name) for name in names]
            with _refusing():
                memory = dry_run(
                    module, inputs, device, is_resident, num_returned, self.workspace_of, shared
                )
            self.memory[is_backward] = memory
            if not is_backward:
                self._note_saved(memory, num_returned)

            self._modules.append(module)
            if self._is_within_limit(is_backward):
                with _refusing():
                    module.start_kernels()

        elif all(node.op != "call_function" for node in graph.graph.nodes):
            self.memory[is_backward] = HalfMemory(0, 0)  # it returns some of its inputs
            if not is_backward:
                self._resident.update(self._saved)

        return compiled

    def _note_saved(self, memory: HalfMemory, num_returned: int) -> None:
        """Notes which saved tensors exist throughout, and which share memory, by the dry run.

        A saved input may be a copy in another layout.
        """
        stays = list(map(operator.or_, memory.is_input, memory.is_returned))
        self._resident -= set(self._saved)
        self._resident.update(compress(self._saved, stays[num_returned:]))
        places = zip(self._saved, memory.shared[num_returned:], strict=True)
        self._shared = {name: where for name, where in places if where}

    def wait(self) -> None:
        """Waits until all kernels are compiled; otherwise a kernel's first call waits for it.

        Raises:
            TraceError: a kernel can't be compiled.
        """
        if not self._modules:
            return

        with _refusing(), stage("compiling the kernels"):
            for module in self._modules:
                module.start_kernels()
            for module in self._modules:
                module.wait_for_kernels()
        self._modules.clear()

    @property
    def peaks_bytes(self) -> tuple[int, int] | None:
        """The peaks of the forward and the backward, without tensors that exist throughout.

        None where they are unknown.
        """
        if len(self.memory) < 2:
            return None
        forward, backward = self.memory[False], self.memory[True]
        return forward.peak_bytes, forward.end_bytes + self._arriving_bytes + backward.peak_bytes

    def _is_within_limit(self, is_backward: bool) -> bool:
        """Says whether the halves compiled so far hold no more than their limits."""
        held = self.peaks_bytes or (self.memory[is_backward].peak_bytes,)
        return all(map(operator.le, held, self.limits_bytes))

    def num_returned(self, forward: fx.GraphModule) -> int:
        """Returns how many results of a forward to compile are not saved.

        The step's own number also counts tokens of effects, which AOTAutograd has removed.
        """
        return len(_results(forward)) - len(self._saved)

    def _held_beside(
        self, names: Sequence[str], inputs: Sequence[Any], is_resident: Sequence[bool]
    ) -> int:
        """Returns the bytes that stay after the forward and are not inputs of the backward."""
        if False not in self.memory:
            return 0
        num_saved = len(self._saved)
        # autograd itself holds the gradient of 1.0 that `loss.backward()` starts from
        self._arriving_bytes = _bytes_of([x for x in inputs[num_saved:] if x.dim()])
        given = [
            (name, value)
            for name, value, stays in zip(names, inputs[:num_saved], is_resident, strict=False)
            if not stays
        ]
        shared = dict(self._shared[name] for name, _ in given if name in self._shared)
        alone = [value for name, value in given if name not in self._shared]
        return max(0, self.memory[False].end_bytes - sum(shared.values()) - _bytes_of(alone))


@contextmanager
def _refusing() -> Iterator[None]:
    """Raises a `TraceError` in place of Inductor's own errors."""
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
        raise TraceError(
            f'Inductor can\'t compile this step: {why}; use executor="eager"'
        ) from error


def _bytes_of(tensors: Sequence[Any]) -> int:
    return sum(storage.size_bytes for storage in storages_of(tensors).values())


def _results(graph: fx.GraphModule) -> Sequence[Any]:
    results = graph.graph.output_node().args[0]
    assert isinstance(results, Sequence)
    return results
