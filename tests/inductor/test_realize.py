"""Values are computed where the plan computes them, and products stay in their place."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx
from torch._inductor import inductor_prims
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
    assert targets(values_to_realize(graph, frozenset(), 0)) == [aten.gt.Scalar]


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


def sine_of_a_row(row: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return row.sin() * matrix


def test_a_value_that_a_much_larger_loop_reads_is_stored_if_there_is_room() -> None:
    """Naive: it is computed for each entry of the loop: a causal mask, for each head."""
    graph = graph_of(sine_of_a_row, torch.randn(8), torch.randn(64, 8))
    room = (8 + 2 * 64 * 8) * 4  # the sines, the matrix and the product
    assert targets(values_to_realize(graph, frozenset(), room)) == [aten.sin.default]
    assert values_to_realize(graph, frozenset(), room - 1) == []

    few_rows = graph_of(sine_of_a_row, torch.randn(8), torch.randn(4, 8))
    assert values_to_realize(few_rows, frozenset(), room) == []

    column = graph_of(sine_of_a_row, torch.randn(64, 1), torch.randn(64, 8))
    assert values_to_realize(column, frozenset(), room) == []  # once for each row


def test_a_value_made_from_nothing_is_never_stored_for_a_larger_loop() -> None:
    def function(matrix: torch.Tensor) -> torch.Tensor:
        return torch.arange(8) * matrix

    graph = graph_of(function, torch.randn(64, 8))
    assert values_to_realize(graph, frozenset(), 2**20) == []


def test_a_value_of_resident_inputs_may_be_computed_by_its_readers() -> None:
    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (weight > 0) * (x @ x @ x)

    graph = graph_of(function, torch.randn(8, 8), torch.randn(8, 8))
    (weight, *_) = graph.find_nodes(op="placeholder")
    assert values_to_realize(graph, frozenset([weight.name]), 0) == []
    assert aten.gt.Scalar in targets(values_to_realize(graph, frozenset(), 0))


def test_each_result_of_an_operator_is_held_until_its_own_last_reader() -> None:
    """Naive: the operator's tuple has no size, so its results count as nothing."""

    def function(x: torch.Tensor) -> torch.Tensor:
        values, indices = (x @ x).sort()
        mask = values > 0.5  # made from `values`, which would be held to the end
        return mask * (x @ x @ x).gather(1, indices)

    graph = graph_of(function, torch.randn(8, 8))
    room = 8 * 8 * (8 + 4 * 4)  # the indices, the values and three matrices
    assert values_to_realize(graph, frozenset(), room) == []
    assert aten.gt.Scalar in targets(values_to_realize(graph, frozenset(), room - 1))


def test_the_offsets_of_a_max_pool_are_stored_rather_than_its_input() -> None:
    """Naive: a pool is not seen as a loop, so its input counts as freed where it is held."""
    pool = inductor_prims._low_memory_max_pool_with_offsets

    def function(x: torch.Tensor) -> torch.Tensor:
        _, offsets = pool((x @ x)[None, None], [2, 2], [2, 2], [0, 0], [1, 1], False)
        result: torch.Tensor = offsets * (x @ x)[:4, :4]
        return result

    graph = graph_of(function, torch.randn(8, 8))
    assert targets(values_to_realize(graph, frozenset(), 0)) == [operator.getitem]


def test_parts_of_a_concatenation_have_memory_of_their_own_where_it_has_no_room() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([(x @ x).exp(), (x @ x @ x).exp()])

    graph = graph_of(function, torch.randn(8, 8))
    (x,) = graph.find_nodes(op="placeholder")
    room = 4 * 8 * 8 * 4  # the concatenation, from its first part on, beside two products
    assert values_to_realize(graph, frozenset([x.name]), room) == []
    apart = values_to_realize(graph, frozenset([x.name]), room - 1)
    assert targets(apart) == [aten.exp.default, aten.exp.default]


def test_a_part_that_a_library_operator_has_read_is_copied_in_any_case() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        part = (x @ x).exp()
        return torch.cat([part, part @ x @ x])

    graph = graph_of(function, torch.randn(8, 8))
    assert values_to_realize(graph, frozenset(), 0) == []


def test_the_workspace_of_an_operator_takes_room() -> None:
    graph = graph_of(mask_of_random_numbers, torch.randn(8, 8))
    room = 4 * 8 * 8 * 4
    assert values_to_realize(graph, frozenset(), room, lambda _: 0) == []
    assert values_to_realize(graph, frozenset(), room, lambda _: 1) != []


def test_what_a_library_operator_reads_is_stored_in_any_case() -> None:
    """Naive: its sources are held to its last reader, so that something else has to be stored."""

    def function(x: torch.Tensor) -> torch.Tensor:
        total = x @ x + x @ x.T
        return total * (total @ x @ x)

    assert values_to_realize(graph_of(function, torch.randn(8, 8)), frozenset(), 0) == []


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
