"""Annealing on the sequence: random moves (`moves`), each undone where it is not accepted.

Objective: cost (as a share of the keep-all cost) + weight * bytes over the budget (summed over
slots, as a share of the budget). The weight adapts so that 15 to 40 % of the states fit.

Near the least budget few states fit, and a run that leaves them does not find its way back. A
*close* run returns to the best it knows after `_PATIENCE` moves without a state that fits. With
more memory that keeps a run from exploring, so only some runs are close.

Simulated annealing (Kirkpatrick et al., 1983); sequences with recomputation as search space:
Moccasin (2023), FastSA (2023). It proves nothing. It is driven by iterations and its own random
stream, so a seed gives one answer on every machine, compiled or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from remat.core.graph import Graph
from remat.solvers.core.accounting import Floats, Ints
from remat.solvers.core.compiled import IS_COMPILED, compiled, copied, inner, is_ready
from remat.solvers.search.moves import MAX_CHANGES, change, draw, undo
from remat.solvers.search.sequence import OVER, ROOM, SLOT, SPACING, State, pack, steps_of
from remat.solvers.search.timeline import lay_out

# last temperature of most rounds, as a share of the keep-all cost; a prototype's (published graphs)
COLD = 1e-6
# moves between two looks at the clock, on graphs of so many operators, where they take some 0.03 s,
# or 0.3 s where they are not compiled (random graphs)
CHUNK = 20_000 if IS_COMPILED else 500
_USUAL_OPERATORS = 400
_NUM_DRAWS = 1 << 16  # random numbers per chunk, which begin again when used up; not measured
# the weight of bytes over the budget: shares (a prototype's) and kick were measured on published
# graphs; of the other numbers no measurement is on record
_PERIOD = 500  # moves between two changes of the weight
_MANY, _FEW = 0.4, 0.15  # shares of states that fit; above, the weight falls, below, it rises
_WEIGHT_FACTOR = 1.1  # by which it changes
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-4, 1_000  # above the latter nothing fits: it is reset to 1
_KICK = 100.0  # factor on the temperature then, so that the search leaves where it is stuck
_COOLING = 0.7  # factor on this factor, in each period after
# moves without a state that fits, after which the search returns to one that does (traced steps)
_PATIENCE = 1_000
# least weight of bytes over the budget when a close run starts from, or returns to, what fits
# (traced steps)
_WEIGHT_WHERE_IT_FITS = 100.0


@dataclass(frozen=True)
class Round:
    """Parameters of one annealing run.

    Attributes:
        iterations: number of moves tried.
        hot: first temperature, as a share of the keep-all cost.
        cold: last temperature.
        is_close: where the start fits, returns to the best fitting state after a while without one.
    """

    iterations: int
    hot: float
    cold: float
    is_close: bool = False


class Chunk(NamedTuple):
    """A part of a round, over which the temperature falls from `hot` to `cold`.

    Attributes:
        iterations: number of moves.
        patience: moves in a row without a state that fits, after which it ends.
        scale: the cost that all costs are shares of.
        draws: the random stream.
        journal: see `moves`.
        weight: (1,), weight of the bytes over the budget; adapted.
        best_slot: row `SLOT` of the best state that fits; overwritten by a better one.
        best: its cost, and the least bytes over the budget of any state.
    """

    iterations: int
    hot: float
    cold: float
    patience: int
    scale: float
    draws: Floats
    journal: Ints
    weight: Floats
    best_slot: Ints
    best: Floats


class Walk(NamedTuple):
    """What the loop knows of the state after a move.

    Attributes:
        cost_s, over: the state's cost, and its bytes over the budget.
        heat: factor on the temperature.
        num_fit: states that fitted in this period.
        since_fit: moves since a state that fitted.
    """

    cost_s: float
    over: int
    heat: float
    num_fit: int
    since_fit: int


@compiled
def anneal(state: State, chunk: Chunk) -> int:
    """Makes the chunk's moves, or fewer, and returns how many; `state` is then the last one."""
    walk = set_out(state)
    for step in range(chunk.iterations):
        change(state, chunk.draws, chunk.journal)
        walk = settle(state, chunk, walk, step)
        if walk.since_fit >= chunk.patience:
            return step + 1
    return chunk.iterations


@inner
def set_out(state: State) -> Walk:
    """Returns what is known before the first move."""
    return Walk(state.costs[-1], state.sums[OVER], 1.0, 0, 0)


@copied
def settle(state: State, chunk: Chunk, walk: Walk, step: int) -> Walk:
    """Accepts a move or undoes it, empties the journal, and adapts the weight now and then."""
    cost_s, over, heat, num_fit, since_fit = walk
    if chunk.journal[0, 0] > 0:
        temperature = heat * chunk.hot * (chunk.cold / chunk.hot) ** (step / chunk.iterations)
        if is_accepted(state, chunk, cost_s, over, temperature):
            cost_s, over = state.costs[-1], state.sums[OVER]
            chunk.journal[0, 0] = 0

            if over < chunk.best[1]:
                chunk.best[1] = over
            if over == 0 and cost_s < chunk.best[0] - 1e-9 * chunk.scale:
                chunk.best[0] = cost_s
                for q in range(len(chunk.best_slot)):  # a slice would create an array
                    chunk.best_slot[q] = state.slots[SLOT, q]
        else:
            undo(state, chunk.journal, 0)
            state.costs[-1], state.sums[OVER] = cost_s, over

    num_fit += over == 0
    since_fit = 0 if over == 0 else since_fit + 1
    if since_fit < chunk.patience and (step + 1) % _PERIOD == 0:
        heat, num_fit = adapt(chunk.weight, num_fit, heat), 0
    return Walk(cost_s, over, heat, num_fit, since_fit)


