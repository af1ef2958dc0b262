"""Steps that `torch.cuda.graph` can't capture say why; there is no GPU, so it only seems to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import remat
from remat.pieces.step_meter import StepMeter
from remat.run.cuda_graphs import only_known_steps
from remat.run.measure import FirstStepMeter
from remat.run.random_state import replay, take_state
from tests.support import broken_steps
from tests.support.allocator import Allocator
from tests.support.planned import Net, batch, keep_nothing, loss_of, planned

pytestmark = pytest.mark.usefixtures("fresh_torch", "quick_first_step")


@contextmanager
def captured() -> Iterator[None]:
    """A part of a test in which the current stream seems to be captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


@contextmanager
def refused(why: str) -> Iterator[None]:
    """A captured part that is refused."""
    with captured(), pytest.raises(remat.TraceError, match=f"torch.cuda.graph can't .*{why}"):
        yield


def in_pieces() -> torch.nn.Module:
    return planned(broken_steps.Broken(), keep_nothing)


@pytest.mark.parametrize(
    ("model", "batches", "num_first"),
    [
        (lambda: planned(Net()), (batch(4), batch(6)), 1),
        (in_pieces, (broken_steps.batch(0), broken_steps.batch(0)[:2]), 2),
    ],
    ids=["whole", "in pieces"],
)
def test_only_known_steps_are_captured(
    model: Callable[[], torch.nn.Module],
    batches: tuple[torch.Tensor, torch.Tensor],
    num_first: int,
) -> None:
    """Naive: torch fails within dynamo, at the state of the generator."""
    module, (known, new) = model(), batches
    with refused("has to plan: run the step at least three times"):
        module(known)
    for _ in range(num_first):
        module.zero_grad()
        loss_of(module(known)).backward()

    module.zero_grad()
    with captured():
        loss_of(module(known)).backward()
    with refused("has to plan"):
        module(known)  # with gradients of the last step
    module.zero_grad()
    with refused("has to plan"):
        module(new)
    loss_of(module(known)).backward()


def test_another_failure_stays_as_it_is() -> None:
    with captured(), pytest.raises(RuntimeError, match="of the model"), only_known_steps():
        raise RuntimeError("of the model")


@pytest.mark.parametrize("num_unmeasured", [0, 1])
def test_measured_steps_are_refused(num_unmeasured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: the measurement waits for the GPU, which ends the capture with torch's own error."""
    allocator, saved = Allocator().install(monkeypatch), torch.ones(3)
    whole = FirstStepMeter("cuda", 0, 1, num_unmeasured=num_unmeasured)
    pieces = StepMeter("cuda", 0, num_unmeasured=num_unmeasured)
    with refused("first steps of a plan"):
        whole.forward(lambda args: args)([torch.ones(2)])
    with refused("first steps of a plan"):
        pieces.forward(lambda: None, ())
    assert not allocator.calls

    if not num_unmeasured:
        whole.forward(lambda args: [saved.sum(), saved])([torch.ones(2)])
        with refused("first steps of a plan"):
            whole.backward(lambda args: [])([saved])


def test_random_operators_are_not_computed_again() -> None:
    """Naive: torch asserts that no stream is captured when the generator's state is read."""
    device = torch.device("cuda", 0)
    state = take_state(torch.device("cpu"))
    with refused("random operators again"):
        take_state(device)
    with refused("random operators again"):
        replay(torch.ops.aten.bernoulli.default, state, device, torch.ones(2))
    with captured():
        take_state(torch.device("cpu"))
