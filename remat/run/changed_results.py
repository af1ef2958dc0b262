"""Results that are changed in place before a backward that reads their memory.

To recompute a value, a plan may save the memory of a result, where plain PyTorch saves something
else. Autograd notices changes only of tensors that share a version counter with what was saved.
AOTAutograd and Inductor may return another tensor over the same memory, with its own counter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from remat.core.errors import TraceError
from remat.torch_border.allocator import abandon_node
from remat.torch_border.autograd import current_node, node_of_step, version_counter

_WATCHED = "_remat_watched"  # attribute of an autograd node: counters, with their values


class SharedResults(threading.local):
    """Which results of a compiled forward lie in memory that it saves for its backward.

    The forward of a thread calls `note`, and what calls the compiled function calls `watch`.
    """

    def __init__(self) -> None:
        self._places: dict[Hashable, tuple[int, ...]] = {}  # for each forward, the shared results
        self._storages: frozenset[int] = frozenset()

    def noted(
        self, run: Callable[[list[Any]], Any], num_results: int
    ) -> Callable[[list[Any]], Any]:
        """Returns a forward, which returns results and then what it saves, with `note`."""

        def noting(args: list[Any]) -> Any:
            results = run(args)
            self.note(run, results, num_results)
            return results

        noting._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd then passes a list
        return noting

    def note(self, forward: Hashable, results: Sequence[Any], num_results: int) -> None:
        """Notes the memory that results share with what is saved.

        Which results these are is the same in each call of `forward`.
        """
        if forward not in self._places:
            saved = set(map(_storage, results[num_results:])) - {None}
            self._places[forward] = tuple(
                place for place in range(num_results) if _storage(results[place]) in saved
            )
        storages = (_storage(results[place]) for place in self._places[forward])
        self._storages = frozenset(storage for storage in storages if storage is not None)

    def watch(self, results: Iterable[Any]) -> None:
        """Makes the backward of these results notice whether one was changed in place."""
        storages, self._storages = self._storages, frozenset()
        if not storages:
            return

        made = [result for result in results if isinstance(result, torch.Tensor)]
        node = node_of_step(made)
        if node is not None:
            counters = [version_counter(each) for each in made if _storage(each) in storages]
            setattr(node, _WATCHED, [(counter, counter._version) for counter in counters])


def refuse_changed_results() -> None:
    """Raises `TraceError` in a backward that reads the memory of a result that was changed."""
    for counter, version in getattr(current_node(), _WATCHED, ()):
        if counter._version != version:
            abandon_node()
            raise TraceError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a result of a planned step was changed before the step's "
                "backward, which recomputes values from it; change a clone() made outside of it"
            )


def _storage(value: Any) -> int | None:
    """Returns what identifies the memory of a tensor; None for what has none."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return int(value.untyped_storage()._cdata)
