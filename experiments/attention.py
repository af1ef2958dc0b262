"""Attention written out, tiled with an online softmax, and in PyTorch's fused kernel.

    python -m experiments.attention [--longest T] [--redraw]

Softmax(Q K' / sqrt(d)) V for 4 heads of 64, one sequence of T tokens, float32, forward and backward
on this machine's CPU, one thread.

*Tiled* is FlashAttention's algorithm (Dao et al., 2022, arXiv:2205.14135, algorithms 1 and 4;
Milakov and Gimelshein, 2018, for the online softmax) written out in PyTorch: tiles of keys, a
running maximum and sum, and a backward that computes each tile again from the row's log-sum-exp. It
keeps T d numbers where the written-out form keeps T x T. Its error against float64 is compared with
that of the written-out form, in units of the last place of the largest entry.

*What remains*: the bytes that a GPT layer keeps for the backward, with attention written out and
fused, from traces. Without the T x T matrices, what is left to rematerialize grows linearly with T.

Writes `results/attention.json` and `.png`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import remat
from experiments.figures import arguments, draw, legend_below, read, table, titled, write
from experiments.transformer_arithmetic import kept_bytes, traced
from remat.core.schedule import Schedule
from remat.look.plot_style import BLUE, GREY, INK, ORANGE, new_figure, quiet

SEED = 0
HEADS, WIDTH, TILE = 4, 64, 128
SHORTEST = 128
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention by its formula; (heads, tokens, width) in and out."""
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v


class Tiled(torch.autograd.Function):
    """Attention over tiles of keys: nothing of size T x T ever exists."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Computes the output with a running maximum and sum.

        Keeps the log-sum-exp of each row for the backward.
        """
        scale = q.shape[-1] ** -0.5
        out, total = torch.zeros_like(q), q.new_zeros(*q.shape[:-1], 1)
        highest = q.new_full((*q.shape[:-1], 1), -torch.inf)

        for keys, values in zip(k.split(TILE, 1), v.split(TILE, 1), strict=True):
            scores = q @ keys.transpose(-1, -2) * scale
            new = torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights, shrink = torch.exp(scores - new), torch.exp(highest - new)
            out, total, highest = (
                out * shrink + weights @ values,
                total * shrink + weights.sum(-1, keepdim=True),
                new,
            )

        out = out / total
        ctx.save_for_backward(q, k, v, out, highest + torch.log(total))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Computes each tile's weights again from the log-sum-exp, and from them the gradients."""
        (gradient,) = gradients
        q, k, v, out, log_sum = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5

        along = (gradient * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), [], []

        for keys, values in zip(k.split(TILE, 1), v.split(TILE, 1), strict=True):
            weights = torch.exp(q @ keys.transpose(-1, -2) * scale - log_sum)
            dv.append(weights.transpose(-1, -2) @ gradient)
            scores = weights * (gradient @ values.transpose(-1, -2) - along) * scale
            dq += scores @ keys
            dk.append(scores.transpose(-1, -2) @ q)

        return dq, torch.cat(dk, 1), torch.cat(dv, 1)


def tiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over tiles; (heads, tokens, width) in and out."""
    result: torch.Tensor = Tiled.apply(q, k, v)  # type: ignore[no-untyped-call]
    return result


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's kernel; (heads, tokens, width) in and out."""
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


WAYS: dict[str, Attention] = {
    "written out": written_out,
    "tiled, online softmax": tiled,
    "scaled_dot_product_attention": fused,
}


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Returns queries, keys and values from the fixed seed."""
    torch.manual_seed(SEED)
    return [
        torch.randn(HEADS, tokens, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()
        for _ in range(3)
    ]


def results(way: Attention, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the output and the three gradients, as float64."""
    leaves = inputs(tokens, dtype)
    out = way(*leaves)
    (out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)).sum().backward()
    return [
        out.detach().double(),
        *(leaf.grad.double() for leaf in leaves if leaf.grad is not None),
    ]


def error_ulp(way: Attention, tokens: int) -> float:
    """Returns the largest error against float64, in ulps of each result's largest entry."""
    pairs = zip(
        results(way, tokens, torch.float32),
        results(written_out, tokens, torch.float64),
        strict=True,
    )

    return max(
        ((a - b).abs().max() / (torch.finfo(torch.float32).eps * b.abs().max())).item()
        for a, b in pairs
    )


def measured(longest: int) -> Iterator[dict[str, Any]]:
    """Yields peak, time and error of each way at each length."""
    tokens = SHORTEST
    while tokens <= longest:
        for name, way in WAYS.items():
            leaves = inputs(tokens)

            def step(way: Attention = way, leaves: list[torch.Tensor] = leaves) -> None:
                for leaf in leaves:
                    leaf.grad = None
                way(*leaves).sum().backward()

            step()
            times = []

            for _ in range(5):
                start = time.process_time()
                step()
                times.append(time.process_time() - start)

            for leaf in leaves:
                leaf.grad = None
            peak = remat.measure(step, device="cpu").peak_bytes

            row = {
                "tokens": tokens,
                "way": name,
                "peak_bytes": peak,
                "step_s": statistics.median(times),
                "error_ulp": error_ulp(way, tokens),
            }

            print(row, flush=True)
            yield row

        tokens *= 2


