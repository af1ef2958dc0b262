"""What a new length costs: a capture, or a symbolic capture that is made concrete.

    python -m experiments.new_lengths [--output FILE]

Measures for each model, in CPU time of the process, with everything captured on fake tensors:

1. *a capture*: dynamo and AOTAutograd with fixed sizes, as `remat.checkpoint` does for each length.
2. *symbolic*: the same once, with a symbol for the length.
3. *made concrete*: the symbolic joint graph, run on fake tensors of one length: a plan needs the
   sizes of everything that the step makes.

It also checks whether the symbolic graph could replace the concrete ones: at how many lengths its
gradients equal those of plain PyTorch to the bit, and how many captures dynamo made for these.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from functorch.compile import default_partition, make_boxed_func  # type: ignore[import-untyped]
from torch import fx, nn

from experiments.command_line import parser_of
from experiments.environment import environment
from experiments.models import GPT
from remat.face.capturing import captured_step
from remat.run.plain_kernels import plain_kernels
from remat.torch_border.autograd import aot_autograd, backward_without_autocast
from remat.torch_border.kernels import FakeTensorMode

RESULTS = Path(__file__).parent / "results" / "new_lengths.json"
SEED = 0
LENGTHS = (48, 40, 56, 33)
LAYERS, WIDTH, BATCH, VOCABULARY = 3, 96, 4, 512


class Encoder(nn.Module):
    """Torch's own encoder layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = [
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, batch_first=True)
            for _ in range(LAYERS)
        ]
        self.table, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*layer)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a batch of texts."""
        logits = self.head(self.layers(self.table(tokens[:, :-1]))).flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


class Signals(nn.Module):
    """A convolutional network over signals of any length."""

    def __init__(self) -> None:
        super().__init__()
        parts = [
            part
            for _ in range(LAYERS)
            for part in (
                nn.Conv1d(WIDTH, WIDTH, 5, padding=2), nn.BatchNorm1d(WIDTH), nn.GELU(),
                nn.Dropout(0.1),
            )
        ]  # fmt: skip

        self.table, self.body = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*parts)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns a loss."""
        return self.body(self.table(tokens).transpose(1, 2)).square().mean()  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """The experiments' GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(num_layers=LAYERS, width=WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a batch of texts."""
        return self.gpt(tokens)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {"encoder": Encoder, "signals": Signals, "gpt": Gpt}


def tokens_of(length: int) -> torch.Tensor:
    """Returns a batch of this length."""
    return torch.randint(
        VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(length)
    )


def cpu_s(call: Callable[[], Any]) -> float:
    """Returns the CPU seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def capture_s(model: nn.Module, length: int) -> float:
    """Returns the CPU seconds of one capture with fixed sizes."""
    torch._dynamo.reset()
    return cpu_s(
        lambda: captured_step(model, (tokens_of(length),), {}, costs="flops", differentiate="all")
    )


class Symbolic:
    """A model captured with a symbol for its length, run without recomputing anything."""

    def __init__(self, model: nn.Module) -> None:
        torch._dynamo.reset()
        self.joints: list[fx.GraphModule] = []
        self.run = torch.compile(model, backend=self._backend, dynamic=True, fullgraph=True)

    def _backend(self, module: fx.GraphModule, inputs: Any) -> Any:
        def partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
            self.joints.append(copy.deepcopy(joint))
            return default_partition(joint, joint_inputs, **options)

        with backward_without_autocast(), plain_kernels():
            compile_with: Any = aot_autograd(
                fw_compiler=lambda graph, _: make_boxed_func(graph),
                bw_compiler=lambda graph, _: make_boxed_func(graph),
                partition_fn=partition,
                keep_inference_input_mutations=True,
            )
            return compile_with(module, inputs)

    def concrete_s(self, length: int) -> float:
        """Returns the CPU seconds of running the joint graph on fake tensors of one length."""
        joint, known = self.joints[0], _hints(self.joints[0])
        sizes = {hint: length if hint == LENGTHS[0] else hint for hint in known}

        with FakeTensorMode(), torch.no_grad():
            inputs = [
                _concrete(node.meta["val"], sizes)
                for node in joint.graph.find_nodes(op="placeholder")
            ]
            return cpu_s(lambda: fx.Interpreter(joint).run(*inputs, enable_io_processing=False))


def _hints(joint: fx.GraphModule) -> set[int]:
    values = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    return {int(n.node.hint) for value in values for n in _symbols(value)}


def _symbols(value: Any) -> list[torch.SymInt]:
    items = [value] if isinstance(value, torch.SymInt) else list(getattr(value, "shape", ()))
    return [item for item in items if isinstance(item, torch.SymInt)]


def _concrete(value: Any, sizes: dict[int, int]) -> Any:
    def size_of(item: Any) -> int:
        return (
            sizes.get(hint := int(item.node.hint), hint) if isinstance(item, torch.SymInt) else item
        )

    if isinstance(value, torch.Tensor):
        shape = tuple(map(size_of, value.shape))
        return torch.empty(shape, dtype=value.dtype, requires_grad=False)
    return size_of(value)


def gradients_of(model: nn.Module, run: Callable[..., Any], length: int) -> list[torch.Tensor]:
    """Returns the gradients of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(length)
    run(tokens_of(length)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def measure(make: Callable[[], nn.Module]) -> dict[str, Any]:
    """Returns one model's figures."""
    torch.manual_seed(SEED)
    model = make()
    captures = [capture_s(model, length) for length in LENGTHS]

    symbolic = Symbolic(model)
    symbolic_s = cpu_s(lambda: gradients_of(model, symbolic.run, LENGTHS[0]))
    equal = [
        all(map(torch.equal, gradients_of(model, model, n), gradients_of(model, symbolic.run, n)))
        for n in LENGTHS
    ]
    concrete = [symbolic.concrete_s(length) for length in LENGTHS[1:]]

    return {
        "nodes": len(symbolic.joints[0].graph.nodes),
        "capture_s": statistics.median(captures[1:]),
        "symbolic_s": symbolic_s,
        "concrete_s": statistics.median(concrete),
        "equal_lengths": sum(equal),
        "lengths": len(LENGTHS),
        "symbolic_captures": len(symbolic.joints),
    }


def main() -> None:
    """Runs everything on one thread, prints the rows and writes them."""
    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS)
    output = parser.parse_args().output

    torch.set_num_threads(1)
    record: dict[str, Any] = {"environment": environment(seed=SEED), "models": {}}

    for name, make in MODELS.items():
        record["models"][name] = measure(make)
        print(name, record["models"][name])

    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
