"""Fixtures of the command line: runs it in a folder of its own, with a saved chain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from remat.cli import commands
from remat.tracers.synthetic import chain
from tests.support.command_line import Run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(
        commands.app, [str(argument) for argument in arguments]
    )


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "chain.json"
    graph = chain(16)
    edges = [[u, v] for v, op in enumerate(graph.operators) for u in op.reads]
    path.write_text(
        json.dumps({"cost": [1] * 33, "size": [1] * 33, "edges": edges, "first_backward": 17})
    )
    return path