def remaining() -> Iterator[dict[str, Any]]:
    """Yields the bytes that a layer keeps for the backward, per length and attention."""
    for tokens in (128, 256, 512, 1024):
        for is_fused in (False, True):
            shape: dict[str, Any] = {
                "width": 256,
                "num_heads": 4,
                "vocabulary": 1000,
                "dropout": 0.0,
            }

            pair = [
                traced(tokens, 4, is_fused=is_fused, num_layers=layers, **shape)
                for layers in (2, 3)
            ]

            two, three = (
                sum(
                    kept_bytes(
                        graph, Schedule.keep_all(graph), tokens=tokens, matrices=16, vocabulary=1000
                    ).values()
                )
                for graph in pair
            )

            yield {
                "tokens": tokens,
                "attention": "fused" if is_fused else "written out",
                "layer_bytes": three - two,
            }


def crossing(rows: list[dict[str, Any]], field: str) -> float | None:
    """Returns the length above which tiled attention takes less than the written-out form.

    It is interpolated between the measured lengths on log axes; None if tiled attention still
    takes more at the longest.
    """
    written, tiles = (
        {row["tokens"]: row[field] for row in rows if row["way"] == way}
        for way in ("written out", "tiled, online softmax")
    )

    tokens = sorted(written)
    above = [math.log(tiles[t] / written[t]) for t in tokens]  # positive where tiles take more
    last = max((i for i, height in enumerate(above) if height >= 0), default=-1)

    if last == len(tokens) - 1:
        return None
    if last < 0:
        return float(tokens[0])

    share = above[last] / (above[last] - above[last + 1])
    return float(tokens[last] * (tokens[last + 1] / tokens[last]) ** share)


def picture(record: Mapping[str, Any]) -> None:
    """Draws memory, time, and what remains."""
    rows, kept = record["rows"], record["remaining"]
    figure = new_figure(
        "Attention: written out, tiled and fused (CPU, one thread; 4 heads of 64, forward and "
        "backward)",
        width=14,
        height=4.8,
    )

    left, middle, right = figure.subplots(1, 3)
    panels = (
        (left, "peak_bytes", 2**20, "memory of the step (MiB)", "less memory"),
        (middle, "step_s", 1e-3, "CPU time (ms)", "less time"),
    )
    for axes, field, unit, label, what in panels:
        quiet(axes, x_label="tokens T", y_label=label, grid="both")
        _draw_measured(axes, rows, field, unit)
        _mark_crossing(axes, record["crossover_tokens"][field], what)

    _draw_slope(left, rows)
    _draw_remaining(right, kept)

    legend_below(figure, [left, middle, right])
    draw("attention", figure)


def _draw_measured(axes: Any, rows: list[dict[str, Any]], field: str, unit: float) -> None:
    for (name, _), colour in zip(WAYS.items(), (ORANGE, "#7b4fa3", BLUE), strict=True):
        mine = [row for row in rows if row["way"] == name]
        axes.loglog(
            [row["tokens"] for row in mine],
            [row[field] / unit for row in mine],
            "o-",
            color=colour,
            label=name,
        )

    ticks = sorted({row["tokens"] for row in rows})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    axes.minorticks_off()


def _mark_crossing(axes: Any, at: float | None, what: str) -> None:
    if not at:
        titled(axes, "tiled: no crossover")
        return

    titled(axes, f"tiled takes {what} than written out from T = {at:,.0f}")
    axes.axvline(at, color=INK, linewidth=1, linestyle=(0, (2, 2)))


def _draw_slope(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws what grows as T squared and ends where the written-out form does."""
    ends = [row for row in rows if row["way"] == "written out"]
    x = np.array([ends[0]["tokens"], ends[-1]["tokens"]])
    axes.plot(
        x,
        ends[-1]["peak_bytes"] / 2**20 * (x / x[-1]) ** 2,
        ":",
        color=GREY,
        label="slope of T squared",
    )


def _draw_remaining(axes: Any, kept: list[dict[str, Any]]) -> None:
    quiet(axes, x_label="tokens T", y_label="kept for the backward per GPT layer (MiB)")
    lengths = sorted({row["tokens"] for row in kept})

    for place, (kind, colour) in enumerate((("written out", ORANGE), ("fused", BLUE))):
        heights = [row["layer_bytes"] / 2**20 for row in kept if row["attention"] == kind]
        bars = axes.bar(
            np.arange(len(lengths)) + 0.4 * (place - 0.5),
            heights,
            0.38,
            color=colour,
            label=f"GPT layer, attention {kind}",
        )
        axes.bar_label(bars, fmt="%.0f", fontsize=8)

    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    titled(axes, "what remains to drop (bf16, batch 4, width 256)")


def main() -> None:
    """Measures, traces, prints, writes and draws."""
    parser = arguments(__doc__)
    parser.add_argument("--longest", type=int, default=4096, help="largest T (default: 4096)")
    options = parser.parse_args()

    if not options.redraw:
        torch.set_num_threads(1)
        rows, kept = list(measured(options.longest)), list(remaining())
        crossings = {field: crossing(rows, field) for field in ("peak_bytes", "step_s")}
        write(
            "attention", {"rows": rows, "remaining": kept, "crossover_tokens": crossings}, seed=SEED
        )

    record = read("attention")
    picture(record)
    rows = record["rows"]

    cells = [
        [
            f"{r['tokens']:,}, {r['way']}",
            f"{r['peak_bytes'] / 2**20:.1f} MiB",
            f"{1000 * r['step_s']:.1f} ms",
            f"{r['error_ulp']:.1f}",
        ]
        for r in rows
    ]

    print(table(cells, ["tokens", "memory", "CPU time", "error (ulp)"]))


if __name__ == "__main__":
    main()
