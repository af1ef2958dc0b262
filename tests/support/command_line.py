"""The type of the command line in tests, and the check of a refusal in one line."""

from __future__ import annotations

from collections.abc import Callable

from typer.testing import Result

Run = Callable[..., Result]


def assert_refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert not result.stdout
    for part in parts:
        assert part in result.stderr
