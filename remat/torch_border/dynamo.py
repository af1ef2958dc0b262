"""Private names of torch's graph capture: dynamo's settings and failures.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo import exc as dynamo_exc
from torch._dynamo.callback import callback_handler  # 2.13
from torch._dynamo.comptime import ComptimeContext, comptime  # 2.13
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,  # 2.13
    free_unbacked_symbols,  # 2.13
)
from torch.utils._python_dispatch import TorchDispatchMode

from remat.narration.stages import stage
from remat.torch_border.dynamo_rewrites import eager_settings, operators_left_alone
from remat.torch_border.kernels import without_modes
from remat.torch_border.scalars import fixed_sizes

_TORCH = str(Path(torch.__file__).parent)
_NOT_THE_MODEL = _TORCH, str(Path(__file__).parents[1]), "<"
_COMPILER = tuple(f"{_TORCH}/{folder}/" for folder in ("_dynamo", "_functorch/_aot_autograd"))
# an operator, a compiled function
_CALLS = f"{_TORCH}/_ops.py", f"{_TORCH}/_dynamo/eval_frame.py"


@contextmanager
def capture_settings(*, numbers_are_inputs: bool = True) -> Iterator[None]:
    """Sets dynamo's options for capturing and running a planned step (config names of 2.13).

    A module may be compiled for any number of shapes, each with its plan, and again after a hook
    was added or removed. Recurrent networks are captured. Calls of loggers do not break a graph:
    they are left out of it.

    Args:
        numbers_are_inputs: a float or an int that changed since the last capture becomes an input,
            attributes of modules included; otherwise each number is captured separately.
    """
    limits = {"recompile_limit": 2**20, "accumulated_recompile_limit": 2**20, "optimize_ddp": False}
    settings = {
        **limits,
        "skip_nnmodule_hook_guards": False,
        "allow_rnn": True,
        "capture_scalar_outputs": False,
        "capture_dynamic_output_shape_ops": False,
        "ignore_logger_methods": _logging_functions(),
        "assume_static_by_default": True,
        "automatic_dynamic_shapes": numbers_are_inputs,
        "allow_unspec_int_on_nn_module": numbers_are_inputs,
        "specialize_float": not numbers_are_inputs,
        **eager_settings(),
    }

    with (
        _set(settings),
        operators_left_alone(),
        fixed_sizes(),
        _telling_of_captures(),
        _failures_said_once(),
        without_settings_in_log(),
    ):
        yield


@contextmanager
def _set(settings: Mapping[str, Any]) -> Iterator[None]:
    """Sets those of dynamo's options that have another value, and sets them back.

    `dynamo_config.patch` leaves an entry in the thread's context each time (2.13), which would add
    up over the steps of a training.
    """
    before = {name: getattr(dynamo_config, name) for name in settings}
    others = {name: value for name, value in settings.items() if before[name] != value}
    try:
        for name, value in others.items():
            setattr(dynamo_config, name, value)
        yield
    finally:
        for name in others:
            setattr(dynamo_config, name, before[name])


@contextmanager
def without_settings_in_log(version: str = torch.__version__) -> Iterator[None]:
    """Leaves dynamo's settings out of its metrics on torch 2.11 and 2.12.

    These versions write the settings as JSON, which fails for the set of functions in them, so that
    each compilation logs a traceback (`_get_dynamo_config_for_logging`; can be removed once 2.13 is
    the oldest supported version).
    """
    if tuple(map(int, version.split(".")[:2])) >= (2, 13):
        yield
        return

    utils: Any = torch._dynamo.utils
    before = utils._get_dynamo_config_for_logging
    utils._get_dynamo_config_for_logging = lambda: None
    try:
        yield
    finally:
        utils._get_dynamo_config_for_logging = before


@contextmanager
def _telling_of_captures() -> Iterator[None]:
    """Reports on stderr while dynamo captures (`callback_handler`, 2.13).

    Dynamo calls back at the beginning and at the end of a capture, even a failed one;
    `torch._dynamo.reset()` removes the callbacks.
    """
    captures = ExitStack()

    def begin(_: Any) -> None:
        captures.enter_context(stage("capturing the training step"))
        captures.enter_context(_without_leaf_warnings())

    def end(_: Any) -> None:
        captures.close()

    added = ((callback_handler.start_callbacks, begin), (callback_handler.end_callbacks, end))
    for callbacks, callback in added:
        callbacks.append(callback)

    try:
        yield
    finally:
        captures.close()
        for callbacks, callback in added:
            if callback in callbacks:
                callbacks.remove(callback)


def compile_frame(
    function: Callable[..., Any],
    backend: Any,
    *,
    is_whole: bool,
    on_recapture: Callable[[str], None],
) -> Callable[..., Any]:
    """Compiles a function as `torch.compile` does, through `optimize` (2.13).

    With `is_whole` it is one graph, but frames are not counted, unlike with `fullgraph=True`. While
    a function with `fullgraph=True` runs, dynamo counts the frames it compiled, with one count for
    all threads, and compiles none below them. So steps in pieces would run plain in other threads,
    and functions there could fail when the count ends ("found no compiled frames").

    Args:
        function: the function.
        backend: the backend that compiles its graphs.
        is_whole: a graph break is an error.
        on_recapture: called, when a frame is captured again, with the reason why each earlier
            capture does not fit.
    """
    context: Any = torch._dynamo.optimize(
        backend=backend,
        nopython=is_whole,
        dynamic=None,
        guard_fail_fn=lambda failure: on_recapture(failure.reason),
    )
    context.fullgraph = False
    return context(function)  # type: ignore[no-any-return]


@contextmanager
def _without_leaf_warnings() -> Iterator[None]:
    """Hides a warning that dynamo causes and the model can't avoid (2.13).

    Dynamo reads `.grad` of tensors passed from one piece to the next, which are not leaves. Around
    a step that runs, this would make Python show each of the user's warnings again.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            message="The .grad attribute of a Tensor that is not a leaf",
            category=UserWarning,
        )
        yield