@inner
def is_accepted(state: State, chunk: Chunk, cost_s: float, over: int, temperature: float) -> bool:
    """True where the state is better than one of `cost_s` and `over`, else by chance."""
    per_byte = 1.0 / (SPACING * max(state.sums[ROOM], 1))
    rise = (state.costs[-1] - cost_s) / chunk.scale
    rise += chunk.weight[0] * per_byte * (state.sums[OVER] - over)
    return bool(rise <= 0 or draw(chunk.draws, chunk.journal) < np.exp(-rise / temperature))


@inner
def adapt(weight: Floats, num_fit: int, heat: float) -> float:
    """Adapts the weight to how many states of the last period fitted; returns the next heat."""
    if num_fit > _MANY * _PERIOD:
        weight[0] = max(weight[0] / _WEIGHT_FACTOR, _LEAST_WEIGHT)
    elif num_fit < _FEW * _PERIOD:
        weight[0] *= _WEIGHT_FACTOR
        if weight[0] > _MOST_WEIGHT:  # stuck: let it leave
            weight[0] = 1.0
            return _KICK
    return max(_COOLING * heat, 1.0)


class LocalSearch:
    """A search on one graph under one budget, run in rounds; holds the best steps that fit."""

    def __init__(
        self,
        graph: Graph,
        *,
        budget_bytes: int,
        seed: int,
        loop: Callable[..., int] = anneal,
        arguments: tuple[object, ...] = (),
    ) -> None:
        """Prepares the search; nothing runs yet.

        Args:
            graph: any graph.
            budget_bytes: resident bytes included.
            seed: of all rounds.
            loop: makes the moves of a chunk, as `anneal` does.
            arguments: what `loop` takes besides state and chunk.
        """
        self.graph = graph
        self.state = pack(graph, room=budget_bytes - graph.resident_bytes)
        self.random = np.random.default_rng(seed)
        self.weight = np.array([1.0])
        self.best_cost_s = np.inf
        self.best_steps: Ints | None = None
        self.least_over = np.inf
        self.loop, self.arguments = loop, arguments

    @property
    def is_ready(self) -> bool:
        """True where a round need not wait for the compiler, some 10 to 30 s once per machine."""
        return is_ready(self.loop)

    def run(
        self,
        steps: Ints,
        round_: Round,
        *,
        chunk: int = CHUNK,
        should_stop: Callable[[], bool] | None = None,
    ) -> Ints:
        """Anneals from `steps` and returns the last state; improves `best_steps` where it can.

        Args:
            steps: a valid sequence, within the budget or not.
            round_: length and temperatures.
            chunk: moves between two calls of `should_stop`, fewer on large graphs; the sequence is
                laid out again each time.
            should_stop: called without arguments between chunks; a true answer ends the round.
        """
        length = max(
            chunk * _USUAL_OPERATORS // max(self.graph.num_operators, _USUAL_OPERATORS), 100
        )
        current, done = np.asarray(steps, np.int64), 0
        fitting: Ints | None = None  # the sequence that a close run returns to

        while done < round_.iterations:
            state = lay_out(self.state, current)
            if done == 0 and round_.is_close and state.sums[OVER] == 0:
                fitting = self._returned_to(current)

            count = min(length, round_.iterations - done)
            patience = count if fitting is None else _PATIENCE
            moved, is_better = self._anneal(
                state, self._chunk(state, round_, done, count, patience)
            )

            current = steps_of(state.slots[SLOT], self.graph.num_operators)
            if fitting is not None and is_better:
                fitting = self.best_steps
            if fitting is not None and moved < count:
                current = self._returned_to(fitting)

            done += moved
            if should_stop is not None and should_stop():
                break
        return current

    def _returned_to(self, fitting: Ints) -> Ints:
        self.weight[0] = max(self.weight[0], _WEIGHT_WHERE_IT_FITS)
        return fitting

    def _chunk(self, state: State, round_: Round, done: int, count: int, patience: int) -> Chunk:
        """Returns `count` moves of a round in which `done` were made."""
        hot, cold = (
            round_.hot * (round_.cold / round_.hot) ** (moves / round_.iterations)
            for moves in (done, done + count)
        )

        return Chunk(
            iterations=count,
            hot=hot,
            cold=cold,
            patience=patience,
            scale=self.graph.cost_s or 1.0,
            draws=self.random.random(_NUM_DRAWS),
            journal=np.zeros((MAX_CHANGES, 2), np.int64),
            weight=self.weight,
            best_slot=state.slots[SLOT].copy(),
            best=np.array([self.best_cost_s, self.least_over]),
        )

    def _anneal(self, state: State, chunk: Chunk) -> tuple[int, bool]:
        """Returns how many moves were made, and whether they found better steps that fit."""
        moved = self.loop(state, chunk, *self.arguments)
        cost_s, self.least_over = chunk.best.tolist()
        if cost_s >= self.best_cost_s:
            return moved, False
        self.best_cost_s = cost_s
        self.best_steps = steps_of(chunk.best_slot, self.graph.num_operators)
        return moved, True
