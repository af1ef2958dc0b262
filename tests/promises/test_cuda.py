"""What only a CUDA device can show. Skipped elsewhere, with the reason.

`experiments/gpu_run.py` measures at real sizes.
"""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import remat
from remat.tracers.attention_choice import Attention, chosen_kernel
from remat.tracers.cache import DiskCache
from remat.tracers.calls import Call
from remat.tracers.devices import local_device
from remat.tracers.profiled import Profile
from remat.tracers.workspace import workspace_bytes

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none here"
    ),
]

_QUICKLY: dict[str, Any] = {"time_limit_s": 3.0}


class Tower(nn.Module):
    """Layers with dropout that return a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mean square of the last layer."""
        for layer in self.layers:
            x = x + self.dropout(nn.functional.gelu(layer(x)))
        return x.pow(2).mean()


def _step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = model(x)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_dropout_is_replayed_on_the_device(budget: str) -> None:
    torch.manual_seed(0)
    model, x = Tower().cuda(), torch.randn(4096, 512, device="cuda")
    plain = copy.deepcopy(model)
    remat.checkpoint(model, budget, **_QUICKLY)

    (loss, gradients), (plain_loss, plain_gradients) = _step(model, x), _step(plain, x)
    torch.testing.assert_close(loss, plain_loss)
    for found, wanted in zip(gradients, plain_gradients, strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_measured_peak_is_within_the_budget() -> None:
    _step(Tower().cuda(), torch.randn(16, 512, device="cuda"))  # cuBLAS allocates its workspace
    before = torch.cuda.memory_allocated()

    torch.manual_seed(0)
    model, x = Tower().cuda(), torch.randn(16384, 512, device="cuda")
    remat.checkpoint(model, "60%", **_QUICKLY)
    _step(model, x)
    model.zero_grad(set_to_none=True)

    report = remat.report(model)
    held = torch.cuda.memory_allocated() - before
    measured = remat.measure(lambda: model(x).backward(), device="cuda")
    assert report.room is not None

    own_bytes = held + measured.peak_bytes
    assert own_bytes + report.room.library_bytes <= report.budget_bytes * 1.01
    assert abs(own_bytes - report.solution.peak_bytes) <= 0.01 * report.solution.peak_bytes


def test_a_plan_that_keeps_everything_is_not_remade_for_allocator_blocks() -> None:
    torch.manual_seed(0)
    model, x = Tower().cuda(), torch.randn(16384, 520, device="cuda")[:, :512].contiguous()
    remat.checkpoint(model, "100%", **_QUICKLY)
    _step(model, x)
    first = remat.report(model).solution

    _step(model, x)
    assert remat.report(model).solution is first
    assert remat.report(model).outside_bytes == 0


def test_inductors_kernels_hold_what_was_predicted() -> None:
    torch.manual_seed(0)
    model, x = Tower().cuda(), torch.randn(16384, 512, device="cuda")
    remat.checkpoint(model, "70%", **_QUICKLY, executor="inductor")
    for _ in range(2):  # the first also tries Triton's kernels, and is not measured
        _step(model, x)

    report = remat.report(model)
    assert report.kernels_peak_bytes is not None and report.cuda_peaks is not None
    assert report.cuda_peaks.requested_bytes <= report.kernels_peak_bytes
    assert report.kernels_peak_bytes <= 1.01 * report.cuda_peaks.requested_bytes


def test_the_three_peaks_are_those_of_the_step_alone() -> None:
    """What else is on the device does not count."""
    torch.manual_seed(0)
    beside = torch.ones(64 << 20, device="cuda")
    model, x = Tower().cuda(), torch.randn(16384, 512, device="cuda")
    remat.checkpoint(model, "80%", **_QUICKLY)
    _step(model, x)

    report = remat.report(model)
    peaks = report.cuda_peaks
    assert peaks is not None and beside.is_cuda
    assert peaks.requested_bytes <= peaks.allocated_bytes <= peaks.reserved_bytes
    assert peaks.allocated_bytes == report.measured_peak_bytes
    assert abs(peaks.allocated_bytes - report.solution.peak_bytes) <= (
        0.02 * report.solution.peak_bytes
    )


def test_without_a_budget_the_budget_is_what_the_gpu_has_free() -> None:
    torch.manual_seed(0)
    model, x = Tower().cuda(), torch.randn(4096, 512, device="cuda")
    remat.checkpoint(model, **_QUICKLY)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    _step(model, x)
    budget_bytes = remat.report(model).budget_bytes
    assert free_bytes - total_bytes // 8 <= budget_bytes <= total_bytes


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_recurrent_layers_in_cudnn_are_refused(executor: str) -> None:
    """They are planned where torch's own kernels run them."""
    x = torch.randn(3, 2, 4, device="cuda")
    for layer in (nn.LSTM, nn.GRU, nn.RNN):
        torch._dynamo.reset()
        model = nn.Sequential(layer(4, 32, num_layers=2)).cuda()
        remat.checkpoint(model, "100%", executor=executor, differentiate="all")
        with pytest.raises(remat.TraceError, match="on a GPU runs in cuDNN"):
            model(x)

    with torch.backends.cudnn.flags(enabled=False):
        torch._dynamo.reset()
        model = nn.Sequential(nn.LSTM(4, 32, num_layers=2)).cuda()
        plain = copy.deepcopy(model)
        remat.checkpoint(model, "100%", executor=executor, differentiate="all")

        for each in (model, plain):
            each(x)[0].square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_profile_measures_seconds_and_workspace(tmp_path: Path) -> None:
    model = Profile("cuda", store=DiskCache(tmp_path / "costs.json"))
    with FakeTensorMode():
        graph = make_fx(torch.mm)(*(torch.empty(512, 512, device="cuda") for _ in range(2))).graph
    (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)

    cost_s, workspace_bytes = model.measure(product)
    assert 0 < cost_s < 1
    assert workspace_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [60, 64, 128, 160, 192, 200, 256, 512])
