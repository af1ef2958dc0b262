"""Transformer arithmetic: activation bytes by formula against traced ones, and what each way of checkpointing leaves.

    python -m experiments.transformer_arithmetic [--time-limit S]

*Terms.* For b sequences of T tokens, width d and h heads in 16 bit with dropout, Korthikanti et al. (2022,
arXiv:2205.05198, section 4.1) count 34 b T d + 5 b h T² bytes a layer: everything that the backward of a pre-norm block
with attention written out reads. Traced: what `remat.trace` finds kept for the backward where everything is kept, sorted
by shape into values with T x T entries, with a vocabulary's, and the others, for several T; a layer is the difference of a
model of three layers and one of two. It comes out at 36.03 and 6.03: PyTorch's dropout on the CPU keeps each mask in the type
of its input, two bytes where the formula (and CUDA) has one, which is 2 b T d and 1 b h T² more; the rest are the statistics
of the norms and the causal mask that the heads share.

*Ways.* GPT-2 medium's shapes (24 layers, width 1,024, 16 heads, 8 x 1,024 tokens, bf16, no dropout, roofline costs of an
A100): everything kept; block inputs only, as `torch.utils.checkpoint` users write; everything but the T x T matrices
("selective", ibid.); both again with fused attention, which never has them; and `auto` at the peaks of the others.

Writes `results/transformer_arithmetic.json` and `.png`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import remat
from experiments.figures import draw, fake_tensors, legend_below, table, write
from experiments.models import GPT, Block
from remat.budget import format_bytes
from remat.graph import Graph, Phase
from remat.plot_style import BLUE, GREEN, GREY, LINES, ORANGE, RED, new_figure, quiet
from remat.schedule import Schedule, lifetimes, simulate
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
            model.blocks = nn.Sequential(*(FusedBlock(shape["width"], shape["num_heads"], 0.0) for _ in range(shape["num_layers"])))
        ids = torch.zeros(batch, tokens, dtype=torch.long)
    return remat.trace(model.train(), kwargs={"ids": ids}, costs=COSTS)


def kept_bytes(graph: Graph, schedule: Schedule, *, tokens: int, matrices: int, vocabulary: int) -> dict[str, int]:
    """Returns the bytes kept from the forward for the backward, by the term that they belong to."""
    lives, mark = lifetimes(graph, schedule.array), schedule.num_forward_steps
    terms = {"d T": 0, "T x T": 0, "vocabulary": 0}
    for value in lives.value[(lives.first < mark) & (lives.last >= mark)].tolist():
        if not any(graph.operators[user].phase is Phase.BACKWARD for user in graph.users_of[value]):
            continue
        shape = graph.values[value].shape
        is_square = shape[-2:] == (tokens, tokens) and math.prod(shape[:-2]) in (1, matrices)  # a mask, or one for each head
        term = "T x T" if is_square else "vocabulary" if vocabulary in shape else "d T"
        terms[term] += graph.values[value].size_bytes
    return terms


def terms_by_length() -> Iterator[dict[str, Any]]:
    """Yields the coefficients of a layer's terms for each length: what is traced, and the formula's 34 and 5."""
    shape: dict[str, Any] = {"width": WIDTH, "num_heads": HEADS, "vocabulary": VOCABULARY, "dropout": 0.1}
    for tokens in TOKENS:
        pair = [traced(tokens, BATCH, num_layers=layers, **shape) for layers in (2, 3)]
        two, three = (
            kept_bytes(graph, Schedule.keep_all(graph), tokens=tokens, matrices=BATCH * HEADS, vocabulary=VOCABULARY) for graph in pair
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
    """Yields the kept bytes, peak and overhead of each way of checkpointing the medium GPT, and of ours at its peak."""
    for is_fused in (False, True):
        graph = traced(MEDIUM_TOKENS, MEDIUM_BATCH, is_fused=is_fused, dropout=0.0, **MEDIUM)
        attention = "fused attention" if is_fused else "attention written out"
        unlimited = simulate(graph, Schedule.keep_all(graph)).peak_bytes
        methods = {"everything kept": "keep-all", "block inputs only": "per-block", "all but T x T": "recompute-attention"}
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
    """The leanest member of a family that is solved by budget: its least is asked for first."""
    if method == "keep-all":
        return [unlimited]
    return [graph.resident_bytes + (unlimited - graph.resident_bytes) * percent // 100 for percent in range(10, 101, 2)]


def _row(graph: Graph, attention: str, name: str, solution: remat.Solution) -> dict[str, Any]:
    assert solution.schedule is not None
    matrices = MEDIUM_BATCH * MEDIUM["num_heads"]
    kept = kept_bytes(graph, solution.schedule, tokens=MEDIUM_TOKENS, matrices=matrices, vocabulary=MEDIUM["vocabulary"])
    return {
        "attention": attention, "way": name, "kept": kept, "peak_bytes": solution.peak_bytes, "overhead": solution.overhead,
        "step_s": solution.cost_s, "overhead_bound": solution.overhead_bound, "operators": graph.num_operators,
    }  # fmt: skip


def picture(terms: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Draws formula beside trace, and step time against peak."""
    figure = new_figure("Activations of a transformer: by formula, traced, and what checkpointing leaves", width=12, height=5)
    left, right = figure.subplots(1, 2)
    quiet(left, x_label="tokens", y_label="kept for the backward, a layer (MiB)")
    at = np.arange(len(terms))
    for offset, source, alpha in ((-0.2, "formula", 0.45), (0.2, "bytes a layer", 1.0)):
        below = np.zeros(len(terms))
        for term, colour in (("d T", BLUE), ("T x T", ORANGE)):
            height = np.array([row[source][term] / 2**20 for row in terms])
            label = f"{'formula' if alpha < 1 else 'traced'}: {term.replace('x', '×')} term"
            left.bar(at + offset, height, 0.38, bottom=below, color=colour, alpha=alpha, label=label)
            below += height
    left.set_xticks(at, [str(row["tokens"]) for row in terms])
    quiet(right, x_label="peak of the whole step (GiB)", y_label="step on an A100, by roofline (ms)", grid="both")
    names = list(dict.fromkeys(row["way"] for row in rows))
    colours = dict(zip(names, (GREY, RED, GREEN, LINES[3], BLUE, ORANGE), strict=False))
    for row in rows:
        is_fused = row["attention"].startswith("fused")
        face = colours[row["way"]] if not is_fused else "white"
        label = row["way"] if not is_fused else "_"  # an underscore hides it: the ways of fused attention are named once
        right.plot(
            row["peak_bytes"] / 2**30, 1000 * row["step_s"], "D" if row["way"].startswith("ours") else "o", markerfacecolor=face,
            markeredgecolor=colours[row["way"]], markeredgewidth=1.6, markersize=6 if row["way"].startswith("ours") else 11, label=label,
        )  # fmt: skip
    right.plot([], [], "o", markerfacecolor="white", markeredgecolor=GREY, label="hollow: fused attention")
    legend_below(figure, [left, right])
    draw("transformer_arithmetic", figure)


def main() -> None:
    """Traces, solves, prints, writes and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit", type=float, default=15.0, help="seconds for each solve (default: 15)")
    time_limit_s = parser.parse_args().time_limit
    terms, rows = list(terms_by_length()), []
    for row in ways(time_limit_s):
        rows.append(row)
        print(row, flush=True)
    write("transformer_arithmetic", {"time_limit_s": time_limit_s, "terms": terms, "ways": rows})
    picture(terms, rows)
    columns = ("d T coefficient", "T x T coefficient", "vocabulary coefficient")
    print(table([[str(t["tokens"]), *(f"{t[c]:.2f}" for c in columns)] for t in terms], ["tokens", *columns]))
    cells = [[f"{r['attention']}: {r['way']}", format_bytes(r["peak_bytes"]), f"{100 * r['overhead']:.1f} %"] for r in rows]
    print(table(cells, ["", "peak", "more compute"]))


if __name__ == "__main__":
    main()
