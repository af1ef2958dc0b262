"""Sentences about figures, in the results page and the README, match the result files.

A new run shows which sentences to correct.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import pytest

from tests.support.checkout import ROOT

RESULTS = ROOT / "experiments" / "results"
PAGES = (RESULTS / "README.md", RESULTS.parents[1] / "README.md")
TEXT = re.sub(r"\s+", " ", "\n".join(page.read_text() for page in PAGES))
GIB, MIB = 2**30, 2**20
SIDES = ("expected", "measured")
Claims = Iterator[str]


def only(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return row


def span(numbers: list[float], form: str = ".0f") -> str:
    return f"{min(numbers):{form}} to {max(numbers):{form}}"


def lecture_chain(d: dict[str, Any]) -> Claims:
    hand = {row["name"]: row for row in d["by_hand"]}
    yield f"Ten layers take {hand['everything kept']['products']} products"

    ways = ("checkpoint at layer 5, by segment", "checkpoint at layer 5, by layer", "nothing kept")
    segment, layer, nothing = (hand[way] for way in ways)
    yield (
        f"{segment['products']} (checkpoint at layer 5, by segment), {layer['products']} (by "
        f"layer), {nothing['products']} (nothing kept)"
    )

    least = [only(d["least"], matrices=row["matrices"]) for row in (segment, layer, nothing)]
    yield "the least is {}, {} and {}, each proved".format(*(row["products"] for row in least))
    assert all(row["products"] == row["proved_least"] for row in d["least"])
    assert all(row["planned"] == row["executed"] and row["is_equal"] for row in d["executed"])


def checkmate_figures(d: dict[str, Any]) -> Claims:
    def batch(method: str) -> int:
        return int(only(d["figure_6"], model="MobileNetV2", memory="16 GB", method=method)["batch"])

    ours, plain = batch("auto"), batch("keep-all")
    heuristics = [
        row["batch"]
        for row in d["figure_6"]
        if (row["model"], row["memory"]) == ("MobileNetV2", "16 GB")
    ]
    best = max(size for size in heuristics if size != ours)
    yield (
        f"is {ours / plain:.1f} times keep-all's ({ours} to {plain}; 5.1 in the paper) and "
        f"{ours / best:.2f} times the best heuristic's"
    )

    above = {
        (model, way): d["table_2"][model][way] - ratio
        for model, ways in d["table_2_published"].items()
        for way, ratio in ways.items()
    }
    lp, ap = above.pop(("U-Net", "lp-rounding")), above.pop(("MobileNetV2", "ap-sqrt"))
    yield f"is {lp:.2f} above the paper on U-Net; `ap-sqrt` is {ap:.2f} above it on MobileNet"
    yield f"the others are within {max(map(abs, above.values())):.2f}"

    panel = only(d["figure_5"], model="U-Net", device="V100")
    yield f"ours on U-Net is {d['table_2']['U-Net']['auto']:.2f} with the least budget"
    yield (
        f"needs {panel['overhead_percent']['auto'][0]:.0f} % more compute and the bound says "
        f"{panel['bound_percent'][0]:.0f} %"
    )


def depth_growth(d: dict[str, Any]) -> Claims:
    deepest = {
        name: max((row for row in d["rows"] if row["network"] == name), key=lambda row: row["size"])
        for name in ("ResNet", "LSTM")
    }
    power = {name: d["exponents"][name]["sublinear"] for name in deepest}
    yield f"{power['ResNet']:.2f} on the ResNet; on the LSTM {power['LSTM']:.2f} of the whole"

    price = {
        way: [100 * (row["over_keep_all"] - 1) for row in d["paces"] if row["way"] == way]
        for way in ("sublinear", "ours, same price")
    }
    yield "cost {:.0f} % and {:.0f} % more time per step, measured".format(*price["sublinear"])
    yield "measured {:.0f} % and {:.0f} % more time".format(*price["ours, same price"])

    ways = {
        name: {way: found["bytes"] for way, found in row["ways"].items()}
        for name, row in deepest.items()
    }
    yield (
        f"saves {100 * (1 - ways['ResNet']['drop cheap'] / ways['ResNet']['sharing']):.0f} % of "
        "the deepest ResNet and nothing of the LSTM"
    )
    assert ways["LSTM"]["drop cheap"] > 0.98 * ways["LSTM"]["sharing"]

    shares = {
        name: [
            100 * row["ways"]["ours, same price"]["bytes"] / row["ways"]["sublinear"]["bytes"]
            for row in d["rows"]
            if row["network"] == name
        ]
        for name in deepest
    }
    yield (
        f"hold {span(shares['ResNet'])} % of their memory on the ResNet and "
        f"{span(shares['LSTM'])} % on the LSTM"
    )
    assert shares["LSTM"][-1] == max(shares["LSTM"])
    assert d["laws"]["ResNet"]["sublinear"] == "square root"

    assert d["laws"]["ResNet"]["ours, least"] == "constant"
    least = [row["ways"]["ours, least"] for row in d["rows"] if row["network"] == "ResNet"]
    yield (
        f"{max(w['bytes'] for w in least) / MIB:.1f} MiB at every depth of the ResNet, at "
        f"{span([1 + w['overhead'] for w in least], '.1f')} times the compute"
    )


def transformer_arithmetic(d: dict[str, Any]) -> Claims:
    yield f"a layer keeps {sum(d['numbers'].values()):.0f} d T numbers"
    term = d["terms"][-1]
    yield f"{term['d T coefficient']:.2f} b T d + {term['T x T coefficient']:.2f} b h T² bytes"
    yield f"The loss keeps {term['vocabulary coefficient']:.0f} b T V"

    selective, ours = (
        row["step_s"] for row in d["ways"] if "T × T" in row["way"] or "T x T" in row["way"]
    )
    faster = f"{100 * (1 - ours / selective):.1f} % faster"
    yield f"Our plan is {faster} than dropping the T × T matrices"


def attention(d: dict[str, Any]) -> Claims:
    crossover = d["crossover_tokens"]
    yield f"less memory than the formula from T = {crossover['peak_bytes']:.0f}"
    yield f"less time from about T = {round(crossover['step_s'], -1):,.0f}"
    yield f"errors of all three are some {span([row['error_ulp'] for row in d['rows']])} units"


def static_memory(d: dict[str, Any]) -> Claims:
    rows = d["rows"]
    plain, planned = rows[::2], rows[1::2]
    assert {row["schedule"] for row in plain} == {"everything kept"}

    shared = [
        [100 * row["shared"] / row["own memory"] for row in half] for half in (plain, planned)
    ]
    yield f"Sharing leaves {span(shared[0])} % of the memory"
    yield (
        f"{span(shared[1])} % under a plan; in-place alone leaves "
        f"{span([100 * row['in place'] / row['own memory'] for row in rows])} %"
    )

    lost = {
        way: [100 * (row["arenas"][way] / row["both"] - 1) for row in rows]
        for way in ("best fit, as values come", "our search")
    }
    nothing = sum(percent == 0 for percent in lost["our search"])
    most = {way: max(percents) for way, percents in lost.items()}

    yield (
        f"loses up to {most['best fit, as values come']:.0f} %; our search at most "
        f"{most['our search']:.0f} %"
    )
    yield (
        "nothing at all on "
        f"{['no', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight'][nothing]} of "
        "eight"
    )


def reverse_price(d: dict[str, Any]) -> Claims:
    yield f"cost {span([row['flop'] for row in d['prices']], '.2f')} times the function in FLOP"
    yield f"{span([row['seconds'] for row in d['prices']], '.1f')} in seconds"

    gpt, resnet = d["totals"].values()
    yield (
        f"{100 * gpt['seconds_bound_by_memory']:.0f} % (GPT-2) and "
        f"{100 * resnet['seconds_bound_by_memory']:.0f} % (ResNet-50)"
    )
    yield f"{100 * gpt['flop_in_products']:.1f} % of the FLOP is in products"

    used = [f"{100 * row['utilisation']:.1f}" for row in d["utilisation"]]
    yield (
        f"from {used[0]} to {used[1]} % block by block and {used[2]} % with our plan in the same "
        "memory on GPT-2"
    )
    yield f"from {used[3]} to {used[4]} and {used[5]} % on ResNet-50"


def sharding(d: dict[str, Any]) -> Claims:
    def row(precision: str, plan: str) -> dict[str, Any]:
        return only(d["rows"], precision=precision, plan=plan, ranks=1024)

    kept = [row(precision, "everything kept") for precision in ("fp32", "bf16-mixed")]
    sizes = [f"{r['bytes']['activations'] / GIB:.1f} of {r['total'] / GIB:.1f} GiB" for r in kept]
    yield f"on 1,024 ranks they are {sizes[0]} in fp32 and {sizes[1]} in bf16-mixed"

    least = [row(precision, "remat, least") for precision in ("fp32", "bf16-mixed")]
    yield f"The least plans hold {least[0]['bytes']['activations'] / GIB:.1f} GiB of them"
    yield f"at {100 * least[0]['overhead']:.0f} and {100 * least[1]['overhead']:.0f} % more compute"

    assert all(r["computed"] == r["measured"] for r in d["measured"]), "to the byte"
    steps = [
        only(d["measured"], ranks=4, precision="fp32", plan=plan)["step_bytes"] / MIB
        for plan in ("remat, 60%", "everything kept")
    ]
    yield "({:.0f} of {:.0f} MiB on 4 ranks)".format(*steps)

    planned = [r for r in d["measured"] if "predicted_peak_bytes" in r]
    below = [100 * (1 - r["measured_peak_bytes"] / r["predicted_peak_bytes"]) for r in planned]
    assert min(below) >= 0
    yield f"held at most {max(below):.2f} % less than predicted, in both precisions"


def side_by_side(d: dict[str, Any]) -> Claims:
    rows = [row for row in d["rows"] if "refused" not in row]
    wrong = [row for row in rows if row["gradients"] == "wrong"]
    assert {(row["model"], row["family"]) for row in wrong} == {
        ("GPT", "Inductor, activation_memory_budget")
    }
    differences = [100 * row["gradient_difference"] for row in wrong]
    yield f"off by {span(differences)} % of the largest"

    ours = [row for row in rows if (row["model"], row["family"]) == ("GPT", "remat")]
    assert {row["gradients"] for row in rows if row["family"] == "remat"} == {"equal"}
    yield (
        f"Plans hold from {ours[0]['peak_bytes'] / MIB:.0f} to {ours[-1]['peak_bytes'] / MIB:.0f} "
        "MiB, equal to the bit"
    )

    fused = only(rows, model="GPT", family="remat, run by Inductor", label="60%")
    yield (
        f"through Inductor's kernels {fused['peak_bytes'] / MIB:.0f} MiB at {fused['ratio']:.2f} "
        "of the plain step's time"
    )

    rounding = only(
        rows, model="ResNet-18", family="Inductor, activation_memory_budget", label="1"
    )["gradient_difference"]
    yield f"Inductor's own rounding is {100 * rounding:.1f} % of the largest gradient"

    yield "came out at {:.2f} and {:.2f}".format(
        *(row["ratio"] for row in rows if row["family"] == "plain PyTorch")
    )


def new_lengths(d: dict[str, Any]) -> Claims:
    rows = list(d["models"].values())
    times = [row["symbolic_s"] / row["capture_s"] for row in rows]
    shares = [100 * row["concrete_s"] / row["capture_s"] for row in rows]
    pays = [row["symbolic_s"] / (row["capture_s"] - row["concrete_s"]) for row in rows]

    yield f"takes {span(times)} times a capture with fixed sizes"
    yield f"{span(shares)} % of a capture for each length"
    yield f"pays off after {span(pays)} lengths"

    assert all(row["equal_lengths"] == row["lengths"] == 4 for row in rows)
    assert all(row["symbolic_captures"] == 1 for row in rows)


def step_text(row: dict[str, Any]) -> str:
    held = (row["allocated"] - row["base"]) / MIB
    return f"{1000 * row['step_s']:.1f} ms in {held:,.0f} MiB"


def gpu_run(d: dict[str, Any]) -> Claims:
    measured = {"step_s", "way", "model"}
    rows = {(row["model"], row["way"]): row for row in d["facts"] if measured <= row.keys()}
    plans = {key: row for key, row in rows.items() if "budget" in row}
    promised = {key: row["kernels_peak"] or row["predicted"] for key, row in plans.items()}
    off = {key: row["requested"] - row["base"] - promised[key] for key, row in plans.items()}

    near = [key for key, size in off.items() if abs(size) < 0.2 * MIB]
    yield f"less than 0.2 MiB in {len(near)} of {len(off)} runs"
    (far,) = off.keys() - near
    yield f"by {off[far] / MIB:.1f} MiB for GPT-2 XL at 60 %"

    blocks = [
        100 * (row["allocated"] - row["base"] - promised[key]) / promised[key]
        for key, row in plans.items()
        if key[0] == "gpt2-xl"
    ]
    yield f"{min(blocks):.2f} to {max(blocks):.2f} % for GPT-2 XL"

    medium = {way: row for (model, way), row in rows.items() if model == "gpt2-medium"}
    plain_s = medium["plain"]["step_s"]
    yield (
        f"takes {medium['remat 60%']['step_s'] / plain_s:.2f} times as long as plain "
        f"PyTorch (planned: {1 + medium['remat 60%']['overhead']:.2f}); selective checkpoints take "
        f"{medium['selective checkpoints']['step_s'] / plain_s:.2f} times as long"
    )

    least, blocks_ = medium["remat least"], medium["checkpoint per block"]
    saved = 1 - (least["requested"] - least["base"]) / (blocks_["requested"] - blocks_["base"])
    yield (
        f"With {100 * saved:.0f} % less memory than checkpoints per block it takes "
        f"{least['step_s'] / blocks_['step_s']:.2f} times their time"
    )

    fused = {way: row for (model, way), row in rows.items() if "12 layers" in model}
    ours, theirs = (
        fused[way] for way in ("remat inductor 100%", "torch.compile, activation_memory_budget 1.0")
    )
    yield step_text(ours)
    yield f"`torch.compile` takes {step_text(theirs)}"


def gpu_allocator(d: dict[str, Any]) -> Claims:
    def ratio(row: dict[str, Any], more: str, fewer: str) -> float:
        """How far the expected ratio of two counts is from the measured one, in percent."""
        shares: list[float] = [row[of][f"{more}_bytes"] / row[of][f"{fewer}_bytes"] for of in SIDES]
        return 100 * abs(shares[0] - shares[1])

    resnet = [row for row in d["rows"] if row["model"] == "resnet50"]
    others = [row for row in d["rows"] if row["model"] != "resnet50"]
    blocks = [max(ratio(row, "allocated", "requested") for row in of) for of in (others, resnet)]
    yield (
        f"to within {blocks[0]:.2f} % of the peak for GPT-2 and Llama, "
        f"{blocks[1]:.2f} % for ResNet-50"
    )

    def off(rows: list[dict[str, Any]]) -> list[float]:
        counts = [[row[of]["reserved_bytes"] for of in SIDES] for row in rows]
        return [100 * (expected / measured - 1) for expected, measured in counts]

    yield f"the reserved bytes are expected to within {max(map(abs, off(others))):.1f} %"
    low = sorted(-share for share in off(resnet))
    yield f"For ResNet-50 they are {low[0]:.0f} to {low[-1]:.0f} % too low"


def gpu_run_h200(d: dict[str, Any]) -> Claims:
    rows = {(row["model"], row["way"]): row for row in d["facts"] if "step_s" in row}
    planned = {key: row for key, row in rows.items() if "predicted" in row}
    off = {
        key: (row["requested"] - row["base"] - (row.get("kernels_peak") or row["predicted"])) / MIB
        for key, row in planned.items()
    }

    near = [key for key, size in off.items() if abs(size) <= 1.0]
    yield f"by at most 1.0 MiB in {len(near)} of {len(off)} runs"

    laptop, cut = sorted(off.keys() - near, key=lambda key: off[key])
    assert laptop[0] == "resnet50" and "logged" in cut[0]
    yield f"{off[laptop]:.1f} MiB below: only the card knows"
    above = 100 * (rows[cut]["requested"] / rows[cut]["budget_asked"] - 1)
    yield f"held {off[cut]:.1f} MiB more than predicted, and so {above:.2f} % more than its budget"

    def said(model: str, way: str) -> str:
        return step_text(rows[model, way])

    ours, theirs = "remat inductor 100%", "torch.compile, activation_memory_budget 1.0"
    gpt = "gpt2-medium, 12 layers"
    yield (
        f"{said(f'{gpt}, no dropout', ours)}, where `torch.compile` takes "
        f"{said(f'{gpt}, no dropout', theirs)}; with dropout {said(gpt, ours)} "
        f"({said(gpt, theirs)}), in two pieces {said(f'{gpt}, logged', ours)} "
        f"({said(f'{gpt}, logged', theirs)})"
    )

    yield (
        f"ResNet-50: {said('resnet50', ours)} ({said('resnet50', theirs)}), at 60 % "
        f"{said('resnet50', 'remat inductor 60%')}"
    )

    slower = sorted(
        rows[model, ours]["until_first_s"] / rows[model, theirs]["until_first_s"]
        for model, way in rows
        if way == ours
    )
    yield (
        f"{slower[0]:.1f} to {slower[-2]:.1f} times as long as `torch.compile`'s, "
        f"{slower[-1]:.1f} in pieces"
    )

    refused = [row["model"] for row in d["facts"] if "60%" in row.get("way", "") and "error" in row]
    assert {gpt, f"{gpt}, no dropout", "llama-3-8b, 8 layers"} == set(refused)


def rows_by_budget(
    models: dict[str, list[dict[str, Any]]], name: str, way: str = "remat"
) -> dict[str, dict[str, Any]]:
    first = models[name][0]
    return {
        row["asked"]: row | {
            "share": row["peak_bytes"] / first["peak_bytes"],
            "time": row["seconds"] / first["seconds"],
        }
        for row in reversed(models[name]) if row["way"] == way and not row["outcome"]
    }  # fmt: skip


def beside_knapsack(models: dict[str, list[dict[str, Any]]], name: str) -> list[float]:
    """Times of plans within the knapsack's peaks, of its own, where its gradients are right."""
    plans = {row["budget_bytes"]: row for row in models[name] if row["way"] == "remat"}
    return [
        plans[row["peak_bytes"]]["seconds"] / row["seconds"]
        for row in models[name]
        if row["way"] == "activation_memory_budget"
        and row["gradient_difference"] < 1e-5
        and not plans[row["peak_bytes"]]["outcome"]
    ]


