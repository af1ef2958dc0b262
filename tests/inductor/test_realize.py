"""Values are computed where the plan computes them, and products stay in their place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from remat.inductor.realize import products_to_keep_apart, values_to_realize

aten = torch.ops.aten


def graph_of(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> fx.Graph:
    graph: fx.Graph = make_fx(function, tracing_mode="fake")(*tensors).graph
    return graph


def targets(nodes: list[fx.Node]) -> list[object]:
    return [node.target for node in nodes]


def mask_of_random_numbers(x: torch.Tensor) -> torch.Tensor:
    mask = x @ x > 0.5  # 1 byte per element, made from 4
    return mask * (x @ x @ x)


def test_a_mask_is_computed_before_its_source_is_freed() -> None:
    graph = graph_of(mask_of_random_numbers, torch.randn(8, 8))
    # and so is the result: otherwise both of its factors are held to the end
    assert targets(values_to_realize(graph, frozenset(), 0)) == [aten.gt.Scalar, aten.mul.Tensor]


def test_a_value_is_inlined_where_there_is_room_for_its_source() -> None:
    """Naive: it is stored at any budget, which kept ViT's softmax from what Inductor does alone."""
    graph = graph_of(mask_of_random_numbers, torch.randn(8, 8))
    matrix_bytes = 8 * 8 * 4
    room = 4 * matrix_bytes  # the source beside the last product and its two factors
    assert values_to_realize(graph, frozenset(), room) == []
    assert targets(values_to_realize(graph, frozenset(), room - 1)) == [aten.gt.Scalar]


def test_a_value_as_large_as_its_source_may_be_computed_by_its_readers() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).exp() @ x @ x

    assert values_to_realize(graph_of(function, torch.randn(8, 8)), frozenset(), 0) == []


def test_a_value_of_resident_inputs_may_be_computed_by_its_readers() -> None:
    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (weight > 0) * (x @ x @ x)

    graph = graph_of(function, torch.randn(8, 8), torch.randn(8, 8))
    (weight, *_) = graph.find_nodes(op="placeholder")
    assert values_to_realize(graph, frozenset([weight.name]), 0) == []
    assert aten.gt.Scalar in targets(values_to_realize(graph, frozenset(), 0))


def test_a_product_that_is_added_later_stays_in_its_place() -> None:
    """Naive: Inductor computes it as part of the addition, and holds both factors until then."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        early = x @ y
        return early + (y @ y).exp()

    (product,) = products_to_keep_apart(graph_of(function, torch.randn(8, 8), torch.randn(8, 8)))
    assert product.target is aten.mm.default
    assert {user.target for user in product.users} == {aten.add.Tensor}


def test_a_product_next_to_its_addition_is_part_of_it() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + x @ y

    assert products_to_keep_apart(graph_of(function, torch.randn(8, 8), torch.randn(8, 8))) == []
