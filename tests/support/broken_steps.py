"""Steps that `torch.compile` cuts into pieces in different ways, and what each leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import remat
from remat.pieces.runner import Piecewise
from tests.support import planned
from tests.support.planned import assert_same, call_of, loss_of

WIDTH, ROWS = 16, 256


class Block(nn.Module):
    """Dropout, batch norm, and several operators that are cheap to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.norm = (
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.2),
            nn.BatchNorm1d(WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        out: torch.Tensor = self.norm(x + self.dropout(hidden.sin() * hidden))
        return out


class Base(nn.Module):
    num_blocks = 4

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(self.num_blocks))
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[float] = []

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x).pow(2).mean()
        return out


class Broken(Base):
    num_blocks = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x = self.blocks[1](x)
        torch._dynamo.graph_break()
        return self.loss(self.blocks[2](x))


class Halves(Base):
    """The shortest step in pieces; not among `MODELS`."""

    num_blocks = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.loss(self.blocks[1](x))


class Prints(Base):
    """Reads numbers off tensors.

    Python's own state changes at every step, and dynamo compiles anew.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        self.seen.append(x.abs().max().item())
        sys.stdout.write(f"{self.seen[-1]:.3f}")
        return self.loss(self.blocks[1](x))


class Loop(Base):
    """A break within a loop: dynamo gives up on the frame, whose other operators run eagerly.

    Blocks share their compiled code.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
            self.seen.append(float(x.detach().sum()))
        return self.loss(x.sin())


class InPlace(Base):
    """A piece and an eager operator change what earlier pieces returned and read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        moved = (x + self.head.weight.sum()).sin()
        torch._dynamo.graph_break()

        x.mul_(0.5)
        x[:3] = 0
        torch._dynamo.graph_break()

        x = self.blocks[1](x + moved)
        torch.compiler.disable(x.mul_)(2.0)
        return self.loss(self.blocks[2](x))


class Buffer(Base):
    """A buffer that one piece reads and a later one changes."""

    count: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.blocks[0](x) + self.count).sin()
        torch._dynamo.graph_break()
        self.count.mul_(3).add_(1)
        torch._dynamo.graph_break()
        return self.loss(self.blocks[1](x) * self.count)


class Skips(Base):
    """Two pieces read what a third made: its gradient is a sum.

    Two pieces also read the same parameters.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        torch._dynamo.graph_break()
        second = self.blocks[1](first.sin())
        torch._dynamo.graph_break()
        return self.loss(self.blocks[0](second + first))


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(self.look)

    def look(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        torch._dynamo.graph_break()
        self.seen.append(out.detach().sum().item())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.blocks[2](self.blocks[1](self.blocks[0](x))))


class Random(Base):
    """Random numbers in several pieces, among them a scalar.

    The backward of one piece computes nothing.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        scale = torch.rand(())
        torch._dynamo.graph_break()
        x = x + torch.randn_like(x)
        torch._dynamo.graph_break()
        return self.loss(self.blocks[1](x * scale))


class Views(Base):
    """Eager operators slice a piece's result, save a tensor, and hold a large temporary."""

    num_blocks = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        part = torch.compiler.disable(
            lambda t: (t[1:] * 2).exp() + torch.stack([t[1:].detach()] * 10).mean(0)
        )(x)
        return self.loss(self.blocks[1](part))


class ViewAfterwards(Base):
    """A piece reads what it was given, and later a view of it; then eager code changes it.

    So the piece copies it, and a sum in between must not overwrite the copy.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        moved = (x + self.head.weight.sum()).exp()
        part = (x[1:] * 0.5).sin()
        torch._dynamo.graph_break()

        x.detach().mul_(0.5)
        return self.loss(self.blocks[1](part)) + moved.mean()


class Branches(Base):
    """The data decides which block runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks[0](x)
        hidden = self.blocks[1](hidden) if x[0, 0] > 0 else self.blocks[2](hidden)
        return self.loss(self.blocks[3](hidden))


class ChangesOnOneBranch(Base):
    """One of two branches changes what the first piece made and saved.

    Naive: only what changed in the step before is copied.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.blocks[0](x)
        seen = (total * 2).exp().sin()
        if x[0, 0] > 0:
            total += x.detach()
        return self.loss(total * 3 + seen)


class ManyResults(Base):
    """Returns a loss and an earlier piece's result, which gets no gradient of its own."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.blocks[0](x)
        torch._dynamo.graph_break()
        logits = self.head(self.blocks[1](hidden))
        return {"loss": logits.pow(2).mean(), "logits": logits, "hidden": hidden}


class Checked(Base):
    """A factor that is checked before the break: the check is an effect, with an order."""

    num_blocks = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        factor = torch.linalg.cholesky(x.mT @ x / ROWS + torch.eye(WIDTH))
        torch._dynamo.graph_break()
        determinant: torch.Tensor = factor.diagonal().log().sum()
        return self.loss(self.blocks[1](x)) + determinant


class Unused(Base):
    """A block whose only result the loss does not need.

    Its gradients are None, not zeros.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x, unused = self.blocks[1](x), self.blocks[2](x)
        torch._dynamo.graph_break()
        self.seen.append(unused.sum().item())
        return self.loss(x)


MODELS: dict[str, Callable[[], Base]] = {
    m.__name__: m
    for m in (
        Broken,
        Prints,
        Loop,
        InPlace,
        Buffer,
        Skips,
        Hooked,
        Random,
        Views,
        ViewAfterwards,
        Checked,
        Unused,
        Branches,
        ChangesOnOneBranch,
        ManyResults,
    )
}


def batch(seed: int) -> torch.Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    x[0, 0] = 1.0 if seed % 2 else -1.0
    return x


def state_after(model: nn.Module, x: torch.Tensor, seed: int) -> list[Any]:
    """Everything a step leaves, and the gradient of its input."""
    x = x.clone().requires_grad_()
    states = planned.state_after(model, x, seed=seed)
    assert x.grad is not None
    return [*states, x.grad]


def assert_same_states(model: nn.Module, plain: nn.Module, seed: int = 0) -> None:
    assert_same(state_after(model, batch(seed), seed), state_after(plain, batch(seed), seed))


def runner_of(model: nn.Module) -> Piecewise:
    runner = call_of(model).piecewise
    assert runner is not None
    return runner


def peak_of_a_step(
    model: nn.Module, x: torch.Tensor, loss: Callable[[Any], torch.Tensor] = loss_of
) -> int:
    """The peak of a step, measured from outside, including what is held before it."""
    model.zero_grad()
    held = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers(), x))
    return remat.measure(lambda: loss(model(x)).backward(), device="cpu").peak_bytes + held
