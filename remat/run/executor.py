"""Runs a rewritten graph operator by operator, as one plain Python function.

Inputs are passed in a list that is emptied, so that each is freed after its last use; each variable
is deleted right after its last use; an operator's outputs are unpacked at once, and those that are
not used are dropped.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from remat.run.bindings import Bindings

BoxedFunction = Callable[[list[Any]], Any]


def compile_graph(module: fx.GraphModule) -> BoxedFunction:
    """Returns a function that runs `module`'s graph on a list of inputs, which it empties.

    No variable outlives its last use, so its peak is the one that the simulator computes.
    """
    writer = _Source(module)
    namespace = writer.constants
    exec(
        compile(writer.write(), f"<remat step of {len(module.graph.nodes)} nodes>", "exec"),
        namespace,
    )

    function: Any = namespace["run"]
    function._boxed_call = True  # tells AOTAutograd to pass the inputs in a list
    return function  # type: ignore[no-any-return]


class _Source:
    """Collects the source text of one function and the objects that it refers to."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.constants: dict[str, Any] = {}
        self.bindings = Bindings()
        self.name_of_object: dict[int, str] = {}
        self.lines: list[str] = []
        self.last_user = _last_users(module.graph)

    def write(self) -> str:
        graph = self.module.graph
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.lines = ["def run(args):"]
        if inputs:
            self.lines.append(f"    [{', '.join(map(_variable, inputs))}] = args")
        self.lines.append("    args.clear()")
        unused = [node for node in inputs if node not in self.last_user]
        self._delete(unused)

        for node in graph.nodes:
            if node.op == "call_function" and not _is_unpacked_part(node):
                self._call(node)
            elif node.op == "get_attr":
                self.lines.append(
                    f"    {_variable(node)} = "
                    f"{self._constant(getattr(self.module, str(node.target)))}"
                )
            elif node.op == "output":
                self.lines.append(f"    return {self._expression(node.args[0])}")

        return "\n".join(self.lines)

    def _call(self, node: fx.Node) -> None:
        arguments = [self._expression(argument) for argument in node.args]
        arguments += [
            f"{name}={self._expression(argument)}" for name, argument in node.kwargs.items()
        ]
        call = f"{self._constant(self.bindings.of(node))}({', '.join(arguments)})"

        parts = [user for user in node.users if _is_unpacked_part(user)]
        if parts and len(parts) == len(node.users):
            self._unpack(node, parts, call)
        else:
            self.lines.append(f"    {_variable(node)} = {call}")

        dead = [source for source in node.all_input_nodes if self.last_user.get(source) is node]
        self._delete([*dead, *([] if parts or node in self.last_user else [node])])

    def _unpack(self, node: fx.Node, parts: list[fx.Node], call: str) -> None:
        """Unpacks the parts that are used; the others are freed at once, like the tuple."""
        first: dict[Any, fx.Node] = {}
        for part in parts:
            first.setdefault(part.args[1], part)

        count = len(node.meta["val"])
        names = [_variable(first[i]) if i in first else "_" for i in range(count)]
        self.lines.append(f"    {', '.join(names)}{',' if count == 1 else ''} = {call}")
        if "_" in names:
            self.lines.append("    del _")

        self.lines += [
            f"    {_variable(part)} = {_variable(first[part.args[1]])}"
            for part in parts
            if first[part.args[1]] is not part
        ]
        self._delete([part for part in parts if part not in self.last_user])

    def _delete(self, nodes: list[fx.Node]) -> None:
        if nodes:
            self.lines.append(f"    del {', '.join(_variable(node) for node in nodes)}")

    def _constant(self, thing: Any) -> str:
        name = self.name_of_object.get(id(thing))
        if name is None:
            name = self.name_of_object[id(thing)] = f"c{len(self.constants)}"
            self.constants[name] = thing
        return name

    def _expression(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return _variable(argument)

        if isinstance(argument, list | tuple):
            if not any(isinstance(item, fx.Node | list | tuple) for item in argument):
                return self._constant(argument)
            items = [self._expression(item) for item in argument]
            return (
                f"[{', '.join(items)}]"
                if isinstance(argument, list)
                else f"({', '.join(items)}{',' if len(items) == 1 else ''})"
            )

        if isinstance(argument, dict):
            return (
                "{"
                + ", ".join(
                    f"{name!r}: {self._expression(item)}" for name, item in argument.items()
                )
                + "}"
            )

        if argument is None or isinstance(argument, bool | int | str):
            return repr(argument)
        return self._constant(argument)


def _variable(node: fx.Node) -> str:
    return f"v_{node.name}"


def _is_unpacked_part(node: fx.Node) -> bool:
    """True for a `getitem` on an operator's outputs, which are unpacked when it runs."""
    source = node.args[0] if node.target is operator.getitem else None
    return (
        isinstance(source, fx.Node)
        and source.op == "call_function"
        and isinstance(source.meta.get("val"), list | tuple)
    )


def _last_users(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
    return last
