"""The HTML report.

Its numbers are the simulator's, and a real browser draws it without a network.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import remat
from experiments.browser import installed_browser, look
from remat.analysis.composition import Category, Composition
from remat.analysis.decisions import Decision, Fate, decide
from remat.core.graph import Graph
from remat.core.operators import ValueKind
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.look.labels import shape_text
from remat.look.report import Report
from remat.solvers import make_solver
from remat.tracers.synthetic import FAMILIES, transformer


@pytest.fixture(scope="module")
def graph() -> Graph:
    step = transformer(4, width=2**18)
    return step.with_costs([op.cost_s * 1e-4 for op in step.operators], costs="roofline:H100")


@pytest.fixture(scope="module")
def curve(graph: Graph) -> list[Solution]:
    peak, solver = (
        simulate(graph, Schedule.keep_all(graph)).peak_bytes,
        make_solver("pytorch-knapsack"),
    )
    return [
        solver.solve(graph, budget_bytes=peak * percent // 100) for percent in (75, 85, 95, 100)
    ]


@pytest.fixture(scope="module")
def page(graph: Graph, curve: list[Solution], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "step.html"
    plan = replace(curve[1], found_by="eviction", proved_by="window")
    Report(graph, plan, measured_peak_bytes=plan.peak_bytes + 12).save(path, curve=curve)
    return path


def schedules(graph: Graph) -> list[Schedule]:
    peak = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    found = [
        make_solver("recompute-cheap")
        .solve(graph, budget_bytes=max(1, peak * percent // 100))
        .schedule
        for percent in (60, 90)
    ]
    return [Schedule.keep_all(graph), *(schedule for schedule in found if schedule)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_categories_sum_to_the_simulated_memory(family: str) -> None:
    graph = FAMILIES[family]()
    for schedule in schedules(graph):
        parts = Composition.of(graph, schedule)
        assert parts.bytes_of.sum(0).tolist() == simulate(graph, schedule).bytes_at.tolist()
        assert parts.bytes_of.min(initial=0) >= 0


def test_each_category_holds_what_it_says(graph: Graph, curve: list[Solution]) -> None:
    schedule = curve[0].schedule
    assert schedule is not None
    parts, first = Composition.of(graph, schedule), Composition.of(graph, Schedule.keep_all(graph))
    assert not first.bytes_of[list(Category).index(Category.RECOMPUTED)].any()

    parameters = sum(v.size_bytes for v in graph.values if v.kind is ValueKind.PARAMETER)
    assert set(parts.bytes_of[list(Category).index(Category.PARAMETERS)].tolist()) == {parameters}

    again = [step for step, op in enumerate(schedule.steps) if op in schedule.steps[:step]]
    assert all(parts.at(step)[Category.RECOMPUTED] for step in again)
    end = parts.at(len(schedule.steps) - 1)
    assert end[Category.PARAMETER_GRADIENTS] >= end[Category.SAVED]

    held = parts.held_at(int(parts.bytes_of.sum(0).argmax()))
    assert sum(
        graph.values[h.value].size_bytes for h in held
    ) + graph.resident_bytes == pytest.approx(curve[0].peak_bytes, rel=0.1)


def test_decisions_are_what_the_schedule_does(graph: Graph, curve: list[Solution]) -> None:
    report = Report(graph, curve[0])
    decisions = decide(graph, report.schedule)
    assert [d.value for d in decisions] == [v for op in graph.operators for v in op.writes]

    of_fate: dict[Fate, list[Decision]] = {
        fate: [d for d in decisions if d.fate is fate] for fate in Fate
    }
    assert {d.value for d in of_fate[Fate.SAVED]} <= set(report.saved)
    assert {d.operator for d in of_fate[Fate.RECOMPUTED]} <= set(report.recomputed)
    assert (
        of_fate[Fate.RECOMPUTED]
        and of_fate[Fate.SHORT]
        and of_fate[Fate.GRADIENT]
        and of_fate[Fate.RESULT]
    )

    for decision in of_fate[Fate.RECOMPUTED]:
        assert decision.times > 1
        assert decision.again_s >= graph.operators[decision.operator].cost_s > 0
        assert "recomputed in" in decision.reason

    pinned = [
        d
        for d in of_fate[Fate.SAVED]
        if graph.operators[d.operator].pinned and not graph.operators[d.operator].is_snapshot
    ]
    assert all(graph.operators[d.operator].pinned in d.reason for d in pinned)


def test_without_recomputations_the_reason_says_so(graph: Graph) -> None:
    decisions = decide(graph, Schedule.keep_all(graph))
    assert {
        d.reason
        for d in decisions
        if d.fate is Fate.SAVED and not graph.operators[d.operator].pinned
    } == {"nothing has to be recomputed"}


def test_the_page_needs_no_network_and_shows_the_numbers(
    page: Path, graph: Graph, curve: list[Solution]
) -> None:
    text = page.read_text()
    outside = re.compile(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//|@import|url\(\s*["']?https?:""")
    assert not outside.search(re.sub(r"<script\b[^>]*>.*?</script>", "", text, flags=re.DOTALL))
    assert not re.search(r"<script[^>]+src|<link[^>]+href", text)

    plan = curve[1]
    for expected in (
        f"{100 * plan.overhead:.2f} %",
        f"{100 * plan.overhead_bound:.2f} %",
        "+12 bytes",
        "Why the peak is",
        "found by eviction, bound by window",
        "blocks.*.attn",
    ):
        assert expected in text


