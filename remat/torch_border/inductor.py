"""Private names of Inductor.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from remat.torch_border.autograd import metadata_of_compilation

_MANY_OPERATORS = 200  # may be inlined; the gradient of a cross entropy has some 50


def inductor_compilers() -> tuple[Any, Any]:
    """Returns Inductor's `compile_fx` and `compile_fx_inner` (2.13).

    Importing them takes seconds, and warns of torch's own deprecated calls.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    return compile_fx, compile_fx_inner


def halves_compiled_at_once() -> Any:
    """Compiles the backward together with the forward, not when it first runs (2.13).

    AOTAutograd's cache of both halves is off, as it knows no plan; Inductor's cache of each half
    stays on.
    """
    from torch._functorch import config

    return config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False)


def leave_kept_graphs_to_the_backward() -> None:
    """Makes AOTAutograd call our backward even if its graph is kept; ours raises the error.

    AOTAutograd's own check is on where `bw_donated_idxs` (2.13) is not empty. It can be emptied
    once a backward is compiled, since Inductor has read it then.
    """
    metadata = metadata_of_compilation()
    if hasattr(metadata, "bw_donated_idxs"):
        metadata.bw_donated_idxs = []


def compile_options(*, keeps_layouts: bool, pads_products: bool) -> Any:
    """Makes Inductor compile a half as plans expect it (names of options: 2.13).

    With `keeps_layouts`, convolutions are compiled for the layouts that their inputs have.

    With `pads_products`, a padded operand is computed where it is padded. By default Inductor
    computes it first and copies it, stores intermediate values of another type where many operators
    are inlined, and lengthens rows to multiples of 128 bytes.
    """
    from torch._inductor import config

    options: dict[str, Any] = {}
    if keeps_layouts:
        options["layout_optimization"] = False
    if pads_products:
        options["inplace_padding"] = options["comprehensive_padding"] = False
        options["realize_opcount_threshold"] = _MANY_OPERATORS
        options["realize_acc_reads_threshold"] = _MANY_OPERATORS
    return config.patch(options)


@contextmanager
def reporting_strides(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """Allows compiling a graph that AOTAutograd does not compile itself.

    Yields a list that gets the strides of the graph's results, None for a result that is no tensor
    (`TracingContext.report_output_strides`, 2.13). Inductor chooses the strides of results that are
    not returned to the user.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing

    found: list[Any] = []
    with tracing(TracingContext(detect_fake_mode(inputs))):
        with TracingContext.report_output_strides() as strides:
            yield found
        found += strides or []


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph that dynamo captured, since Inductor changes what it compiles.

    A plain copy lacks `_dynamo_source` and `_param_name_to_source` (2.13), which distinguish
    parameters from inputs.
    """
    copy_of: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, copy_of))
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)

    pairs = [(module, made), *((n, copy_of[n]) for n in module.graph.find_nodes(op="placeholder"))]
    for source, copy in pairs:
        for name in ("_dynamo_source", "_param_name_to_source"):
            if name in vars(source):
                setattr(copy, name, vars(source)[name])
    return made


def inductor_partitioner(cut: Callable[..., Any]) -> Any:
    """Returns `cut` in the form that Inductor expects (`CustomPartitionerFn`, 2.13).

    It has no key: each half is cached by its own graph.
    """
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return cut(gm, joint_inputs, **kwargs)

        def uuid(self) -> None:
            return None

        def __reduce__(self) -> tuple[Any, ...]:  # part of the cache's key, with all settings
            return str, ("remat",)

    return Partitioner()


class LaterKernel:
    """A C++ function of a compiled module, given to the compiler once it is sure to be needed.

    It is compiled in another process while this one goes on. Its first call waits for it.
    """

    def __init__(self, compile_: Callable[[], Any]) -> None:
        self._compile = compile_
        self._compiled: Any = None

    def start(self) -> None:
        """Gives it to the compiler."""
        if self._compiled is None:
            self._compiled = self._compile()

    def ready(self) -> Callable[..., Any]:
        """Returns the compiled function."""
        self.start()
        compiled = self._compiled
        is_running = hasattr(compiled, "result")  # not where Inductor compiles in this process
        run: Callable[..., Any] = compiled.result() if is_running else compiled
        return run

    def __call__(self, *args: Any) -> Any:
        """Runs the function."""
        return self.ready()(*args)


@contextmanager
def kernels_later() -> Iterator[None]:
    """Makes C++ functions of modules `LaterKernel`s (`AsyncCompile.cpp_pybinding`, 2.13).

    Triton's kernels are left as they are, since Inductor's cache stores them with the module.
    """
    from torch._inductor.async_compile import AsyncCompile

    compile_now = AsyncCompile.cpp_pybinding

    def later(self: Any, *args: Any, **kwargs: Any) -> LaterKernel:
        return LaterKernel(partial(compile_now, self, *args, **kwargs))

    AsyncCompile.cpp_pybinding = later  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding = compile_now  # type: ignore[method-assign]


@dataclass(frozen=True)
class CompiledModule:
    """The Python module that Inductor writes for a graph.

    Attributes:
        source: its text.
        names: its global names.
        call: its function, which takes a list of arguments and empties it.
        partitions: functions that it calls; on a GPU all kernels are in one of them.
    """

    source: str
    names: dict[str, Any]
    call: types.FunctionType
    partitions: tuple[types.FunctionType, ...]

    def start_kernels(self) -> None:
        """Gives its kernels to the compiler."""
        for _, kernel in self._later_kernels():
            kernel.start()

    def wait_for_kernels(self) -> None:
        """Waits until its kernels are compiled."""
        for name, kernel in self._later_kernels():
            self.names[name] = kernel.ready()

    def _later_kernels(self) -> list[tuple[str, LaterKernel]]:
        return [(n, kernel) for n, kernel in self.names.items() if isinstance(kernel, LaterKernel)]

    def with_names(self, names: dict[str, Any]) -> Callable[[list[Any]], Any]:
        """Returns its function, and those of its partitions, with `names` as global names."""

        def again(function: types.FunctionType) -> types.FunctionType:
            return types.FunctionType(
                function.__code__, names, function.__name__, function.__defaults__
            )

        runner = types.SimpleNamespace(partitions=list(map(again, self.partitions)))
        return types.MethodType(again(self.call), runner)


def compiled_module(compiled: Any) -> CompiledModule | None:
    """Returns the module of a graph that `compile_fx_inner` compiled (2.13).

    None where its code is of another kind: C++ throughout, cut into CUDA graphs, or with graphs
    inside of operators (`torch.cond`), which are functions of their own.
    """
    runner = getattr(compiled, "compiled_fn_runner", None)
    if runner is None or not compiled.source_code:
        return None
    call, partitions = runner.call.__func__, tuple(runner.partitions)
    if not all(getattr(p, "__globals__", None) is call.__globals__ for p in partitions):
        return None  # recorded as CUDA graphs
    others = [
        value
        for value in call.__globals__.values()
        if getattr(value, "__globals__", None) is call.__globals__
        and value.__code__.co_varnames[: value.__code__.co_argcount] == ("args",)
    ]
    if not all(other in (call, *partitions) for other in others):
        return None
    return CompiledModule(compiled.source_code, call.__globals__, call, partitions)
