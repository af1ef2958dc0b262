"""A traced step has the layouts that kernels return, in place or not.

`experiments/fake_kernels.py` looks at all of torch's operator database; here is a sample of it.
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.fake_kernels import PROMISES, RESULTS, Found, Row, search
from experiments.operator_calls import operators
from remat.tracers import layouts
from remat.tracers.calls import Call, TensorSpec
from remat.tracers.layouts import Layout, layouts_of
from remat.tracers.replay import results_of
from tests.support.planned import assert_same, keep_all, keep_nothing, planned

aten = torch.ops.aten
# Operators of the database for which the whole search lists results.
KNOWN = ("nn.functional.hardtanh", "nn.functional.elu", "logit", "nn.functional.logsigmoid")


def searched(names: set[str], dtypes: tuple[torch.dtype, ...]) -> Found:
    return search([info for info in operators() if info.name in names], dtypes, 1)


def wrong(rows: dict[str, Row], kinds: tuple[str, ...]) -> dict[str, str]:
    return {n: row.example for n, row in rows.items() if any(row.differ[kind] for kind in kinds)}


def test_the_search_finds_promises_that_torchs_kernels_do_not_keep() -> None:
    found = searched(set(KNOWN), (torch.float32,))
    assert wrong(found.promises, PROMISES[:1]).keys() >= {
        "aten.hardtanh_backward.default",
        "aten.elu_backward.default",
        "aten.logit_backward.default",
        "aten.log_sigmoid_forward.default",
    }
    assert not wrong(found.promises, PROMISES[1:])


def test_the_search_finds_complex_products_that_round_differently_in_place() -> None:
    found = searched({"mul", "add"}, (torch.complex64,))
    assert any("mul" in form for form in wrong(found.in_place, (str(torch.complex64),)))
    assert not wrong(found.in_place, ("allowed",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_operators_are_traced_with_the_layouts_of_their_kernels(dtype: torch.dtype) -> None:
    """The seed is fixed, so that the sample does not change from run to run."""
    names = sorted({info.name for info in operators()})
    found = searched(set(random.Random(7).sample(names, 10)), (dtype,))
    assert len(found.promises) > 10
    assert not wrong(found.promises, PROMISES[1:])
    assert not wrong(found.in_place, ("allowed",))


_X = torch.randn(40, 30, 20)
LARGE: dict[str, tuple[Any, ...]] = {
    "ties": (aten.hardtanh_backward.default, torch.randn(30, 40, 20).transpose(0, 1), _X, 0.0, 6.0),
    "an order": (aten._log_softmax_backward_data.default, _X.mT.contiguous().mT, _X, 1,
                 torch.float32),
    "several": (aten.native_layer_norm_backward.default, _X.mT.contiguous().mT, _X, [20],
                torch.randn(40, 30, 1), torch.rand(40, 30, 1), torch.ones(20), torch.ones(20),
                [True] * 3),
    "a longer memory": (aten.mse_loss.default, _X, _X.sin()),
    "gaps": (aten.select_scatter.default, torch.randn(40, 30, 40)[..., ::2], _X[:, 0], 1, 3),
    "a product": (aten.bmm.default, _X.mT, _X),
    "a window": (aten.constant_pad_nd.default, torch.randn(4, 20, 16, 12).mT, [9, 9, 3, 3], 0.0),
    "channels last": (aten.native_batch_norm.default,
                      torch.randn(20, 16, 12, 12).to(memory_format=torch.channels_last),
                      torch.ones(16), torch.zeros(16), None, None, True, 0.1, 1e-5),
    "one channel per sample": (aten.convolution.default, torch.randn(16, 16, 12, 12),
                           torch.randn(16, 16, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0],
                           1),
    "a convolution": (aten.convolution.default, torch.randn(20, 16, 12, 12),
                      torch.randn(8, 16, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "random": (aten.native_dropout.default, _X.mT, 0.5, True),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_a_layout_found_at_smaller_sizes_is_that_of_the_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, *args = LARGE[name]
    call = Call.made(target, args, {}, target(*args))
    real = results_of(call)
    assert real is not None

    monkeypatch.setattr(layouts, "SMALL_BYTES", 0)
    layouts_of.cache_clear()
    state = torch.get_rng_state()

    assert layouts_of(call) == tuple(map(Layout.of, real))
    assert torch.equal(state, torch.get_rng_state())
    layouts_of.cache_clear()


def test_kernels_are_not_misled_about_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: a smaller batch gets the lengths of all samples, and the kernel reads beyond it."""
    probabilities = torch.randn(50, 16, 20).log_softmax(2)
    targets, lengths = torch.ones(16, 30, dtype=torch.int64), ([50] * 16, [30] * 16)
    loss, alpha = aten._ctc_loss.default(probabilities, targets, *lengths)

    args = (torch.ones(16), probabilities, targets, *lengths, loss, alpha, 0)
    gradient = aten._ctc_loss_backward.default(*args)
    call = Call.made(aten._ctc_loss_backward.default, args, {}, gradient)

    monkeypatch.setattr(layouts, "SMALL_BYTES", 0)
    layouts_of.cache_clear()
    assert layouts._run_smaller(call) is None
    assert layouts_of(call) == (Layout.of(gradient),)
    layouts_of.cache_clear()


