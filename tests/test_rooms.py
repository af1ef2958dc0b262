"""Each room's README names its modules and what it may import, and the code keeps to that."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from remat.solvers.registry import FREE_ORDER, SOLVER_NAMES
from tests.support.checkout import ROOT

PARAGRAPH = r"\*\*`([\w/]+)`\*\*(.*?)(?=\*\*`|\n\n|\Z)"  # a folder in the README of the tests


def _modules() -> Iterator[tuple[str, Path]]:
    """Yields each module's dotted name and file."""
    for folder in ("remat", "solvers", "tracers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] in (("remat", "solvers"), ("remat", "tracers")):
                continue  # links to the top-level folders

            yield ".".join(parts if parts[0] == "remat" else ("remat", *parts)), path


MODULES = dict(_modules())
ROOMS = {
    name.removesuffix(".__init__"): path.parent
    for name, path in MODULES.items()
    if path.name == "__init__.py"
}


def _room(module: str) -> str:
    """Returns the room that a module, or a name in one, lives in."""
    while module not in ROOMS:
        module = module.rpartition(".")[0]
    return module


def _imported(name: str, path: Path) -> set[str]:
    """Returns the rooms that a module imports at run time, without imports only for types."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []

    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")[: -node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            submodules = {f"{module}.{alias.name}" for alias in node.names}
            found |= (submodules & (set(MODULES) | set(ROOMS))) or {module}

    return {_room(module) for module in found if module.split(".")[0] == "remat"} - {_room(name)}


def _readme(room: str) -> str:
    return (ROOMS[room] / "README.md").read_text()


def _allowed(room: str) -> set[str]:
    sentence = re.search(r"^May import: (.*)\.$", _readme(room), re.MULTILINE)
    assert sentence is not None, f"{room}/README.md has no line «May import: ...»"
    return set(re.findall(r"`([\w.]+)`", sentence[1]))


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_what_its_readme_allows(room: str) -> None:
    own = {name: path for name, path in MODULES.items() if _room(name) == room}
    imported = {name: _imported(name, path) - {"remat"} for name, path in own.items()}

    assert set().union(*imported.values()) == _allowed(room), imported


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_readme_names_every_module(room: str) -> None:
    stems = {path.stem for name, path in MODULES.items() if _room(name) == room} - {
        "__init__",
        "__main__",
    }

    tables = [
        block for block in _readme(room).split("\n\n") if re.match(r"\| (module|room)", block)
    ]
    rows = [line for table in tables for line in table.splitlines()]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    inside = {name.rpartition(".")[2] for name in ROOMS if name.rpartition(".")[0] == room}

    assert stems <= named
    assert named <= stems | inside


def test_the_readme_of_the_tests_names_every_file() -> None:
    text = (ROOT / "tests" / "README.md").read_text()
    blocks = {match[1]: match[2] for match in re.finditer(PARAGRAPH, text, re.DOTALL)}
    rooms = {path.parent for path in (ROOT / "tests").rglob("*.py")} - {ROOT / "tests"}
    assert {room.relative_to(ROOT / "tests").as_posix() for room in rooms} >= set(blocks)

    for room in rooms:
        stems = {path.stem.removeprefix("test_") for path in room.glob("[!_]*.py")}
        if stems:
            named = set(re.findall(r"`(\w+)`", blocks[room.relative_to(ROOT / "tests").as_posix()]))
            assert stems <= named, room


def test_the_readme_of_the_solvers_names_every_solver() -> None:
    rows = re.findall(r"^\| (`[a-z][\w`, -]*`) \|", _readme("remat.solvers"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert {*SOLVER_NAMES, FREE_ORDER} <= named


def test_no_two_rooms_import_each_other() -> None:
    needs = {room: _allowed(room) for room in ROOMS}

    while needs:
        free = {room for room, needed in needs.items() if not needed & set(needs)}
        assert free, f"these import each other: {needs}"
        needs = {room: needed for room, needed in needs.items() if room not in free}


def test_every_experiment_describes_itself() -> None:
    """Naive: `--help` is taken for a name, and the script measures for an hour."""
    read_as_they_are = [
        path.name
        for path in sorted((ROOT / "experiments").rglob("*.py"))
        if "sys.argv" in path.read_text()
    ]
    assert read_as_they_are == []
