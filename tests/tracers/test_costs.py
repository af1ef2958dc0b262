"""Cost models and the device table: figures that can be worked out by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import remat
from remat.plan.disk_cache import PlanCache, plans_path
from remat.tracers import devices, profiled
from remat.tracers.cache import DiskCache, cache_path
from remat.tracers.calls import Call
from remat.tracers.cost_models import flops, resolve_costs, roofline
from remat.tracers.costs import CostModel, Flops, OperatorCost
from remat.tracers.profiled import profile
from remat.tracers.synthetic import chain

pytestmark = pytest.mark.usefixtures("own_measurements")

aten = torch.ops.aten


def node_of(
    target: Any,
    function: Callable[..., Any],
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> torch.fx.Node:
    """The first node that calls `target` in a trace of `function` on fake tensors."""
    with FakeTensorMode():
        graph = make_fx(function)(*(torch.empty(shape, dtype=dtype) for shape in shapes)).graph
    found: torch.fx.Node = next(node for node in graph.nodes if node.target == target)
    return found


@pytest.mark.parametrize(
    ("target", "function", "shapes", "expected"),
    [
        (aten.mm.default, torch.mm, [(8, 16), (16, 32)], 2 * 8 * 16 * 32),
        (aten.addmm.default, torch.addmm, [(32,), (8, 16), (16, 32)], 2 * 8 * 16 * 32),
        (aten.bmm.default, torch.bmm, [(3, 8, 16), (3, 16, 32)], 3 * 2 * 8 * 16 * 32),
        (aten.mv.default, torch.mv, [(8, 16), (16,)], 2 * 8 * 16),
        (aten.add.Tensor, torch.add, [(8, 16), (16,)], 8 * 16),
        (aten.sum.default, torch.sum, [(8, 16)], 8 * 16),
        (aten.t.default, torch.t, [(8, 16)], 0),
        (
            aten.convolution.default, lambda x, w: F.conv2d(x, w, padding=1),
            [(2, 3, 9, 9), (5, 3, 3, 3)], 2 * 2 * 81 * 5 * 27,
        ),
        (
            aten.convolution.default, lambda x, w: F.conv2d(x, w, groups=6),
            [(2, 6, 9, 9), (6, 1, 3, 3)], 2 * 2 * 49 * 6 * 9,
        ),
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            F.scaled_dot_product_attention, [(2, 4, 16, 8)] * 3, 4 * 8 * 256 * 8,
        ),
    ],
)  # fmt: skip
def test_operators_have_their_textbook_flops(
    target: Any, function: Callable[..., Any], shapes: list[tuple[int, ...]], expected: int
) -> None:
    assert flops().measure(node_of(target, function, *shapes)).cost_s == expected


@pytest.mark.parametrize("groups", [1, 6])
def test_convolution_backward_costs_one_forward_per_gradient(groups: int) -> None:
    def backward(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> Any:
        return aten.convolution_backward(
            grad,
            x,
            weight,
            None,
            [1, 1],
            [0, 0],
            [1, 1],
            False,
            [0, 0],
            groups,
            [True, True, False],
        )

    node = node_of(
        aten.convolution_backward.default,
        backward,
        (2, 6, 9, 9),
        (6, 6 // groups, 3, 3),
        (2, 6, 7, 7),
    )
    assert flops().measure(node).cost_s == 2 * (2 * 2 * 49 * 6 * 9 * 6 // groups)


def test_roofline_is_arithmetic_or_traffic_and_a_launch() -> None:
    h100 = devices.device("h100")
    compute_bound = node_of(
        aten.mm.default, torch.mm, (4096, 4096), (4096, 4096), dtype=torch.bfloat16
    )
    assert roofline(h100).measure(compute_bound).cost_s == pytest.approx(
        2 * 4096**3 / 989.5e12 + h100.launch_s
    )

    memory_bound = node_of(aten.add.Tensor, torch.add, (4096, 4096), (4096,))
    assert roofline(h100).measure(memory_bound).cost_s == pytest.approx(
        (2 * 4096**2 + 4096) * 4 / 3.35e12 + h100.launch_s
    )


def test_drawing_random_numbers_takes_longer_than_moving_them() -> None:
    """Naive: a dropout costs its memory traffic, and plans recompute masks almost for free."""
    dropout = node_of(
        aten.native_dropout.default, lambda x: aten.native_dropout(x, 0.5, True), (1 << 20,)
    )

    for name in ("cpu", "H100"):
        device = devices.device(name)
        drawn_s = (1 << 20) / device.draws_per_s
        moved_s = 9 * (1 << 20) / device.bandwidth  # two floats and a byte of each element
        cost_s = roofline(name).measure(dropout).cost_s
        assert cost_s == pytest.approx(max(drawn_s, moved_s) + device.launch_s)
        assert drawn_s > moved_s


def test_expanded_inputs_are_read_once() -> None:
    node = node_of(
        aten.add.Tensor, lambda x, y: x + y.expand(512, 1024, 16), (512, 1024, 16), (16,)
    )
    h100 = devices.device("h100")
    assert roofline(h100).measure(node).cost_s == pytest.approx(
        (2 * 512 * 1024 * 16 + 16) * 4 / 3.35e12 + h100.launch_s
    )


def test_embedding_reads_rows_and_not_the_table() -> None:
    node = node_of(
        aten.embedding.default,
        lambda w: F.embedding(torch.zeros(7, dtype=torch.long), w),
        (100_000, 64),
    )

    h100 = devices.device("h100")
    assert roofline(h100).measure(node).cost_s == pytest.approx(
        (2 * 7 * 64 * 4 + 7 * 8) / 3.35e12 + h100.launch_s
    )


def test_views_are_free() -> None:
    node = node_of(aten.view.default, lambda x: x.view(16, 8), (8, 16))
    assert roofline("A100").measure(node) == (0.0, 0)


def test_a_thousand_operators_take_little_time() -> None:
    def chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(250):
            x = torch.softmax((x @ weight).sin() + x, -1)
        return x

    with FakeTensorMode():
        graph = make_fx(chain)(torch.empty(64, 64), torch.empty(64, 64)).graph
    model = roofline("H100")
    start = time.process_time()
    total = sum(model.measure(node).cost_s for node in graph.nodes)
    assert total > 0
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("name", ["h100", "H100 SXM", "h100_sxm"])
def test_device_names_forgive_case_and_spaces(name: str) -> None:
    assert devices.device(name) is devices.device("H100")


@pytest.mark.parametrize("name", devices.known_devices())
def test_every_device_has_sensible_figures(name: str) -> None:
    device = devices.device(name)
    assert 1e9 < device.fp32 <= device.flop_per_s(torch.float32, allow_tf32=True) < 1e16
    assert 1e9 < device.bandwidth < 1e14
    assert 0 < device.launch_s < 1e-3
    assert device.memory_bytes > 1e9
    assert device.source


def test_unknown_devices_are_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="H100"):
        devices.device("H1000")
    with pytest.raises(ValueError, match="profile"):
        devices.device_of_cuda_name("Quadro K600")


@pytest.mark.parametrize(
    ("cuda_name", "name"),
    [
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_a_name_that_cuda_gives_is_a_device_of_the_table(cuda_name: str, name: str) -> None:
    assert devices.device_of_cuda_name(cuda_name).name == name


def test_the_cpu_is_measured_once(tmp_path: Path) -> None:
    first = devices.device("cpu")
    devices._cpu.cache_clear()
    assert devices.device("CPU") == first
    assert list(tmp_path.glob("cpu-*.json"))


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), FakeTensorMode])
def test_the_cpu_is_measured_whatever_mode_is_on(mode: Callable[[], Any]) -> None:
    """Naive: tensors of the default device or mode, on which nothing takes any time."""
    with mode():
        cpu = devices.device("cpu")
    assert cpu.fp32 < 1e14
    assert cpu.launch_s < 1e-4


def test_a_user_without_a_home_has_no_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home(_: str) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr("platformdirs.user_cache_path", no_home)
    cache = DiskCache(cache_path("profile"))
    cache.put("key", (1.0,))
    assert cache.get("key", (0, 2)) == (1.0,)
    assert "can't be written" in caplog.text

    graph = chain(3)
    plans, solution = PlanCache(plans_path()), remat.solve(graph, "100%")
    assert plans.get_or_solve(graph, 100, "auto", lambda: solution) is solution


def test_a_cost_model_is_found_by_its_name() -> None:
    assert isinstance(resolve_costs("flops"), Flops)
    assert resolve_costs("roofline:H100").name == "roofline:H100"
    assert resolve_costs("roofline", "cpu").name == "roofline:cpu"

    model = flops()
    assert resolve_costs(model) is model
    with pytest.raises(ValueError, match="roofline"):
        resolve_costs("guess")

    assert resolve_costs("profile", "cpu").name == "profile:cpu"
    with pytest.raises(ValueError, match="measured"):
        resolve_costs("profile", "tpu")


def costs_of(
    model: CostModel, function: Callable[..., Any], *shapes: tuple[int, ...]
) -> dict[str, tuple[float, int]]:
    """What each operator of `function` costs, by its name."""
    with FakeTensorMode():
        graph = make_fx(function)(*(torch.empty(shape) for shape in shapes)).graph
    return {
        str(node.target): model.measure(node) for node in graph.nodes if node.op == "call_function"
    }


def test_profile_measures_seconds_and_workspace() -> None:
    costs = costs_of(
        profile("cpu"),
        lambda x, w: torch.native_dropout(x @ w, 0.5, True)[0].view(-1),
        (256, 512),
        (512, 512),
    )

    assert 0 < costs["aten.mm.default"][0] < 1
    assert costs["aten.mm.default"][1] == 0
    assert 0 < costs["aten.native_dropout.default"][0] < 1
    assert costs["aten.native_dropout.default"][1] == 256 * 512 * 4
    assert costs["aten.view.default"] == (0, 0)


def test_profile_gives_indices_that_are_in_range() -> None:
    def lookups(weight: torch.Tensor) -> torch.Tensor:
        index = torch.zeros(7, 5, dtype=torch.long)
        x = F.embedding(index, weight) + weight[index] + torch.gather(weight, 0, index)[:, :1, None]
        x = x.index_put((index[0],), weight[:1].sum()).scatter(0, index[:, :, None], x)
        return F.cross_entropy(x.flatten(0, 1), torch.zeros(35, dtype=torch.long))

    costs = costs_of(profile("cpu"), lookups, (11, 13))
    for name in (
        "embedding.default",
        "index.Tensor",
        "gather.default",
        "index_put.default",
        "scatter.src",
        "nll_loss_forward.default",
    ):
        assert costs[f"aten.{name}"][0] > 0


def test_profile_leaves_the_random_generator_alone() -> None:
    before = torch.get_rng_state()
    costs_of(profile("cpu"), lambda x: torch.native_dropout(x, 0.5, True)[0], (16, 16))
    assert torch.equal(torch.get_rng_state(), before)


def test_profile_runs_a_signature_once_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    first = profile("cpu")
    measured = costs_of(first, torch.mm, (16, 16), (16, 16))
    first.store.flush()
    monkeypatch.setattr(profiled, "timing_of", lambda *_: pytest.fail("it was measured before"))
    assert costs_of(profile("cpu"), torch.mm, (16, 16), (16, 16)) == measured


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_other_settings_of_torch_are_measured_separately() -> None:
    """They choose other kernels: convolutions without oneDNN hold all of their windows."""
    node = node_of(
        aten.convolution.default, torch.nn.functional.conv2d, (2, 8, 16, 16), (8, 8, 3, 3)
    )
    model = profile("cpu")
    onednn = model.measure(node)
    torch._C._set_mkldnn_enabled(False)
    try:
        native = model.measure(node)
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert native.workspace_bytes > onednn.workspace_bytes
    assert model.measure(node) == onednn


class Counted(CostModel):
    """Notes which calls it was asked for; the first one costs 1 s and 1 byte."""

    name = "counted"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def cost_of(self, call: Call) -> OperatorCost:
        self.calls.append(call)
        return OperatorCost(float(len(self.calls)), len(self.calls))


def on_cuda(node: torch.fx.Node) -> torch.fx.Node:
    """`node` as one of a trace on fake tensors of a GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for each in (node, *node.all_input_nodes):
            value = each.meta["val"]
            each.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="cuda")
    return node


