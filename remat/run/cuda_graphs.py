"""CUDA graphs: refuses what can't run while `torch.cuda.graph` captures the current stream.

Nothing may wait for the GPU then, nor read the state of its random generator. So a step has to be
captured by dynamo, planned and measured before, and may not replay random operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from remat.core.errors import TraceError


def is_graph_captured() -> bool:
    """True while the current stream is captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_new_step() -> None:
    """Raises `TraceError` during a capture, for a step that has to be planned."""
    if is_graph_captured():
        raise _new_step()


def refuse_first_steps() -> None:
    """Raises `TraceError` during a capture, for a step that is tuned or measured."""
    if is_graph_captured():
        raise TraceError(
            "torch.cuda.graph can't capture the first steps of a plan, which remat measures: "
            + _WARM_UP
        )


def refuse_random_replay() -> None:
    """Raises `TraceError` during a capture, where the generator's state is read."""
    if is_graph_captured():
        raise TraceError(
            "torch.cuda.graph can't capture this planned step: it computes random operators "
            "again, from states of the generator that can't be read during a capture; use "
            'executor="inductor", which computes them again from saved seeds, without '
            'on_unsupported="plain"'
        )


@contextmanager
def only_known_steps() -> Iterator[None]:
    """Raises `TraceError` where dynamo would compile a new step during a capture."""
    if not is_graph_captured():
        yield
        return

    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            yield
    except RuntimeError as error:
        if "fail_on_recompile" not in str(error):
            raise
        raise _new_step() from None


_WARM_UP = (
    "run the step at least three times before the capture, forward and backward, with the same "
    "shapes and with gradients as in the capture (None, or accumulated)"
)


def _new_step() -> TraceError:
    return TraceError(
        f"torch.cuda.graph can't capture a step that remat still has to plan: {_WARM_UP}"
    )
