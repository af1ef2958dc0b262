"""Factories of models and steps: every form is traced, and a wrong one is told in a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from remat.core.graph import Graph
from tests.support.command_line import Run, assert_refused

FACTORY = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        first, last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        self.layers = torch.nn.Sequential(first, torch.nn.ReLU(), last)

    def forward(self, x):
        return self.layers(x).sum()

def make():
    return Model(), (torch.randn(4, 8),)
"""


def test_trace_saves_a_graph_and_says_what_it_holds(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "factory_of_a_model.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    result = run("trace", "factory_of_a_model:make", "--output", "graph.json")
    assert result.exit_code == 0, result.stderr
    assert "backward" in result.stdout
    assert Graph.load("graph.json").num_operators > 4


FACTORIES = (
    FACTORY
    + """
def only():
    return Model()

def keywords():
    return Model(), {"x": torch.randn(4, 8)}

def both():
    return Model(), [], {"x": torch.randn(4, 8)}

def needs(path):
    return Model()

def raises():
    return helper()

def helper():
    raise FileNotFoundError("no config.yaml")

def exits():
    raise SystemExit("usage: train.py CONFIG")

def nothing():
    pass

def tensor():
    return Model(), torch.randn(4, 8)

def four():
    return Model(), (), {}, 4

def text():
    return Model(), (torch.randn(4, 8),), "text"

class Picky(Model):
    def forward(self, x):
        if x.shape[0] != 3:
            raise KeyError("a batch of three")
        return super().forward(x)

def picky():
    return Picky(), (torch.randn(4, 8),)

def wrong_shape():
    return Model(), (torch.randn(4, 9),)

def step():
    model, criterion = Model(), torch.nn.MSELoss()
    def train(x, *, target):
        return criterion(model.layers(x), target)
    return train, (torch.randn(4, 8),), {"target": torch.randn(4, 1)}

def given():
    return lambda model, x: model(x).sum(), (Model(), torch.randn(4, 8))

class Trainer:
    def __init__(self):
        self.model = Model()

    def step(self):
        return self.model(torch.ones(4, 8))

def method():
    return Trainer().step
"""
)


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_factories.py").write_text(FACTORIES)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train_it.py").write_text("from beside_it import make")
    (tmp_path / "folder" / "beside_it.py").write_text(FACTORY)
    (tmp_path / "broken_factory.py").write_text("import torch\nmake = torch.no_such_name\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    "factory",
    [
        "some_factories:make",
        "some_factories.py:make",
        "some_factories:keywords",
        "some_factories:both",
        "folder/train_it.py:make",
        "some_factories:step",
        "some_factories.py:method",
    ],
)
def test_factories_of_every_form_are_traced(run: Run, factory: str) -> None:
    result = run("trace", factory)
    assert result.exit_code == 0, result.stderr
    assert Graph.load("graph.json").num_operators > 4


@pytest.mark.usefixtures("factories")
def test_doctor_takes_keywords_and_step_functions(run: Run) -> None:
    for name in ("keywords", "step", "given"):
        result = run("doctor", f"some_factories:{name}", "--device", "H100", "--time-limit", "5")
        assert result.exit_code == 0, result.stderr
        assert "H100: fits" in result.stdout


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("only", ["missing a required argument: 'x'", "(model, args)"]),
        ("needs", ["missing a required argument: 'path'", "called without arguments"]),
        ("nothing", ["returned nothing", "(model, batch) with a dict"]),
        ("tensor", ["(model, a Tensor)", "(model, (x,))"]),
        ("four", ["(Model, tuple, dict, int)"]),
        ("text", ["returned a str as the keywords"]),
        ("wrong_shape", ["[4, 9] X [8, 8]", "(some_factories.py:"]),
    ],
)
def test_a_wrong_result_of_a_factory_is_refused_in_one_line(
    run: Run, name: str, parts: list[str]
) -> None:
    for command in ("trace", "doctor"):
        assert_refused(run(command, f"some_factories:{name}"), *parts)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("factory", "told"),
    [
        (
            "some_factories:raises",
            ["FileNotFoundError: no config.yaml", ", in helper", "raise FileNotFoundError"],
        ),
        ("some_factories:exits", ["usage: train.py CONFIG", ", in exits", "raise SystemExit"]),
        ("broken_factory:make", ["no_such_name", "broken_factory.py:2", "torch.no_such_name"]),
        ("broken_factory.py:make", ["no_such_name", "broken_factory.py:2", "torch.no_such_name"]),
    ],
)
def test_a_failing_factory_is_reported_in_three_lines(
    run: Run, factory: str, told: list[str]
) -> None:
    for command in ("trace", "doctor"):
        result = run(command, factory)
        lines = result.stderr.splitlines()
        assert (result.exit_code, len(lines)) == (2, 3), result.stderr
        for part, line in zip(told, lines, strict=True):
            assert part in line


@pytest.mark.usefixtures("factories")
def test_a_failing_step_names_its_line(run: Run) -> None:
    for command in ("trace", "doctor"):
        result = run(command, "some_factories:picky")
        first, place, line = result.stderr.splitlines()
        assert result.exit_code == 2
        assert "the step of some_factories:picky failed: KeyError: 'a batch of three'" in first
        assert "in forward" in place
        assert "raise KeyError" in line


@pytest.mark.parametrize(
    "factory",
    ["no_colon", "no_such_module:make", "json:nothing", ":make", "json:", "no_file.py:make"],
)
def test_trace_refuses_what_it_cant_find(run: Run, factory: str) -> None:
    assert_refused(run("trace", factory))
