"""Plans a step in pieces again, after its measured step held more than its budget."""

from __future__ import annotations

import logging
from collections.abc import Callable

from remat.core.budget import describe_bytes
from remat.pieces.recording import JoinedPlan, Path

_LOG = logging.getLogger(__name__)


def keep_within_budget(
    plans: dict[tuple[Path, int], JoinedPlan], install: Callable[..., JoinedPlan]
) -> None:
    """Plans again, with a smaller budget, each path that held more than its budget.

    What runs between the pieces, and a loss after them, may hold memory that no graph contains.

    Args:
        plans: the plan for each path and each size of gradients that earlier steps left.
        install: plans a path and adds its plan, see `Piecewise.install`.
    """
    for (path, held_bytes), plan in list(plans.items()):
        measured = plan.meter.tensor_bytes
        if measured is None or (path, held_bytes) not in plans:
            continue
        excess = plan.excess.of_all_ranks(max(0, measured - plan.allowed_bytes))
        if excess == 0:
            continue

        _LOG.warning(
            "the step held %s, which is %s more than its budget: what runs outside of its "
            "pieces is not planned; planning again with a smaller budget",
            describe_bytes(plan.allowed_bytes + excess),
            describe_bytes(excess),
        )

        for key in [key for key in plans if key[0] == path]:
            # plans for other sizes of gradients exceed it as much: they are made again on use
            del plans[key]

        # lowering the budget by no more than what is unused would give the same plan
        unused_bytes = max(0, plan.solution.budget_bytes - plan.solution.peak_bytes)
        install(
            path,
            plan.copies,
            plan.step,
            held_bytes,
            plan.unplanned_bytes + unused_bytes + excess,
        )
