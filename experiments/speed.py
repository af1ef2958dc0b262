"""How fast the pieces are: the simulator, and running a step operator by operator.

    python -m experiments.speed [--output FILE]

1. `simulate` on random training graphs of 2,001 and 10,001 operators with a tenth computed twice:
   median time per call.
2. One operator called through `torch.ops` and through torch's own binding: the time that
   `remat.run.bindings` saves.
3. A whole step at 100 % against the plain step, alternating: the median of the pairs' ratios, from
   a tiny model to a larger one. CPU time of one thread, which other programs on the machine disturb
   least.
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

import remat
from experiments.command_line import parser_of
from experiments.environment import environment
from experiments.models import GPT
from remat.core.schedule import Schedule, simulate
from remat.solvers.core.on_demand import forward_length
from remat.tracers.synthetic import random_layered

RESULTS = Path(__file__).parent / "results" / "speed.json"
SEED = 0


def median_s(
    fn: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.process_time
) -> float:
    """Returns the median time of a call."""
    times = []
    for _ in range(repeats):
        start = clock()
        fn()
        times.append(clock() - start)
    return statistics.median(times)


def simulator() -> list[dict[str, float]]:
    """Returns the time of a simulation by number of operators."""
    rows = []
    for count in (1_000, 5_000):
        graph = random_layered(count, seed=SEED, is_training=True)
        boundary = forward_length(graph)
        steps = [*range(boundary), *range(0, boundary, 5), *range(boundary, graph.num_operators)]
        schedule = Schedule.from_steps(graph, steps)
        simulate(graph, schedule)  # fills the graph's arrays

        rows.append(
            {
                "operators": graph.num_operators,
                "steps": len(steps),
                "s": median_s(lambda g=graph, s=schedule: simulate(g, s), 15),  # type: ignore[misc]
            }
        )

    return rows


def bindings() -> list[dict[str, Any]]:
    """Returns microseconds per call through the operator and through torch's binding."""
    a, b, aten = torch.randn(8, 8), torch.randn(8, 8), torch.ops.aten
    cases: list[tuple[str, Any, Any, tuple[Any, ...]]] = [
        ("mm", aten.mm.default, torch.mm, (a, b)),
        ("add", aten.add.Tensor, torch.add, (a, b)),
        ("view", aten.view.default, torch.Tensor.view, (a, [4, 16])),
        ("transpose", aten.transpose.int, torch.transpose, (a, 0, 1)),
        (
            "native_layer_norm",
            aten.native_layer_norm.default,
            torch.native_layer_norm,
            (a, [8], a[0], a[1], 1e-5),
        ),
    ]

    rows = []
    with torch.no_grad():
        for name, op, binding, args in cases:
            times = {}
            for way, call in (("operator_us", op), ("binding_us", binding)):
                times[way] = (
                    1e6
                    / 2000
                    * median_s(lambda call=call, args=args: [call(*args) for _ in range(2000)], 7)  # type: ignore[misc]
                )

            rows.append({"name": name, **times})

    return rows


def step_ratios() -> list[dict[str, float]]:
    """Returns step times relative to plain PyTorch's, with everything kept, by model size."""
    rows = []
    for num_layers, width, batch, tokens in ((2, 32, 1, 16), (6, 128, 4, 128), (6, 256, 4, 256)):
        torch.manual_seed(SEED)
        torch._dynamo.reset()

        plain = GPT(num_layers=num_layers, width=width)
        model = remat.checkpoint(copy.deepcopy(plain), "100%")
        ids = torch.randint(0, 256, (batch, tokens))

        pairs = []
        for step in range(14):
            pair = []
            for one in (model, plain):
                one.zero_grad(set_to_none=True)
                start = time.process_time()
                one(ids=ids).backward()
                pair.append(time.process_time() - start)

            if step >= 3:
                pairs.append(pair)

        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        rows.append(
            {
                "layers": num_layers,
                "width": width,
                "plain_s": statistics.median(p for _, p in pairs),
                "ratio": ratio,
            }
        )

    return rows


def main() -> None:
    """Runs everything on one thread, prints the rows and writes them."""
    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS)
    output = parser.parse_args().output

    torch.set_num_threads(1)
    record: dict[str, Any] = {"environment": environment(seed=SEED)}

    for name, part in (("simulator", simulator), ("bindings", bindings), ("step", step_ratios)):
        record[name] = part()
        for row in record[name]:
            print(
                name,
                {
                    key: round(value, 6) if isinstance(value, float) else value
                    for key, value in row.items()
                },
            )

    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
