"""Every Python block and command in the documents and in `--help` runs as written."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import joblib
import pytest
from typer.testing import CliRunner

import remat
from remat.cli import commands
from remat.core import serialize
from remat.tracers.synthetic import chain
from tests.support.checkout import ROOT

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("[!.]*/**/README.md")),
    *sorted(ROOT.glob("docs/*.md")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"`(remat \w+\s[^`|]+)`")
LIMIT = re.compile(r"(time_limit_s(?:=|\": ))[2-9](?:\.0)?")
EXAMPLE = re.compile(r"Example:  (remat .*)$", re.MULTILINE)
MAKE = re.compile(r"(?:^|`)make (\w+)", re.MULTILINE)
SHORTER = {
    "demo": ["--steps", "2"],
    "frontier": ["--points", "3", "--time-limit", "0.3"],
    "report": ["--points", "0"],
}
MODEL = """
import torch


class Net(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()


def make():
    net = Net(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    return net, (torch.zeros(16, 8),)
"""


def _blocks() -> list[tuple[str, str]]:
    paths = list(dict.fromkeys(DOCUMENTS))
    return [
        (f"{path.relative_to(ROOT)}-{i}", code)
        for path in paths
        for i, code in enumerate(BLOCK.findall(path.read_text()))
    ]


def _commands() -> list[str]:
    found = [command for path in DOCUMENTS for command in COMMAND.findall(path.read_text())]
    found += [
        example
        for command in commands.app.registered_commands
        for example in EXAMPLE.findall(command.callback.__doc__ or "")
    ]

    return sorted(
        {re.sub(r"\s+", " ", command).replace("[", "").replace("]", "") for command in found}
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the demo's GPT fewer layers and recordings, and every plan less time.

    What the documents show depends on none of these.
    """
    monkeypatch.setattr("remat.cli.demo.LAYERS", 2)
    monkeypatch.setattr("remat.cli.demo._RECORDINGS", 1)
    for planner in (remat.checkpoint, remat.solve):
        defaults = planner.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "time_limit_s", 1.0)


@pytest.mark.parametrize(("name", "code"), _blocks(), ids=[name for name, _ in _blocks()])
@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # lightning 2.6
def test_every_block_of_code_runs(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block is a module of its own: step functions find models through its globals."""
    module = types.ModuleType(f"block_{re.sub(r'[^a-z0-9]', '_', name.lower())}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    code = LIMIT.sub(r"\g<1>1.0", code.replace("/tmp/", f"{tmp_path}/"))
    exec(compile(code, name, "exec"), vars(module))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the commands name.

    Graphs, a plan, a curve, and a project with a model.
    """
    folder, graph = tmp_path_factory.mktemp("project"), chain(12)
    for name in ("graph", "a", "b"):
        graph.save(folder / f"{name}.json")

    plans = [remat.solve(graph, budget, solver="chen-greedy") for budget in ("60%", "80%")]
    plans[0].save(folder / "plan.json")
    for name in ("curve", "frontier"):
        serialize.save(plans, folder / f"{name}.json")

    (folder / "my_project").mkdir()
    for path in ("my_project/__init__.py", "my_project/model.py", "train.py"):
        (folder / path).write_text(MODEL)
    return folder


@pytest.mark.parametrize("command", _commands())
@pytest.mark.usefixtures("quick")
def test_every_command_runs(
    command: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "80")

    arguments = shlex.split(command.replace("/tmp/", f"{tmp_path}/"))[1:]
    arguments += SHORTER.get(arguments[0], [])
    with joblib.parallel_config("threading"):
        result = CliRunner().invoke(commands.app, arguments, catch_exceptions=False)
    for name in ("my_project", "my_project.model"):
        sys.modules.pop(name, None)

    assert result.exit_code == 0, result.output
    if "json" not in arguments:
        assert max(map(len, result.stdout.splitlines())) <= 80
        assert "\x1b" not in result.stdout
    if "--output" in arguments:
        assert Path(arguments[arguments.index("--output") + 1]).exists()


def test_every_make_command_has_a_recipe() -> None:
    named = {name for path in DOCUMENTS for name in MAKE.findall(path.read_text())}
    assert {"demo", "test"} <= named
    done = subprocess.run(
        ["make", "--dry-run", *sorted(named)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_documents_have_code_and_commands() -> None:
    assert sum(name.startswith("README.md") for name, _ in _blocks()) >= 2
    assert {command.split()[1] for command in _commands()} == {
        command.name or getattr(command.callback, "__name__", "")
        for command in commands.app.registered_commands
    }
