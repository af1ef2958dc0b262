"""What is shown while work goes on: on a terminal, in redirected output, and in the log."""

from __future__ import annotations

import io
import logging
import os
import re
import threading
import time
from itertools import groupby

import pytest
import torch
from torch import nn

import remat
from remat.narration import stages, status_line
from remat.narration.stages import stage
from remat.narration.status_line import StatusLine
from remat.tracers.synthetic import transformer


class Terminal(io.StringIO):
    """A terminal that remembers all that was written."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are shown at once, and often."""
    monkeypatch.setattr(status_line, "FIRST_S", 0.0)
    monkeypatch.setattr(status_line, "_BETWEEN_LINES_S", 0.02)
    monkeypatch.setattr(stages, "_BETWEEN_LOOKS_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("RANK", "REMAT_PROGRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("quick")
def test_on_a_terminal_one_line_is_rewritten_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with stage("planning") as told:
        time.sleep(0.05)
        told.say("found +3 %")
        time.sleep(0.05)

    shown = terminal.getvalue()
    assert "\n" not in shown
    assert re.search(r"remat: planning \(\d+ s\)", shown)
    assert re.search(r"remat: planning: found \+3 % \(\d+ s\)", shown)
    assert shown.endswith("\r\x1b[K")


class Gone(Terminal):
    """A terminal that was closed, in the eyes of the kernel alone."""

    def write(self, _: str) -> int:
        raise OSError(5, "Input/output error")


class Tee:
    """What many programs put in the place of stderr."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("output", [Gone(), Tee()], ids=["gone", "tee"])
def test_work_goes_on_whatever_is_wrong_with_stderr(
    output: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", output)
    with stage("planning"):
        time.sleep(0.05)
        assert "remat-status" in {thread.name for thread in threading.enumerate()}


@pytest.mark.usefixtures("quick")
def test_redirected_output_has_lines_of_the_innermost_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    with stage("tracing"):
        with stage("timing operators"):
            time.sleep(0.1)
        time.sleep(0.1)

    lines = [re.sub(r" \(\d+ s\)", "", line) for line in file.getvalue().splitlines()]
    told = [line for line, _ in groupby(lines)]
    assert told[-2:] == ["remat: timing operators", "remat: tracing"]
    assert "\x1b" not in file.getvalue()


def test_nothing_is_shown_in_the_first_second(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("RANK", "REMAT_PROGRESS"):
        monkeypatch.delenv(name, raising=False)

    line = StatusLine()
    line.show("planning", 0.99)
    assert terminal.getvalue() == ""
    line.show("planning", 1.0)
    assert "remat: planning (1 s)" in terminal.getvalue()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("variable", [("RANK", "1"), ("REMAT_PROGRESS", "0")])
def test_other_ranks_and_users_who_turn_it_off_see_nothing(
    variable: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv(*variable)
    with stage("planning"):
        time.sleep(0.05)

    assert terminal.getvalue() == ""


@pytest.mark.usefixtures("quick")
def test_without_a_stderr_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    StatusLine().show("planning", 2.0)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    StatusLine().show("planning", 2.0)


def test_the_thread_ends_with_the_last_stage_and_starts_again() -> None:
    for _ in range(2):
        with stage("one"), stage("two"):
            assert _tellers() == 1
        ends_by = time.monotonic() + 2
        while _tellers() and time.monotonic() < ends_by:
            time.sleep(0.01)
        assert _tellers() == 0


def _tellers() -> int:
    return sum(thread.name == "remat-status" for thread in threading.enumerate())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_forked_process_shows_its_own_stages() -> None:
    with stage("of the parent"):
        child = os.fork()
        if child == 0:
            with stage("of the child"):
                os._exit(0 if _tellers() == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_log_says_what_was_captured_solved_and_planned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.GELU())
    with caplog.at_level(logging.INFO, logger="remat"):
        remat.checkpoint(model, "90%", costs="flops", plan_cache=False)
        model(torch.randn(16, 8)).sum().backward()

    said = [record.getMessage() for record in caplog.records]
    for begin, part in (
        ("captured ", " operators; their costs by flops took "),
        ("solving ", " operators within "),
        ("solved ", "% more compute, at least "),
        ("planned for 90%: the step holds ", "; keeping everything takes "),
    ):
        assert sum(text.startswith(begin) and part in text for text in said) == 1, said


@pytest.mark.usefixtures("quick")
def test_a_script_that_trains_shows_how_far_planning_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    remat.solve(transformer(3), "85%", time_limit_s=1.0, gap=0.0)
    assert "remat: planning " in terminal.getvalue()
    assert "found +" in terminal.getvalue()

    torch.manual_seed(0)
    remat.trace(nn.Sequential(nn.Linear(8, 8), nn.GELU()), (torch.randn(4, 8),))
    assert "remat: capturing the training step" in terminal.getvalue()


def test_a_second_progress_callback_keeps_the_first() -> None:
    heard: list[str] = []
    solver = remat.make_solver("auto", progress=lambda moment: heard.append("first"))
    graph = transformer(1)
    solver.telling(lambda moment: heard.append("second")).solve(graph, budget_bytes=10**9)
    assert set(heard) == {"first", "second"}

    plain = remat.make_solver("keep-all")
    assert plain.telling(lambda moment: None) is plain
