"""The HTML report's table of all values; sorts by any column, filters by text and fate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.layouts import column, row
from bokeh.models.callbacks import CustomJS
from bokeh.models.filters import BooleanFilter
from bokeh.models.sources import CDSView, ColumnDataSource
from bokeh.models.widgets.inputs import Select, TextInput
from bokeh.models.widgets.tables import (
    DataTable,
    HTMLTemplateFormatter,
    NumberFormatter,
    TableColumn,
)

from remat.analysis.decisions import Decision, Fate
from remat.core.graph import Graph
from remat.core.units import Scale, Units
from remat.look.labels import shape_text, short_target

_FILTER = """
const text = words.value.toLowerCase(), is_all = fate.value == fate.options[0], data = source.data;
view.filter.booleans = data.fate.map((kind, i) => (is_all || kind == fate.value) && (!text ||
    ['value', 'module', 'operator', 'source']
        .some(name => data[name][i].toLowerCase().includes(text))));
"""

_ROW_HEIGHT = 24  # pixels
# cells may be narrower than their text; <%- escapes
_WHOLE_ON_HOVER = '<span title="<%- value %>"><%- value %></span>'


def value_table(graph: Graph, decisions: Sequence[Decision]) -> Any:
    """Returns the table of all values, with fields to filter it above."""
    units = Units.of(graph)
    largest = max((v.size_bytes for v in graph.values), default=1)
    scale = Scale.for_largest(largest, units.size)
    source = _source(graph, decisions, scale)

    view = CDSView(filter=BooleanFilter(booleans=[True] * len(decisions)))
    table = DataTable(
        source=source,
        view=view,
        columns=_columns(scale.label("size", units.size)),
        index_position=None,
        height=min(440, _ROW_HEIGHT * (len(decisions) + 2)),
        sizing_mode="stretch_width",
        row_height=_ROW_HEIGHT,
    )

    return column(_filters(source, view), table, sizing_mode="stretch_width")


def _source(graph: Graph, decisions: Sequence[Decision], scale: Scale) -> ColumnDataSource:
    operators = [graph.operators[d.operator] for d in decisions]
    values = [graph.values[d.value] for d in decisions]

    return ColumnDataSource(
        {
            "value": [v.name for v in values],
            "module": [op.module for op in operators],
            "operator": [short_target(op.target) for op in operators],
            "shape": [shape_text(v.dtype, v.shape) for v in values],
            "source": [op.source for op in operators],
            "size": np.array([v.size_bytes / scale.factor for v in values], np.float32),
            "fate": [str(d.fate) for d in decisions],
            "times": np.array([d.times for d in decisions], np.int32),
            "reason": [d.reason for d in decisions],
        }
    )


def _columns(size_title: str) -> list[TableColumn]:
    titles = {
        "value": ("value", 110), "module": ("module", 110), "operator": ("operator", 100),
        "shape": ("shape", 125), "source": ("source", 165), "size": (size_title, 70),
        "fate": ("fate", 90), "times": ("computed", 72), "reason": ("why", 345),
    }  # fmt: skip

    number = NumberFormatter(format="0,0.[000]", text_align="right")
    text = HTMLTemplateFormatter(template=_WHOLE_ON_HOVER)

    columns = [
        TableColumn(field=name, title=title, width=width) for name, (title, width) in titles.items()
    ]
    for shown in columns:
        shown.formatter = number if shown.field in ("size", "times") else text

    return columns


def _filters(source: ColumnDataSource, view: CDSView) -> Any:
    words = TextInput(placeholder="filter by name, module, operator or source", width=330)
    fate = Select(options=["all values", *Fate], value="all values", width=170)
    arguments = {"source": source, "view": view, "words": words, "fate": fate}
    for widget in (words, fate):
        widget.js_on_change("value", CustomJS(args=arguments, code=_FILTER))
    return row(words, fate)