def by_model(numbers: dict[str, str]) -> str:
    """A text for each model, as the page lists them."""
    *first, last = (
        f"{text} for {name.replace(', no', ' without')}" for name, text in numbers.items()
    )
    return f"{', '.join(first)} and {last}"


def inductor(record: dict[str, Any]) -> Claims:
    models = record["models"]
    rows = partial(rows_by_budget, models)
    drops_logits = [name for name in models if name in ("BERT", "T5", "Llama")]

    for name in models.keys() - set(drops_logits):
        assert all(row["first_bytes"] == row["predicted_bytes"] for row in rows(name).values())
    unused = [
        1 - row["first_bytes"] / row["predicted_bytes"]
        for name in drops_logits
        for row in rows(name).values()
    ]
    assert min(unused) >= 0
    yield f"held up to {100 * max(unused):.1f} % less"

    shares = ("100%", "80%", "60%", "40%")
    points = {name: [row for share in shares if (row := rows(name).get(share))] for name in models}
    spans = {name: span([row["time"] for row in found], ".2f") for name, found in points.items()}
    yield f"a step takes, relative to `torch.compile`'s, {by_model(spans)}"

    explained = [
        (row["time"] / (1 + row["overhead"]), name) for name in points for row in points[name]
    ]
    late = [name for time, name in explained if time > 1.03]
    assert set(late) == {"GPT, no dropout"}
    yield (
        f"{len(explained) - len(late)} of these {len(explained)} steps take at most 1.03 times "
        f"what their predicted overhead explains, the slowest {max(explained)[0]:.2f} times"
    )

    fused = rows("GPT")["40%"]
    yield (
        f"a GPT in {100 * fused['share']:.0f} % of `torch.compile`'s peak takes "
        f"{fused['time']:.2f} times its step"
    )

    least = {
        name: rows(name)["least"]["predicted_bytes"]
        / rows(name, "eager")["least"]["predicted_bytes"]
        for name in models
    }
    assert max(least, key=least.__getitem__) == "GPT"
    yield f"least budget is {span(list(least.values()), '.2f')} times the eager executor's"
    at_least = [rows(name)["least"]["time"] for name in models]
    yield f"A step at the least takes {span(at_least, '.2f')} times"

    beside = {name: found for name in models if (found := beside_knapsack(models, name))}
    of_all = [ratio for found in beside.values() for ratio in found]
    yield (
        f"At the {len(of_all)} settings where its gradients are right, a plan within the same peak "
        f"takes {span(of_all, '.2f')} times its step, {median(of_all):.2f} in the median"
    )
    medians = {name: f"{median(found):.2f}" for name, found in beside.items()}
    yield f"by model {by_model(medians)}"
    second, slowest = sorted(beside, key=lambda name: max(beside[name]))[-2:]
    assert slowest == "GPT, no dropout"
    yield (
        f"slowest beside it is GPT without dropout, up to {max(beside[slowest]):.2f} times; all "
        f"others take at most {max(beside[second]):.2f} times"
    )

    wrong: dict[str, str] = {}
    for name in models:
        for asked, row in rows(name, "activation_memory_budget").items():
            if row["gradient_difference"] > 1e-5:
                wrong[name] = max(asked, wrong.get(name, ""))
    yield f"wrong from {by_model(wrong)} down"
    with_dropout = ("GPT", "ViT", "BERT", "T5")
    yield (
        "{:.2f} times its time for the GPT with everything kept, {:.2f} for ViT, {:.2f} for BERT, "
        "{:.2f} for T5"
    ).format(*(rows(name, "eager")["100%"]["time"] for name in with_dropout))

    def first(*asked: str) -> list[float]:
        return sorted(
            row["compile_s"] / models[name][0]["compile_s"]
            for name in models
            for share in asked
            if (row := rows(name).get(share))
        )

    without_search = max(
        (row["compile_s"] - row["search_s"]) / models[name][0]["compile_s"]
        for name in models
        for share in ("60%", "40%")
        if (row := rows(name).get(share))
    )

    high, low, lowest = first("100%", "80%"), first("60%", "40%"), first("least")
    yield (
        f"{high[0]:.1f} to {high[-1]:.1f} times what `torch.compile` takes at 100 and 80 %, up to "
        f"{low[-1]:.1f} times at 60 and 40 %, {without_search:.1f} without the "
        "search, which was limited to 20 s"
    )
    yield f"{lowest[0]:.1f} to {lowest[-1]:.1f} at the least budgets"


