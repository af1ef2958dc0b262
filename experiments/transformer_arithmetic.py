"""Transformer arithmetic.

Activation bytes by formula against traced ones, and what each way of checkpointing leaves.

    python -m experiments.transformer_arithmetic [--time-limit S] [--redraw]

*Numbers.* A rule of thumb counts 12 d T numbers per layer: queries, keys and values (3), what
attention returns (1), the MLP's inner values before and after the GELU (4 + 4). The trace without
dropout has 16 d T: these, and the inputs and outputs of the two norms. It also has T² for each head
(the softmax) and, once, T for each word of the vocabulary (the log-softmax of the loss).

*Terms.* For b sequences of T tokens, width d and h heads in 16 bit with dropout, Korthikanti et al.
(2022, arXiv:2205.05198, section 4.1) count 34 b T d + 5 b h T² bytes per layer: everything that the
backward of a pre-norm block with attention written out reads. The trace gives, for several T, the
bytes kept for the backward when everything is kept, sorted by shape: values with T x T entries,
values with a vocabulary's entries, and others. A layer is the difference between models of three
and two layers. Its coefficients are 36.03 and 6.03. PyTorch's dropout on the CPU keeps each mask in
the type of its input, with two bytes where the formula (and CUDA) has one: that is 2 b T d and
1 b h T² more. The rest are the statistics of the norms and the causal mask that the heads share.
The loss keeps 2 b T V bytes for V words.

*Ways.* GPT-2 medium's shapes (24 layers, width 1,024, 16 heads, 8 x 1,024 tokens, bf16, no dropout,
roofline costs of an A100): everything kept; block inputs only, as users of `torch.utils.checkpoint`
do; everything but the T x T matrices ("selective", ibid.); the first two again with fused
attention, which has no such matrices; and `auto` at the peaks of the ways that recompute.

Writes `results/transformer_arithmetic.json` and `.png`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import remat
from experiments.figures import (
    arguments,
    draw,
    fake_tensors,
    legend_below,
    read,
    table,
    titled,
    write,
)
from experiments.models import GPT, Block
from remat.core.budget import format_bytes
from remat.core.graph import Graph
from remat.core.operators import Phase
from remat.core.schedule import Schedule, lifetimes, simulate
from remat.look.plot_style import BLUE, GREY, INK, ORANGE, new_figure, quiet
from remat.solvers import make_solver

WIDTH, HEADS, VOCABULARY, BATCH = 256, 8, 3000, 4
TOKENS = (128, 256, 512, 1024)
MEDIUM: dict[str, Any] = {"num_layers": 24, "width": 1024, "num_heads": 16, "vocabulary": 50257}
MEDIUM_BATCH, MEDIUM_TOKENS = 8, 1024
COSTS = "roofline:A100"


class FusedBlock(Block):
    """The same block with `scaled_dot_product_attention`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the block's output; shape (batch, tokens, width)."""
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        change: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + change


def traced(tokens: int, batch: int, *, is_fused: bool = False, **shape: Any) -> Graph:
    """Returns the training step of a GPT in bf16, on fake tensors."""
    with fake_tensors(torch.bfloat16):
        model = GPT(**shape)
        if is_fused:
            model.blocks = nn.Sequential(
                *(
                    FusedBlock(shape["width"], shape["num_heads"], 0.0)
                    for _ in range(shape["num_layers"])
                )
            )

        ids = torch.zeros(batch, tokens, dtype=torch.long)

    return remat.trace(model.train(), kwargs={"ids": ids}, costs=COSTS)


def kept_bytes(
    graph: Graph, schedule: Schedule, *, tokens: int, matrices: int, vocabulary: int
) -> dict[str, int]:
    """Returns the bytes kept from the forward for the backward, by term."""
    lives, mark = lifetimes(graph, schedule.array), schedule.num_forward_steps
    terms = {"d T": 0, "T x T": 0, "vocabulary": 0}

    for value in lives.value[(lives.first < mark) & (lives.last >= mark)].tolist():
        if not any(graph.operators[user].phase is Phase.BACKWARD for user in graph.users_of[value]):
            continue

        shape = graph.values[value].shape
        # a mask, or one for each head
        is_square = shape[-2:] == (tokens, tokens) and math.prod(shape[:-2]) in (1, matrices)
        term = "T x T" if is_square else "vocabulary" if vocabulary in shape else "d T"
        terms[term] += graph.values[value].size_bytes

    return terms


def terms_by_length() -> Iterator[dict[str, Any]]:
    """Yields the coefficients of a layer's terms for each length.

    Each row has the traced coefficients, and the bytes that the formula's 34 and 5 give.
    """
    shape: dict[str, Any] = {
        "width": WIDTH,
        "num_heads": HEADS,
        "vocabulary": VOCABULARY,
        "dropout": 0.1,
    }

    for tokens in TOKENS:
        pair = [traced(tokens, BATCH, num_layers=layers, **shape) for layers in (2, 3)]
        two, three = (
            kept_bytes(
                graph,
                Schedule.keep_all(graph),
                tokens=tokens,
                matrices=BATCH * HEADS,
                vocabulary=VOCABULARY,
            )
            for graph in pair
        )

        layer = {term: three[term] - two[term] for term in three}
        yield {
            "tokens": tokens,
            "bytes a layer": layer,
            "d T coefficient": layer["d T"] / (BATCH * tokens * WIDTH),
            "T x T coefficient": layer["T x T"] / (BATCH * HEADS * tokens**2),
            "vocabulary bytes": two["vocabulary"],
            "vocabulary coefficient": two["vocabulary"] / (BATCH * tokens * VOCABULARY),
            "formula": {"d T": 34 * BATCH * tokens * WIDTH, "T x T": 5 * BATCH * HEADS * tokens**2},
        }