def test_the_attention_kernel_is_the_one_that_this_card_chooses(
    width: int, dtype: torch.dtype
) -> None:
    """In a grid of value widths, lengths, masks, heads and dropout, with and without gradients."""
    capability = float("{}.{}".format(*torch.cuda.get_device_capability()))
    grid = product(
        (width, 128), ((64, 64), (64, 32), (1, 64), (64, 1)), ("", "mask", "causal"),
        ((4, 4), (4, 2), (4, 1)), (0.0, 0.1, 0.125), (True, False), (True, False),
    )  # fmt: skip
    wrong = []
    for case in grid:
        of_value, (queries, keys), kind, (heads, of_key), dropout_p, enable_gqa, is_trained = case
        made: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
        query = torch.zeros(2, heads, queries, width, requires_grad=is_trained, **made)
        key = torch.zeros(2, of_key, keys, width, **made)
        value = torch.zeros(2, of_key, keys, of_value, **made)
        mask = torch.zeros(queries, keys, **made) if kind == "mask" else None
        options = (mask, dropout_p, kind == "causal")

        chosen = torch._fused_sdp_choice(query, key, value, *options, enable_gqa=enable_gqa)
        found = chosen_kernel(Attention(capability, query, key, value, *options, enable_gqa))
        if found != ("math", "flash", "efficient", "cudnn")[chosen]:
            wrong.append((case, found, chosen))
    assert not wrong


class Normed(nn.Module):
    """Attention between two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.last = nn.Linear(64, 192), nn.Linear(64, 1)
        self.norm, self.rms_norm = nn.LayerNorm(64), nn.RMSNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(self.norm(x)).view(2, 48, 3, 2, 32).unbind(2)
        q, k, v = (head.transpose(1, 2) for head in heads)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        mixed = mixed.transpose(1, 2).reshape(2, 48, 64)
        return self.last(self.rms_norm(mixed)).float().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_made_without_this_card_is_the_one_that_is_made_on_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Normed().to(dtype), torch.randn(2, 48, 64, dtype=dtype)
    name = local_device().name
    own = remat.trace(copy.deepcopy(model).cuda(), (x.cuda(),), device=name)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (0, 0))
    torch._dynamo.reset()
    assert remat.trace(model, (x,), device=name) == own


@pytest.mark.parametrize("heads_of_keys", [4, 2])
@pytest.mark.parametrize("width", [64, 40, 160])
def test_the_backward_of_flash_attention_holds_what_is_predicted(
    width: int, heads_of_keys: int
) -> None:
    made: dict[str, Any] = {"dtype": torch.float16, "device": "cuda"}
    query = torch.randn(8, 1000, 4, width, **made).transpose(1, 2)
    key = torch.randn(8, 1000, heads_of_keys, width, **made).transpose(1, 2)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    out, held, *lengths, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, key, 0.0, False, False
    )
    args = (query, query, key, key, out, held, *lengths, 0.0, False, seed, offset)

    torch.cuda.reset_peak_memory_stats()
    gradients = flash(*args)
    measured = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    predicted = workspace_bytes(Call.made(flash, args, {}, gradients), "cuda")
    assert abs(measured - predicted) <= 2 << 20, "blocks of CUDA's allocator"
