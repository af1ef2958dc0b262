"""Floats that a forward returns and that change from step to step, computed in Python.

Changing floats are tensors in Inductor's graphs. A float that the forward returns, such as the new
value of an attribute (`self.scale *= 0.9`), would be made a constant, and each of its values would
need a plan. So these results are taken out of the graph, and computed from its inputs in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from remat.torch_border.higher_order import is_token
from remat.torch_border.scalars import before_floats_are_tensors


class FloatResults:
    """Takes the floats among a graph's results out of it, and adds them to what it returns."""

    def __init__(self) -> None:
        self._run: fx.GraphModule | None = None
        self._places: list[int] = []
        self._inputs: list[str] = []

    @contextmanager
    def taken_out(self) -> Iterator[None]:
        """Takes them out of what AOTAutograd captures in a `with` block."""
        with before_floats_are_tensors(self._take_out):
            yield

    def added(self, compile_half: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a compiler of halves whose forwards return the floats too."""

        def compile_with_floats(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
            names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
            compiled = compile_half(graph, inputs, **kwargs)
            if not self._places or kwargs.get("is_backward"):
                return compiled

            read = [names.index(name) for name in self._inputs]
            if hasattr(compiled, "current_callable"):
                compiled.current_callable = self._added(compiled.current_callable, read)
                return compiled
            return self._added(compiled, read)

        return compile_with_floats

    def _take_out(self, module: fx.GraphModule) -> None:
        output = module.graph.output_node()
        results: Any = output.args[0]
        floats = {place: each for place, each in enumerate(results) if _is_float(each)}
        if not floats:
            return

        self._run, self._inputs = _alone(list(floats.values()))
        _read_inputs(output, self._inputs)
        # effect tokens are no longer among the results when a half is compiled
        tokens = [place for place, each in enumerate(results) if is_token(each)]
        self._places = [place - sum(token < place for token in tokens) for place in floats]
        output.args = (tuple(None if i in floats else each for i, each in enumerate(results)),)

    def _added(self, run: Callable[..., Any], read: Sequence[int]) -> Callable[..., Any]:
        def run_with_floats(args: list[Any]) -> list[Any]:
            assert self._run is not None
            floats = self._run(*(args[place] for place in read))  # `run` frees its arguments
            results = list(run(args))
            for place, value in zip(self._places, floats, strict=True):
                results[place] = value
            return results

        run_with_floats._boxed_call = True  # type: ignore[attr-defined]
        return run_with_floats


def _read_inputs(output: fx.Node, names: Sequence[str]) -> None:
    """Adds products, read by nothing, with the floats that the inputs `names` hold.

    AOTAutograd turns floats that no operator on tensors reads into constants, and their inputs too.
    """
    graph = output.graph
    for node in graph.nodes:
        if node.target is torch.ops.aten._local_scalar_dense.default and node.args[0].name in names:
            with graph.inserting_before(output):
                product = graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], node))
            product.meta["val"] = node.args[0].meta["val"]


def _is_float(result: Any) -> bool:
    """True for a float, and for a tensor that dynamo makes from it, to read it from outside."""
    if not isinstance(result, fx.Node):
        return False
    if result.target is torch.ops.aten.scalar_tensor.default:
        return _is_float(result.args[0])
    return isinstance(result.meta.get("val"), torch.SymFloat)


def _alone(results: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[str]]:
    """Returns a graph that computes only `results`, and the names of its inputs."""
    graph, copies, waiting = fx.Graph(), dict[fx.Node, fx.Node](), list(results)
    while waiting:  # inputs come first
        node = waiting.pop()
        if node.op == "placeholder" and node not in copies:
            copies[node] = graph.placeholder(node.name)
        waiting += node.all_input_nodes
    names = [node.name for node in copies]

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    graph.output(tuple(map(copied, results)))
    return fx.GraphModule(torch.nn.Module(), graph), names