def test_html_in_a_name_cant_break_the_page(tmp_path: Path) -> None:
    graph = Graph.from_arrays([1, 1, 1], [8, 8, 8], [(0, 1), (1, 2)], first_backward=2)
    plan = make_solver("keep-all").solve(graph, budget_bytes=100)
    Report(graph, plan).save(tmp_path / "a.html", title="<script>alert(1)</script>")
    text = (tmp_path / "a.html").read_text()
    assert "<script>alert(1)" not in text
    assert "&lt;script&gt;alert(1)" in text


@pytest.mark.parametrize(
    "family", ["empty", "single", "zero_cost", "half_zero_size", "random_step"]
)
def test_extreme_graphs_have_a_page(family: str, tmp_path: Path) -> None:
    graph = FAMILIES[family]()
    keep_all = make_solver("keep-all").solve(graph, budget_bytes=2**40)
    Report(graph, keep_all).save(tmp_path / "page.html", curve=[keep_all])
    page = (tmp_path / "page.html").read_text()
    visible = re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"\b(nan|inf)\b", visible, re.IGNORECASE)


def test_parameters_are_told_from_buffers() -> None:
    import torch

    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    )
    model[2].bias.requires_grad_(False)
    traced = remat.trace(
        torch.nn.Sequential(model, torch.nn.Flatten(0)), (torch.randn(4, 8),), differentiate="all"
    )

    kinds = [v.kind for v in traced.values if v.is_resident and v.size_bytes]
    assert kinds.count(ValueKind.PARAMETER) == 5
    assert kinds.count(ValueKind.INPUT) == 1


def test_our_own_code_is_never_a_source_line() -> None:
    import torch

    traced = remat.trace(
        torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.Flatten(0)),
        (torch.randn(4, 8),),
        differentiate="all",
    )
    assert not any(op.source.startswith("modules.py") for op in traced.operators)
    assert not any("call_impl" in op.source for op in traced.operators)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("uint8", "u8[2,3]"), ("float32", "f32[2,3]"), ("bfloat16", "bf16[2,3]"), ("", "")],
)
def test_types_and_shapes_read_well(dtype: str, expected: str) -> None:
    assert shape_text(dtype, (2, 3)) == expected


needs_browser = pytest.mark.skipif(
    not installed_browser(),
    reason="needs a browser: apt-get install chromium-headless-shell, or any Chromium or Chrome",
)
_LOOK = """
(() => {
  if (!window.Bokeh || !Bokeh.documents.length || !Bokeh.documents[0].is_idle) return "";
  const canvases = [], visit = root => {
    for (const node of root.querySelectorAll("*")) {
      if (node.tagName == "CANVAS" && node.width > 0) canvases.push(node);
      if (node.shadowRoot) visit(node.shadowRoot);
    }
  };
  visit(document);
  const colours = canvases.map(canvas => {
    const image = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const pixels = new Uint32Array(image.data.buffer);
    return new Set(pixels).size;
  });
  const models = [...Bokeh.documents[0]._all_models.values()];
  const words = models.find(m => m.type == "TextInput");
  const table = models.find(m => m.type == "DataTable");
  const shown = () => [...table.view.indices].length;
  if (!words.value) { window.all = shown(); words.value = "softmax"; return ""; }
  if (shown() == window.all) return "";
  const sections = document.querySelectorAll("section").length;
  return JSON.stringify({sections, colours, all: window.all, filtered: shown()});
})()
"""


@needs_browser
def test_a_real_browser_draws_the_page_without_a_network(page: Path, graph: Graph) -> None:
    seen = look(page, _LOOK)
    assert not seen.errors and not seen.requests
    assert seen.value["sections"] == 5
    assert sum(colours > 20 for colours in seen.value["colours"]) >= 3, "too few charts are drawn"
    computed = sum(len(op.writes) for op in graph.operators)
    assert seen.value["all"] == computed > seen.value["filtered"] > 0


@needs_browser
def test_errors_and_network_requests_of_a_page_are_seen(tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(
        "<img src='http://127.0.0.1:9/a.png'>"
        "<script>console.error('bad', 3); setTimeout(() => { window.done = 1; throw "
        "Error('oops') })</script>"
    )

    seen = look(
        tmp_path / "bad.html",
        "window.done ? JSON.stringify(navigator.onLine) : ''",
        tmp_path / "bad.png",
        width=300,
        height=200,
    )

    assert seen.errors[0] == "bad 3" and "oops" in seen.errors[1]
    assert (seen.requests, seen.value) == (["http://127.0.0.1:9/a.png"], False)
    assert (tmp_path / "bad.png").read_bytes().startswith(b"\x89PNG")