@contextmanager
def set_to(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Holds a setting of torch at `value`; `monkeypatch` doesn't know how to restore it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


BACKENDS: Any = torch.backends


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
        (BACKENDS.cudnn.conv, "fp32_precision", "ieee"),
        (BACKENDS.cudnn, "enabled", False),
        (BACKENDS.cudnn, "benchmark", True),
        (BACKENDS.cudnn, "deterministic", True),
    ],
)
def test_costs_on_a_gpu_follow_the_settings_that_choose_its_kernels(
    owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: what the CPU's settings decide, so that TF32 leaves the times of a product alone."""
    product = node_of(aten.mm.default, torch.mm, (16, 16), (16, 16))
    model, there = Counted(), on_cuda(product)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(BACKENDS.cudnn, "version", lambda: 91900)

    first = model.measure(there)
    assert model.measure(there) == first
    assert model.workspace_of(Call.of(there)) == first.workspace_bytes
    with set_to(owner, name, value):
        assert model.workspace_of(Call.of(there)) == 0  # not measured with these settings
        assert model.measure(there) != first
    assert model.measure(there) == first
    assert len(model.calls) == 2


def test_costs_on_a_cpu_do_not_follow_the_settings_of_a_gpu() -> None:
    product = node_of(aten.mm.default, torch.mm, (16, 16), (16, 16))
    model = Counted()
    first = model.measure(product)
    with set_to(BACKENDS.cuda.matmul, "fp32_precision", "tf32"):
        assert model.measure(product) == first


def test_profile_estimates_what_cannot_be_run_alone(caplog: pytest.LogCaptureFixture) -> None:
    with torch.library._scoped_library("remat_tests", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: pytest.fail("a custom operator was run"), "CPU")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        costs = costs_of(profile("cpu"), lambda x: torch.ops.remat_tests.twice(x), (16, 16))
    assert costs["remat_tests.twice.default"][0] > 0
    assert "can't be run alone" in caplog.text


def test_a_broken_cache_is_ignored_and_rewritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cache.json"
    path.write_text('{"half": [1.0')
    cache = DiskCache(path)
    assert "can't be read" in caplog.text
    cache.put("key", (1.0, 2.0))
    assert DiskCache(path).get("key", (0, 2), (0, 2)) == (1.0, 2.0)


def test_an_unwritable_cache_stays_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "cache.json")
    cache.put("key", (1.0,))
    assert cache.get("key", (0, 2)) == (1.0,)
    assert "can't be written" in caplog.text


def test_two_writers_keep_each_others_entries(tmp_path: Path) -> None:
    one, other = DiskCache(tmp_path / "cache.json"), DiskCache(tmp_path / "cache.json")
    one.put("a", (1.0,))
    other.put("b", (2.0,))
    cache = DiskCache(tmp_path / "cache.json")
    assert [cache.get(key, (0, 2)) for key in "ab"] == [(1.0,), (2.0,)]