# import_module, since the attribute of that name is the function and not the module (2.13)
SCANS: Any = importlib.import_module("torch._higher_order_ops.associative_scan")


def scan_as_operators(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `associative_scan` (2.13), captured as the operators that it consists of.

    Otherwise it is one operator on a GPU, which only Inductor can run.
    """

    def associative_scan(
        combine_fn: Any, xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
    ) -> Any:
        mode = "generic" if torch.compiler.is_dynamo_compiling() else combine_mode
        return plain(combine_fn, xs, dim, reverse, mode)

    return associative_scan


def is_associative_scan(node: fx.Node) -> bool:
    """True for an associative scan captured as one operator (`associative_scan_op`, 2.13)."""
    return bool(node.target is SCANS.associative_scan_op)


at_capture = comptime  # runs a function while dynamo captures the line, and only then (2.13)
_DECIDED = threading.local()  # the last decision of the thread that captures


def decided_at_capture(holds: torch.Tensor) -> bool:
    """True in captured code where `holds`, a single bool, is true for all inputs.

    False where it is false, or depends on an input or on random numbers. Its value is computed on
    the CPU while the step is captured (`comptime`, 2.13).
    """
    comptime(_decide)
    return bool(_decision())


def _decide(context: ComptimeContext) -> None:
    proxy: Any = context.get_local("holds").as_proxy()
    try:
        with without_modes(), torch.no_grad(), _RefuseChance():
            _DECIDED.holds = bool(_computed(proxy.node))
    except (_Undecided, RuntimeError):
        _DECIDED.holds = False


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _decision() -> bool:
    return bool(_DECIDED.holds)


class _Undecided(Exception):
    """The value depends on an input or on random numbers."""


class _RefuseChance(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _Undecided
        return func(*args, **(kwargs or {}))


def _computed(node: fx.Node) -> Any:
    """Returns the value of a node that depends on constants only."""
    if node.op not in ("call_function", "call_method"):
        raise _Undecided

    operands: Any = fx.node.map_arg((node.args, dict(node.kwargs)), _computed)
    args, kwargs = fx.node.map_aggregate(
        operands, lambda value: torch.device("cpu") if isinstance(value, torch.device) else value
    )
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def is_ddp_optimizer_on() -> bool:
    """True where dynamo cuts graphs inside of DDP at the borders of its buckets.

    It uses `get_optimize_ddp_mode` (2.13).
    """
    return torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"


_ASKING = frozenset({"isEnabledFor", "getEffectiveLevel", "hasHandlers", "getChild", "getChildren"})


def _logging_functions() -> set[Callable[..., Any]]:
    """Returns the functions that say something; a library may have added some to `Logger`."""
    public = {
        method
        for name, method in vars(logging.Logger).items()
        if callable(method) and not name.startswith("_") and name not in _ASKING
    }
    return public | {warnings.warn}


SIZE_CHECK: Any = torch.ops.aten._assert_scalar.default  # dynamo adds it where data decides a size


def is_decided_by_data(value: Any) -> bool:
    """True for a tensor whose shape is known only at run time, and for an int known only then.

    An int may be a size; a float can't, and is read again in each step (`free_unbacked_symbols`,
    2.13).
    """
    if isinstance(value, torch.Tensor):
        return not value.is_nested and any(map(is_decided_by_data, value.shape))
    return isinstance(value, torch.SymInt) and bool(free_unbacked_symbols(value))


def unwrap_failure(error: BaseException) -> BaseException:
    """Returns the error of a backend that dynamo wrapped (`BackendCompilerFailed`, 2.13)."""
    while isinstance(error, dynamo_exc.BackendCompilerFailed):
        error = error.inner_exception
    return error


def is_graph_break(error: BaseException) -> bool:
    """True where dynamo could not capture the step as one graph, or where data decides its path.

    These are `exc.Unsupported` and other errors of dynamo (2.13), and what its code does not catch.
    """
    if isinstance(unwrap_failure(error), GuardOnDataDependentSymNode) or is_compilers_own(error):
        return True
    return isinstance(error, dynamo_exc.TorchDynamoException) and not isinstance(
        error, dynamo_exc.BackendCompilerFailed
    )


def is_compilers_own(error: BaseException) -> bool:
    """True where code of torch's compiler failed, not the model nor an operator that it calls.

    From the inside out, the compiler's frames come before those of an operator's call or of code
    outside of torch (2.13: dynamo's, and the wrappers with which AOTAutograd runs a graph).
    Dynamo's own errors are about the model, except `InternalTorchDynamoError`.
    """
    if isinstance(error, dynamo_exc.TorchDynamoException):
        return isinstance(error, dynamo_exc.InternalTorchDynamoError)

    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    for file in reversed(files):
        if file.startswith(_CALLS) or not file.startswith(_TORCH):
            return False
        if file.startswith(_COMPILER):
            return True
    return False


def failure_text(error: BaseException) -> tuple[str, str]:
    """Returns what ended a capture, and where, as ` (file.py:12)`.

    Where the model itself fails on fake tensors (`TorchRuntimeError`, 2.13) or raises
    (`ObservedException`), these are that error and the model's line. Otherwise they are the first
    paragraph of dynamo's message, and the line in it or the last line outside of torch.
    """
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__ or cause

    if isinstance(error, dynamo_exc.TorchRuntimeError):
        places = [f for f in error.real_stack or () if not f.filename.startswith(_NOT_THE_MODEL)]
        place = f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""
        return f"{type(cause).__name__}: {cause}", place

    lines = re.findall(r'File "([^"]+)", line (\d+)', str(error)) or [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_NOT_THE_MODEL)
    ]
    place = f" ({Path(lines[-1][0]).name}:{lines[-1][1]})" if lines else ""

    if not isinstance(error, dynamo_exc.TorchDynamoException):
        return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}", place
    said = cause if isinstance(cause, dynamo_exc.ObservedException) else error
    return str(said).strip().split("\n\n")[0], place


class _SaidOnce(logging.Filter):
    """Drops torch's log of an error on fake tensors, since torch raises it as well (2.13)."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")


@contextmanager
def _failures_said_once() -> Iterator[None]:
    logger, said_once = logging.getLogger("torch._subclasses.fake_tensor"), _SaidOnce()
    logger.addFilter(said_once)
    try:
        yield
    finally:
        logger.removeFilter(said_once)


def compile_reason(module: fx.GraphModule) -> Any:
    """Returns why dynamo ended this graph (`compile_subgraph_reason`, 2.13)."""
    return getattr(module, "compile_subgraph_reason", None)
