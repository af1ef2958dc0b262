"""Functions, argument lists and files stay short, except for those named here with a reason.

An exception that is no longer needed fails too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.checkout import ROOT

FOLDERS = ("remat", "tracers", "solvers")
MOST_LINES, MOST_PARAMETERS, MOST_LINES_OF_A_FILE = 40, 8, 400
Function = ast.FunctionDef | ast.AsyncFunctionDef

_COMMAND = "a command of typer: its options, with their help, are its parameters"
_OPTIONS = "the user's options, keywords with defaults that are written out"
LONG_FUNCTIONS = {
    "remat/cli/commands.py: trace": _COMMAND,
    "remat/cli/doctor_command.py: doctor": _COMMAND,
    "remat/cli/picture_commands.py: report": _COMMAND,
    "remat/cli/solver_commands.py: solve": _COMMAND,
    "remat/cli/solver_commands.py: sweep": _COMMAND,
    "remat/face/api.py: checkpoint": f"{_OPTIONS}, and are passed on one to a line",
}
LONG_ARGUMENT_LISTS = {
    "remat/cli/doctor_command.py: doctor": _COMMAND,
    "remat/cli/solver_commands.py: solve": _COMMAND,
    "remat/face/api.py: checkpoint": _OPTIONS,
    "remat/fit/fits.py: fits": _OPTIONS,
    "remat/fit/question.py: Question.of": "takes the options of `fits` as the user gave them",
}
LONG_FILES = {
    "solvers/bounds/benders.py": "the method, with its parts and papers, is in its docstring",
    "solvers/bounds/window.py": "the formulas of the model are in its docstring",
    "solvers/search/greedy_eviction.py": "numba compiles functions of one module together",
}


def _files() -> Iterator[tuple[str, str]]:
    """Yields the path of each module of the package, and its text."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT)
            if name.parts[:2] not in (("remat", "solvers"), ("remat", "tracers")):  # links
                yield name.as_posix(), path.read_text()


def _functions(node: ast.AST, inside: str = "") -> Iterator[tuple[str, Function]]:
    """Yields all functions in a syntax tree, also inner ones, by their dotted names."""
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, Function | ast.ClassDef):
            name = f"{inside}.{child.name}" if inside else child.name
        if isinstance(child, Function):
            yield name, child
        yield from _functions(child, name)


def _num_lines(function: Function) -> int:
    """The lines of a function from `def` to its end, without its docstring."""
    lines = _last_line(function) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - (_last_line(docstring) - docstring.lineno + 1)


def _last_line(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


def _num_parameters(function: Function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    others = sum(other is not None for other in (arguments.vararg, arguments.kwarg))
    return len(named) + others - bool(named and named[0].arg in ("self", "cls"))


FILES = dict(_files())
FUNCTIONS = {
    f"{path}: {name}": function
    for path, text in FILES.items()
    for name, function in _functions(ast.parse(text))
}


def assert_listed(counts: dict[str, int], most: int, reasons: dict[str, str]) -> None:
    """What is above the limit has a reason, and nothing else has one."""
    long = {name: count for name, count in counts.items() if count > most}
    assert set(long) == set(reasons), long


def test_functions_are_short_or_have_a_reason() -> None:
    lines = {name: _num_lines(function) for name, function in FUNCTIONS.items()}
    assert_listed(lines, MOST_LINES, LONG_FUNCTIONS)


def test_argument_lists_are_short_or_have_a_reason() -> None:
    counts = {name: _num_parameters(function) for name, function in FUNCTIONS.items()}
    assert_listed(counts, MOST_PARAMETERS, LONG_ARGUMENT_LISTS)


def test_files_are_short_or_have_a_reason() -> None:
    lines = {path: len(text.splitlines()) for path, text in FILES.items()}
    assert_listed(lines, MOST_LINES_OF_A_FILE, LONG_FILES)


def test_what_is_measured() -> None:
    tree = ast.parse(
        "class A:\n"
        "    def f(self, a, *b, c=1, **d):\n"
        '        """One.\n\n        Two.\n        """\n'
        "        def g() -> None:\n"
        "            return\n"
        "        return g\n"
    )
    found = dict(_functions(tree))
    assert {name: _num_lines(function) for name, function in found.items()} == {
        "A.f": 4,
        "A.f.g": 2,
    }
    assert {name: _num_parameters(function) for name, function in found.items()} == {
        "A.f": 4,
        "A.f.g": 0,
    }
