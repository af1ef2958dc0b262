"""Predicted against measured on a CUDA device.

Peaks, step times, and what others need at the same budgets.

    python -m experiments.gpu_validation [--models gpt2-medium resnet50] [--output FILE]

GPT-2 medium and ResNet-50 in bf16, at 100, 80, 60 and 40 % of what keeping everything needs: the
peak that `torch.cuda.max_memory_allocated` shows against the predicted one, the step time against
the predicted one, beside plain PyTorch, `torch.utils.checkpoint` a block, and `torch.compile` with
`activation_memory_budget`. Writes JSON with hardware and versions; needs a CUDA device, and says
so.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpoint_block

import remat
from experiments.environment import environment

RESULTS = Path(__file__).parent / "results" / "gpu_validation.json"
BUDGETS = ("100%", "80%", "60%", "40%")
MEMORY_BUDGETS = (1.0, 0.7, 0.4, 0.1, 0.0)
STEPS = 12
SEED = 0

Case = tuple[nn.Module, dict[str, torch.Tensor]]


def gpt2_medium(device: str) -> Case:
    """GPT-2 medium, 8 sequences of 512 tokens, dropout on."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=24, n_embd=1024, n_head=16, use_cache=False)
    ids = torch.randint(0, config.vocab_size, (8, 512), device=device)
    model: nn.Module = GPT2LMHeadModel(config)
    return model.to(device, torch.bfloat16).train(), {"input_ids": ids, "labels": ids}


def resnet50(device: str) -> Case:
    """ResNet-50, 64 images of 224 x 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model: nn.Module = ResNetForImageClassification(ResNetConfig())
    images = torch.randn(64, 3, 224, 224, device=device, dtype=torch.bfloat16)
    return model.to(device, torch.bfloat16).train(), {
        "pixel_values": images,
        "labels": torch.randint(0, 2, (64,), device=device),
    }


MODELS: dict[str, Callable[[str], Case]] = {"gpt2-medium": gpt2_medium, "resnet50": resnet50}


def measure_steps(
    model: Callable[..., Any], owner: nn.Module, batch: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Returns the peak bytes of the device and the median step time over some steps, after two for
    warming up.
    """
    times: list[float] = []
    for step in range(STEPS + 2):
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(SEED + step)
        owner.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = model(**batch)
        result.loss.backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        del result
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "step_s": statistics.median(times[2:])}


def first_gradients(
    model: Callable[..., Any], owner: nn.Module, batch: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the gradients of one step from a fixed seed."""
    owner.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    model(**batch).loss.backward()
    return [p.grad.detach().float().cpu() for p in owner.parameters() if p.grad is not None]


def largest_difference(found: list[torch.Tensor], plain: list[torch.Tensor]) -> float:
    """Returns the largest difference of gradients, relative to the largest plain gradient."""
    scale = max(g.abs().max().item() for g in plain)
    return max((a - b).abs().max().item() for a, b in zip(found, plain, strict=True)) / scale


def checkpoint_blocks(model: nn.Module) -> None:
    """Puts `torch.utils.checkpoint` around every block, as users write it."""
    if hasattr(model, "transformer"):
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return
    for stage in model.resnet.encoder.stages:  # type: ignore[union-attr]
        for block in stage.layers:
            plain = block.forward
            block.forward = lambda x, plain=plain: checkpoint_block(plain, x, use_reentrant=False)


def run_model(name: str, device: str) -> list[dict[str, Any]]:
    """Returns one record for every way of running the model."""
    rows: list[dict[str, Any]] = []

    def fresh() -> Case:
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        torch.manual_seed(SEED)
        return MODELS[name](device)

    def add(way: str, make: Callable[[nn.Module], Callable[..., Any]], **more: Any) -> None:
        try:
            model, batch = fresh()
            call = make(model)
            gradients = first_gradients(call, model, batch)
            row = {"model": name, "way": way, **more, **measure_steps(call, model, batch)}
            row["gradient_difference"] = largest_difference(gradients, plain) if plain else 0.0
            if way.startswith("remat"):
                told = remat.report(model).solution
                row |= {
                    "budget_bytes": told.budget_bytes,
                    "predicted_peak_bytes": told.peak_bytes,
                    "predicted_step_s": told.cost_s,
                }
                row |= {"overhead": told.overhead, "gap": told.gap, "planned_s": told.wall_s}
        except (RuntimeError, remat.RematError, ValueError) as error:
            row = {
                "model": name,
                "way": way,
                **more,
                "error": f"{type(error).__name__}: {error}"[:500],
            }
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)

    plain: list[torch.Tensor] = []
    model, batch = fresh()
    plain = first_gradients(model, model, batch)
    del model, batch
    add("plain", lambda model: model)

    def blocks(model: nn.Module) -> nn.Module:
        checkpoint_blocks(model)
        return model

    add("torch.utils.checkpoint a block", blocks)
    for budget in BUDGETS:

        def planned(model: nn.Module, budget: str = budget) -> nn.Module:
            return remat.checkpoint(model, budget, costs="profile")

        add(f"remat {budget}", planned)
    for share in MEMORY_BUDGETS:

        def inductor(model: nn.Module, share: float = share) -> Callable[..., Any]:
            torch._functorch.config.activation_memory_budget = share
            return torch.compile(model)

        add(f"activation_memory_budget {share}", inductor)
    torch._functorch.config.activation_memory_budget = 1.0
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Prints one table a model."""
    for name in dict.fromkeys(row["model"] for row in rows):
        table = Table(title=name)
        for heading in (
            "way",
            "predicted MiB",
            "measured MiB",
            "predicted ms",
            "measured ms",
            "gradients off by",
        ):
            table.add_column(heading, justify="right")
        for row in (row for row in rows if row["model"] == name):
            if "error" in row:
                table.add_row(row["way"], row["error"][:60])
                continue
            predicted = (
                f"{row['predicted_peak_bytes'] / 2**20:.0f}"
                if "predicted_peak_bytes" in row
                else ""
            )
            step = f"{1000 * row['predicted_step_s']:.1f}" if "predicted_step_s" in row else ""
            measured = (
                f"{row['peak_bytes'] / 2**20:.0f}",
                step,
                f"{1000 * row['step_s']:.1f}",
                f"{row['gradient_difference']:.2g}",
            )
            table.add_row(row["way"], predicted, *measured)
        Console(width=110).print(table)


def main() -> int:
    """Runs what is asked for; exit status 2 where there is no CUDA device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "gpu_validation needs a CUDA device, and torch sees none here; run it on a "
            "machine that has one",
            file=sys.stderr,
        )
        return 2
    rows = [row for name in options.models for row in run_model(name, "cuda")]
    show(rows)
    record = {
        "environment": environment(seed=SEED),
        "device": torch.cuda.get_device_name(),
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
