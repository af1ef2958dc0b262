"""Each operator's memory in a plain step on the card, beside what a plan counts for it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from experiments.gpu import steps
from experiments.gpu.measuring import Facts, step
from experiments.gpu.steps import STEPS

_MOST_ROWS = 40


class _Taken(TorchDispatchMode):
    """Counts calls, bytes held afterwards and bytes held only during the call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = func(*args, **(kwargs or {}))
        after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()

        row = self.rows[str(func)]
        row[0] += 1
        row[1] += after - before
        row[2] = max(row[2], peak - max(before, after))

        return result


def compare(facts: Facts) -> None:
    """Writes the operators for which the plan's bytes differ from the card's."""
    for name in ("gpt2-medium, 12 layers, no dropout", "resnet50", "gpt2-medium"):
        with facts.section(section="operators", model=name):
            model, batch = STEPS[name](facts.place)
            step(model, model, batch, 0)
            model.zero_grad(set_to_none=True)
            with _Taken() as taken:
                step(model, model, batch, 0)

            steps.planned(model, "100%")
            step(model, model, batch, 0)
            graph = remat.report(model).graph

            counted: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
            for op in graph.operators:
                row = counted[op.target]
                row[0] += 1
                row[1] += sum(graph.values[v].size_bytes for v in op.writes)
                row[2] = max(row[2], op.workspace_bytes)

            rows = {
                target: {"card": taken.rows.get(target), "plan": counted.get(target)}
                for target in {*taken.rows, *counted}
                if taken.rows.get(target) != counted.get(target)
            }

            largest = sorted(rows, key=lambda t: -max(map(max, filter(None, rows[t].values()))))
            for target in largest[:_MOST_ROWS]:
                facts.say(section="operators", model=name, target=target, **rows[target])