def test_a_call_too_large_to_run_is_run_at_a_smaller_size() -> None:
    """Each tensor would take eight gigabytes; nothing of that size is allocated."""
    rows = TensorSpec((1 << 12, 1 << 10, 1 << 9), (1 << 19, 1 << 9, 1), torch.float32)
    swapped = replace(rows, stride=(1 << 9, 1 << 21, 1))
    args = (swapped, 1.0, 1.0, 1.0, False, rows)
    found = layouts_of(Call(aten.elu_backward.default, args, (), (rows,)))
    assert found == (Layout(rows.shape, swapped.stride, torch.float32, rows.nbytes),)


def test_autocast_around_the_trace_casts_nothing() -> None:
    spec = TensorSpec((4, 4), (4, 1), torch.float32)
    layouts_of.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        found = layouts_of(Call(aten.mm.default, (spec, spec), (), (spec,)))
    assert found == (Layout((4, 4), (4, 1), torch.float32, spec.nbytes),)


class Behind(nn.Module):
    """An operator after a linear layer, and a transposition after it."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.linear, self.operator = nn.Linear(16, 32), operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.operator(self.linear(x)).transpose(0, 1).log_softmax(2)
        return result.pow(2).mean()


BEHIND: dict[str, Any] = {
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "elu": F.elu,
    "celu": F.celu,
    "logit": lambda t: t.sigmoid().logit(0.01),
    "logsigmoid": F.logsigmoid,
    "two": lambda t: F.hardtanh(F.relu(t), 0, 20),
}


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.usefixtures("fresh_torch")
def test_a_view_after_any_activation_can_be_made(name: str) -> None:
    """Naive: the gradient's view is traced for strides that its kernel does not return."""
    plain, x = Behind(BEHIND[name]), torch.randn(30, 2, 16)
    for steps_of in (keep_all, keep_nothing):
        torch._dynamo.reset()
        model = planned(copy.deepcopy(plain), steps_of)

        ends = []
        for each in (model, plain):
            each.zero_grad()
            each(x).backward()
            ends.append([p.grad for p in each.parameters()])
        assert_same(*ends)


def test_the_committed_search_found_nothing_traced_wrongly() -> None:
    record = json.loads(RESULTS.read_text())
    assert {"date", "commit", "seed", "processor", "packages"} <= set(record["environment"])

    promises, forms = record["promises"].values(), record["in_place"].values()
    assert len(promises) > 400
    totals = [sum(row["differ"][promise] for row in promises) for promise in PROMISES]
    assert totals[0] > 0
    assert totals[1:] == [0, 0]
    assert sum(row["differ"].get("allowed", 0) for row in forms) == 0
    text = RESULTS.with_suffix(".md").read_text()
    assert f"{totals[0]:,} results differ from torch's fake tensors" in text
