"""Ctrl-C during a solve ends it soon, with the best found so far; a second Ctrl-C acts as usual.

SIGTERM acts as usual too. Where the program has a handler for it that raises an exception, the
solve's threads end as well.

Python runs a signal handler between two of its own instructions. HiGHS is stopped from its
callbacks, which are such instructions; compiled loops return several times a second. So the handler
only sets a flag, no exception is raised in the middle of a computation, and search loops poll the
flag wherever they check the deadline.
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
_NOTE = threading.Event()  # one per process, as signals are


@dataclass
class Heeded:
    """Whether Ctrl-C ended a solve.

    Attributes:
        cut_short: why the solve ended early, in the words of `Solution.cut_short`; empty before the
            end, and where the solve was not interrupted.
    """

    cut_short: str = ""


@contextmanager
def heeding_interrupts() -> Iterator[Heeded]:
    """Makes the first Ctrl-C inside set a flag instead of raising `KeyboardInterrupt`.

    The handler is left alone outside the main thread, inside another `heeding_interrupts`, and
    where the program has its own.
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
            _LOGGER.warning("interrupted: the solve ended with the best schedule so far")
        _NOTE.clear()


def _take_note(*_: Any) -> None:
    _NOTE.set()
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def threads_beside(count: int) -> Iterator[Executor]:
    """Yields an executor whose threads end soon when this thread raises, as in a signal handler.

    An exception sets the flag, so that the threads stop. Without that, leaving the block would wait
    for their time limits.
    Without memory for the threads, the calling thread does their work, one task after the other.
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
    """Runs each task at once, in the calling thread."""

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
    """True from Ctrl-C, or from an exception in the solving thread, until the solve ends."""
    return _NOTE.is_set()


def is_past(deadline: float) -> bool:
    """True where `time.perf_counter` is past `deadline`, or Ctrl-C was pressed."""
    return is_interrupted() or time.perf_counter() > deadline


def until(items: Iterable[T], deadline: float) -> Iterator[T]:
    """Yields from `items` until the deadline.

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
    """Makes a `highspy.Highs` end at its next callback after Ctrl-C, at no measurable cost."""

    def stop(event: Any) -> None:
        if is_interrupted():
            event.interrupt()

    solver.cbSimplexInterrupt += stop
    solver.cbMipInterrupt += stop
