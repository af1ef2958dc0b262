"""The table of all values in the HTML report.

Sortable by each column, filtered by text and by fate.
"""

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
from remat.look.html_charts import labelled
from remat.look.labels import shape_text, short_target

_FILTER = """
const text = words.value.toLowerCase(), is_all = fate.value == fate.options[0], data = source.data;
view.filter.booleans = data.fate.map((kind, i) => (is_all || kind == fate.value) && (!text ||
    ['value', 'module', 'operator', 'source']
        .some(name => data[name][i].toLowerCase().includes(text))));
"""

_ROW_HEIGHT = 24  # pixels
# cells are narrower than some of what they say; <%- escapes
_WHOLE_ON_HOVER = '<span title="<%- value %>"><%- value %></span>'


def value_table(graph: Graph, decisions: Sequence[Decision]) -> Any:
    """Returns the table of all values: sortable by each column, filtered by text and by fate."""
    units, scale = (
        Units.of(graph),
        Scale.for_largest(
            max((v.size_bytes for v in graph.values), default=1), Units.of(graph).size
        ),
    )
    ops, values = graph.operators, graph.values
    source = ColumnDataSource(
        {
            "value": [values[d.value].name for d in decisions],
            "module": [ops[d.operator].module for d in decisions],
            "operator": [short_target(ops[d.operator].target) for d in decisions],
            "shape": [shape_text(values[d.value].dtype, values[d.value].shape) for d in decisions],
            "source": [ops[d.operator].source for d in decisions],
            "size": np.array(
                [values[d.value].size_bytes / scale.factor for d in decisions], np.float32
            ),
            "fate": [str(d.fate) for d in decisions],
            "times": np.array([d.times for d in decisions], np.int32),
            "reason": [d.reason for d in decisions],
        }
    )
    number, text = (
        NumberFormatter(format="0,0.[000]", text_align="right"),
        HTMLTemplateFormatter(template=_WHOLE_ON_HOVER),
    )
    titles = {
        "value": ("value", 110), "module": ("module", 110), "operator": ("operator", 100),
        "shape": ("shape", 125),
        "source": ("source", 165), "size": (labelled("size", scale, units), 70),
        "fate": ("fate", 90),
        "times": ("computed", 72), "reason": ("why", 345),
    }  # fmt: skip
    columns = [
        TableColumn(field=name, title=title, width=width) for name, (title, width) in titles.items()
    ]
    for shown in columns:
        shown.formatter = number if shown.field in ("size", "times") else text
    view = CDSView(filter=BooleanFilter(booleans=[True] * len(decisions)))
    words = TextInput(placeholder="filter by name, module, operator or source", width=330)
    fate = Select(options=["all values", *Fate], value="all values", width=170)
    for widget in (words, fate):
        widget.js_on_change(
            "value",
            CustomJS(
                args={"source": source, "view": view, "words": words, "fate": fate}, code=_FILTER
            ),
        )
    height = min(440, _ROW_HEIGHT * (len(decisions) + 2))
    table = DataTable(
        source=source,
        view=view,
        columns=columns,
        index_position=None,
        height=height,
        sizing_mode="stretch_width",
        row_height=_ROW_HEIGHT,
    )
    return column(row(words, fate), table, sizing_mode="stretch_width")