def ways(time_limit_s: float) -> Iterator[dict[str, Any]]:
    """Yields kept bytes, peak and overhead of each way of checkpointing the medium GPT.

    Our plan at the same peak follows each way that recomputes.
    """
    for is_fused in (False, True):
        graph = traced(MEDIUM_TOKENS, MEDIUM_BATCH, is_fused=is_fused, dropout=0.0, **MEDIUM)
        attention = "fused attention" if is_fused else "attention written out"
        unlimited = simulate(graph, Schedule.keep_all(graph)).peak_bytes

        methods = {
            "everything kept": "keep-all",
            "block inputs only": "per-block",
            "all but T x T": "recompute-attention",
        }
        if is_fused:
            del methods["all but T x T"]

        for name, method in methods.items():
            solver = make_solver(method, time_limit_s=time_limit_s)
            for budget in _budgets(method, graph, unlimited):
                solution = solver.solve(graph, budget_bytes=budget)
                if solution.is_solved:
                    break

            yield _row(graph, attention, name, solution)
            if method != "keep-all":
                ours = remat.solve(graph, solution.peak_bytes, time_limit_s=time_limit_s)
                yield _row(graph, attention, f"ours in the memory of: {name}", ours)


def _budgets(method: str, graph: Graph, unlimited: int) -> list[int]:
    """Returns the budgets to try, smallest first: the first one met gives the lowest peak."""
    if method == "keep-all":
        return [unlimited]
    return [
        graph.resident_bytes + (unlimited - graph.resident_bytes) * percent // 100
        for percent in range(10, 101, 2)
    ]


def _row(graph: Graph, attention: str, name: str, solution: remat.Solution) -> dict[str, Any]:
    assert solution.schedule is not None
    matrices = MEDIUM_BATCH * MEDIUM["num_heads"]
    kept = kept_bytes(
        graph,
        solution.schedule,
        tokens=MEDIUM_TOKENS,
        matrices=matrices,
        vocabulary=MEDIUM["vocabulary"],
    )

    return {
        "attention": attention, "way": name, "kept": kept, "peak_bytes": solution.peak_bytes,
        "overhead": solution.overhead,
        "step_s": solution.cost_s, "overhead_bound": solution.overhead_bound,
        "operators": graph.num_operators,
    }  # fmt: skip


