"""The order that free order must keep: which first computations come before which others.

First computations of a free-order schedule may come in any order in which

- an operator follows those whose values it reads;
- the forward comes before the backward, and each compiled piece (a run of operators of one region
  and phase) before the next; with several pieces, the first and last operator of each remain its
  first and last, so that a region may be recomputed in the same places as before;
- operators with effects keep their relative order: pinned ones, and those that read a
  snapshot (they draw random numbers, or read a buffer that is changed);
- the readers of a resident value, and of copies of it, stay on their side of any pinned operator
  that reads it too, as that operator may change the value.

The graph does not name effects, only pinned operators, so these rules are stricter than necessary.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from remat.core.graph import Graph
from remat.solvers.core.accounting import Bools, Ints


@dataclass(frozen=True)
class OrderRules:
    """The rules as lists in CSR form, one row per operator, without repetition.

    A graph with a forward and a backward in one region has one more row, the mark between the two.

    Attributes:
        earlier_start, earlier: the operators first computed before each.
        later_start, later: the operators first computed after each.
        is_fixed: True for the mark, and for the first and last operators of pieces in graphs of
            several regions; these keep their places.
    """

    earlier_start: Ints
    earlier: Ints
    later_start: Ints
    later: Ints
    is_fixed: Bools


def order_rules(graph: Graph) -> OrderRules:
    """Returns the rules of `graph`, in O(V + E)."""
    before = [set(parents) for parents in graph.parents_of]
    pieces, fixed = _pieces(graph), set[int]()

    if len({op.region for op in graph.operators}) > 1 or len(pieces) > 2:
        fixed.update(*((piece[0], piece[-1]) for piece in pieces))
        _keep_pieces(pieces, before)
    elif len(pieces) == 2:
        fixed.add(graph.num_operators)
        for index in pieces[1]:
            before[index].add(graph.num_operators)
        before.append(set(pieces[0]))
    _keep_effects(graph, before)

    is_fixed = np.isin(np.arange(len(before)), list(fixed))
    rows = [sorted(row) for row in before]
    start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=start[1:])
    earlier = np.array([a for row in rows for a in row], np.int64)

    of = np.repeat(np.arange(len(rows)), np.diff(start))
    later_start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.bincount(earlier, minlength=len(rows)), out=later_start[1:])
    return OrderRules(start, earlier, later_start, of[np.argsort(earlier, kind="stable")], is_fixed)


def _pieces(graph: Graph) -> list[range]:
    """Returns the runs of operators of one region and phase."""
    pieces, start = [], 0
    for _, run in groupby(graph.operators, key=lambda op: (op.region, op.phase)):
        end = start + len(list(run))
        pieces.append(range(start, end))
        start = end
    return pieces


def _keep_pieces(pieces: list[range], before: list[set[int]]) -> None:
    for piece in pieces:
        for index in piece[1:]:
            before[index].add(piece[0])
        before[piece[-1]].update(piece[:-1])
    for one, following in pairwise(pieces):
        before[following[0]].add(one[-1])


def _keep_effects(graph: Graph, before: list[set[int]]) -> None:
    of_snapshot = {value for op in graph.operators if op.is_snapshot for value in op.writes}
    effects = [
        i
        for i, op in enumerate(graph.operators)
        if op.pinned or not of_snapshot.isdisjoint(op.reads)
    ]

    for one, following in pairwise(effects):
        before[following].add(one)

    users = graph.users_of
    for index in effects:
        op = graph.operators[index]
        for value in op.reads if op.pinned and not op.is_snapshot else ():
            if not graph.values[value].is_resident:
                continue

            copies = [
                w
                for user in users[value]
                if graph.operators[user].pinned
                for w in graph.operators[user].writes
            ]

            for reader in {*users[value], *(u for w in copies for u in users[w])}:
                if reader < index:
                    before[index].add(reader)
                elif reader > index:
                    before[reader].add(index)
