"""Private names of torch's higher-order operators, which dynamo captures with graphs inside.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import compress
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.effects import with_effects  # 2.13
from torch._higher_order_ops.wrap import tag_activation_checkpoint  # 2.13
from torch._ops import HigherOrderOperator

_CUSTOM_FUNCTION = "autograd_function_apply"  # 2.13


def higher_order_operators(module: fx.GraphModule) -> Iterator[str]:
    """Yields the names of higher-order operators in a captured forward, nested ones included."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if isinstance(node.target, HigherOrderOperator):
                    yield node.target.name()


def is_custom_function(name: str) -> bool:
    """True for a `torch.autograd.Function` of the user's, as dynamo captures it."""
    return name == _CUSTOM_FUNCTION


def is_checkpointed_region(name: str) -> bool:
    """True for a `torch.utils.checkpoint.checkpoint`, as dynamo captures it."""
    return bool(name == tag_activation_checkpoint.name())


def make_tokens_inside(joint: fx.GraphModule, num_forward: int) -> int:
    """Changes a joint graph so that it makes its effect tokens itself, and returns none.

    Tokens order operators that have effects, such as checks. Inductor wants them inside of a graph,
    and AOTAutograd then neither passes nor expects them (`prims._make_token`, 2.13).

    Returns:
        How many of the first `num_forward` results were tokens.
    """
    graph, output = joint.graph, joint.graph.output_node()
    tokens = [node for node in graph.find_nodes(op="placeholder") if is_token(node)]
    for node in tokens:
        with graph.inserting_before(next(iter(node.users))):
            made = graph.call_function(torch.ops.prims._make_token.default)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)

    results: Any = output.args[0]
    stays = [not is_token(result) for result in results]
    output.args = (tuple(compress(results, stays)),)
    if "desc" in output.meta:
        output.meta["desc"] = list(compress(output.meta["desc"], stays))
    return stays[:num_forward].count(False)


def is_token(node: Any) -> bool:
    """True for an effect token of a joint graph, which is no tensor at run time."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "placeholder":
        return any(user.target is with_effects and user.args[0] is node for user in node.users)
    made_by = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    return isinstance(made_by, fx.Node) and made_by.target is with_effects


class Unpacked(fx.Interpreter):
    """Runs a captured forward with its checkpointed regions as plain calls.

    A region run as captured would be recomputed in the backward with other random numbers, since it
    is made for a compiler that handles these (`tag_activation_checkpoint`, 2.13).
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs a checkpointed region as the operators that it consists of."""
        if target is not tag_activation_checkpoint:
            return super().call_function(target, args, kwargs)
        region, *operands = args
        _, own = tag_activation_checkpoint.divide_kwargs(kwargs)
        if own:  # by name
            names = [node.target for node in region.graph.find_nodes(op="placeholder")]
            operands += [own[str(name)] for name in names[len(operands) :]]
        return Unpacked(region).run(*operands, enable_io_processing=False)


def run_unpacked(module: fx.GraphModule, operands: Any) -> Any:
    """Runs a captured forward as plain PyTorch."""
    with torch.enable_grad():
        return Unpacked(module).run(*operands, enable_io_processing=False)