def numbers(tokens: int = 128) -> dict[str, float]:
    """Returns how many numbers a layer without dropout keeps, by kind, in units of d T.

    The T x T matrices are left out.
    """
    graph = traced(
        tokens,
        BATCH,
        num_layers=3,
        width=WIDTH,
        num_heads=HEADS,
        vocabulary=VOCABULARY,
        dropout=0.0,
    )

    schedule, found = Schedule.keep_all(graph), dict.fromkeys(_PARTS.values(), 0.0)
    lives, mark = lifetimes(graph, schedule.array), schedule.num_forward_steps

    for value in lives.value[(lives.first < mark) & (lives.last >= mark)].tolist():
        op, kept = graph.operators[graph.producer[value]], graph.values[value]
        is_read = any(
            graph.operators[user].phase is Phase.BACKWARD for user in graph.users_of[value]
        )

        if (
            is_read
            and op.module.startswith("blocks.1")
            and math.prod(kept.shape) % (BATCH * tokens * WIDTH) == 0
            and kept.shape[-1] != tokens
        ):
            found[_PARTS[op.target.split(".")[1]]] += math.prod(kept.shape) / (
                BATCH * tokens * WIDTH
            )
        elif (
            is_read
            and op.module.startswith("blocks.1")
            and kept.shape == (BATCH, HEADS, WIDTH // HEADS, tokens)
        ):
            found[_PARTS["clone"]] += 1.0  # keys, transposed

    return found


_PARTS = {
    "add": "inputs of the norms",
    "native_layer_norm": "outputs of the norms",
    "clone": "queries, keys, values; attention's result",
    "addmm": "MLP, before the GELU",
    "gelu": "MLP, after the GELU",
}
_RULE = 12.0


def picture(record: Mapping[str, Any]) -> None:
    """Draws the numbers of a layer, formula beside trace, and step time against peak."""
    figure = new_figure(
        "Activations of a transformer: counted, by formula and traced, and what checkpointing "
        "leaves",
        width=15,
        height=5.2,
    )

    left, middle, right = figure.subplots(1, 3, width_ratios=(0.75, 1, 1.25))
    _draw_numbers(left, record["numbers"])
    _draw_terms(middle, record["terms"])
    _draw_ways(right, record["ways"])

    legend_below(figure, [left, middle, right], columns=5)
    draw("transformer_arithmetic", figure)


def _draw_numbers(axes: Any, found: Mapping[str, float]) -> None:
    quiet(axes, x_label="numbers kept for the backward per layer (d T)", grid="x")
    titled(axes, f"no dropout, without T × T: {sum(found.values()):g} d T")

    colours = [GREY if "norm" in part else BLUE for part in found]
    bars = axes.barh(range(len(found)), list(found.values()), 0.7, color=colours)
    axes.bar_label(bars, fmt="%g", fontsize=9, padding=2)

    axes.set_yticks(
        range(len(found)),
        [part.replace("; ", ";\n").replace(", ", ",\n", part.startswith("MLP")) for part in found],
        fontsize=8.5,
    )
    axes.invert_yaxis()

    axes.barh(0, 0, color=BLUE, label=f"in the rule of thumb, {_RULE:g} d T")
    axes.barh(0, 0, color=GREY, label="not in it")


def _draw_terms(axes: Any, terms: list[dict[str, Any]]) -> None:
    quiet(axes, x_label="tokens T", y_label="kept for the backward per layer (MiB)")
    titled(axes, "bf16 with dropout: formula and trace")

    at = np.arange(len(terms))
    for offset, source, alpha in ((-0.2, "formula", 0.45), (0.2, "bytes a layer", 1.0)):
        below = np.zeros(len(terms))
        for term, colour in (("d T", BLUE), ("T x T", ORANGE)):
            height = np.array([row[source][term] / 2**20 for row in terms])
            label = f"{'formula' if alpha < 1 else 'traced'}: {term.replace('x', '×')} term"
            axes.bar(
                at + offset, height, 0.38, bottom=below, color=colour, alpha=alpha, label=label
            )
            below += height

    axes.set_xticks(at, [f"{row['tokens']:,}" for row in terms])


def _draw_ways(axes: Any, rows: list[dict[str, Any]]) -> None:
    quiet(
        axes,
        x_label="peak of the whole step (GiB)",
        y_label="step on an A100, by roofline (ms)",
        grid="both",
    )
    titled(axes, "GPT-2 medium, 8 × 1,024 tokens: ways of checkpointing")

    for row in rows:
        _draw_way(axes, row, rows)

    axes.plot([], [], "o", color=ORANGE, label="attention written out")
    axes.plot([], [], "o", color=BLUE, label="attention fused")
    axes.plot(
        [],
        [],
        "D",
        markerfacecolor="none",
        markeredgecolor=INK,
        markersize=9,
        label="ours, same memory",
    )

    axes.set_xlim(right=max(row["peak_bytes"] for row in rows) / 2**30 * 1.2)
    axes.margins(y=0.15)


def _draw_way(axes: Any, row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    is_ours, is_fused = row["way"].startswith("ours"), row["attention"].startswith("fused")
    x, y, colour = row["peak_bytes"] / 2**30, 1000 * row["step_s"], BLUE if is_fused else ORANGE

    if is_ours:
        axes.plot(
            x,
            y,
            "D",
            markerfacecolor="none",
            markeredgecolor=colour,
            markeredgewidth=1.8,
            markersize=13,
        )
        theirs = next(
            1000 * r["step_s"]
            for r in rows
            if r["way"] in row["way"] and r["attention"] == row["attention"]
        )
        text, offset = f"ours, same memory: {100 * (y / theirs - 1):+.1f} % time", (12, -13)
    else:
        axes.plot(x, y, "o", color=colour, markersize=7)
        text, offset = row["way"], (12, 2)

    axes.annotate(
        text.replace(" x ", " × "),
        (x, y),
        xytext=offset,
        textcoords="offset points",
        fontsize=8.5,
        color=colour,
    )


def main() -> None:
    """Traces, solves, prints, writes and draws."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--time-limit", type=float, default=15.0, help="seconds for each solve (default: 15)"
    )
    options = parser.parse_args()

    if not options.redraw:
        terms, rows = list(terms_by_length()), list(ways(options.time_limit))
        write(
            "transformer_arithmetic",
            {
                "time_limit_s": options.time_limit,
                "numbers": numbers(),
                "terms": terms,
                "ways": rows,
            },
        )

    record = read("transformer_arithmetic")
    picture(record)
    _show(record)


def _show(record: Mapping[str, Any]) -> None:
    print(
        table(
            [[part, f"{count:g}"] for part, count in record["numbers"].items()],
            ["kept by a layer, no dropout", "d T"],
        )
    )

    columns = ("d T coefficient", "T x T coefficient", "vocabulary coefficient")
    print(
        table(
            [[str(t["tokens"]), *(f"{t[c]:.2f}" for c in columns)] for t in record["terms"]],
            ["tokens", *columns],
        )
    )

    cells = [
        [
            f"{r['attention']}: {r['way']}",
            format_bytes(r["peak_bytes"]),
            f"{100 * r['overhead']:.1f} %",
        ]
        for r in record["ways"]
    ]
    print(table(cells, ["", "peak", "more compute"]))


if __name__ == "__main__":
    main()