def inductor_stored_masks(record: dict[str, Any]) -> Claims:
    found = rows_by_budget(record["models"], "GPT, no dropout")
    rows = [found[share] for share in ("100%", "80%", "60%", "40%")]
    times = [f"{row['time']:.2f}" for row in rows]
    explained = [row["time"] / (1 + row["overhead"]) for row in rows]
    yield f"it then takes {', '.join(times[:3])} and {times[3]} times `torch.compile`'s step"
    yield f"{max(explained):.2f} times what the overhead explains"


SECTIONS: list[Callable[[dict[str, Any]], Claims]] = [
    lecture_chain, checkmate_figures, depth_growth, transformer_arithmetic, attention,
    static_memory, reverse_price, sharding, side_by_side, new_lengths, gpu_run,
    gpu_allocator, gpu_run_h200, inductor, inductor_stored_masks,
]  # fmt: skip


def record_of(name: str) -> dict[str, Any]:
    lines = RESULTS / f"{name}.jsonl"
    if lines.exists():
        return {"facts": [json.loads(line) for line in lines.read_text().splitlines()]}
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def is_said(claim: str) -> bool:
    """Says whether a page makes a claim; naive: "5 % faster" is found in "15 % faster"."""
    return re.search(rf"(?<![\d.,]){re.escape(claim)}(?!\d|[.,]\d)", TEXT) is not None


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_sentences_match_their_result_file(
    section: Callable[[dict[str, Any]], Claims],
) -> None:
    missing = [claim for claim in section(record_of(section.__name__)) if not is_said(claim)]
    assert not missing, f"no page says: {missing}"
