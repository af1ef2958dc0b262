"""Ctrl-C during a solve: the solve ends soon and returns the best it has.

A second Ctrl-C is what it always is. So is SIGTERM, unless the program has a handler of its own:
what that raises ends the threads of the solve too.

Python runs a signal's handler between two of its own instructions. HiGHS is asked to stop from its
callbacks, which are such instructions; compiled loops return several times a second. So the handler
only takes a note, no exception comes from the middle of anything, and search loops
read the note wherever they read the clock.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
_REASON = "interrupted by Ctrl-C"
_NOTE = threading.Event()  # signals belong to the process, and so does this


@dataclass
class Heeded:
    """What became of a solve.

    Attributes:
        cut_short: why it ended early, as a solution says it; empty before the end, and where
            nothing did.
    """

    cut_short: str = ""


@contextmanager
def heeding_interrupts() -> Iterator[Heeded]:
    """Turns the first Ctrl-C inside into a note, where it would have been a `KeyboardInterrupt`.

    Changes no handler outside of the main thread, inside another `heeding_interrupts`, and where
    the program has a handler of its own.
    """
    heeded = Heeded()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield heeded
        heeded.cut_short = _REASON if is_interrupted() else ""
        return
    signal.signal(signal.SIGINT, _take_note)
    try:
        yield heeded
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_interrupted():
            heeded.cut_short = _REASON
            _LOGGER.warning("interrupted: the solve ended with the best it had")
        _NOTE.clear()


def _take_note(*_: Any) -> None:
    _NOTE.set()
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def threads_beside(count: int) -> Iterator[Executor]:
    """Threads that end soon where an exception ends this one, such as a signal's handler raises.

    Where there is no memory for them, this thread does their work, one after the other.

    Naive: they are waited for until their own limits.
    """
    executor: Executor = ThreadPoolExecutor(count) if _may_start(count) else _Alone()
    is_heeded = is_interrupted()
    try:
        yield executor
    except BaseException:
        _NOTE.set()
        executor.shutdown(cancel_futures=True)
        if not is_heeded:
            _NOTE.clear()
        raise
    finally:
        executor.shutdown()


class _Alone(Executor):
    """Does at once what it is given."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as a thread would
            future.set_exception(error)
        return future


def _may_start(count: int) -> bool:
    is_over, started = threading.Event(), []
    try:
        for _ in range(count):
            thread = threading.Thread(target=is_over.wait)
            thread.start()
            started.append(thread)
    except RuntimeError as error:  # no memory for its stack
        _LOGGER.warning("the search runs in one thread: %s", error)
        return False
    finally:
        is_over.set()
        for thread in started:
            thread.join()
    return True


def is_interrupted() -> bool:
    """True from Ctrl-C, or an exception in the thread that solves, until the solve ends."""
    return _NOTE.is_set()


def is_past(deadline: float) -> bool:
    """True where `time.perf_counter` is past `deadline`, or Ctrl-C was pressed."""
    return is_interrupted() or time.perf_counter() > deadline


def until(items: Iterable[T], deadline: float) -> Iterator[T]:
    """Yields what `items` makes, and makes no more past the deadline.

    >>> list(until([1, 2], -1.0))
    []
    """
    rest = iter(items)
    while not is_past(deadline):
        try:
            yield next(rest)
        except StopIteration:
            return


def stop_when_interrupted(solver: Any) -> None:
    """Makes a `highspy.Highs` end at its next callback after Ctrl-C.

    Costs nothing that can be measured.
    """

    def stop(event: Any) -> None:
        if is_interrupted():
            event.interrupt()

    solver.cbSimplexInterrupt += stop
    solver.cbMipInterrupt += stop
