"""Autocast as CUDA does it, on a CPU: compared with torch's own on fake tensors of a GPU.

Without a GPU, torch runs forwards on them, but no backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import remat
from remat.torch_border.autocast_keys import operators_cast_for
from remat.torch_border.kernels import FakeTensorMode
from remat.tracers.cuda_autocast import POLICIES, cuda_autocast
from remat.tracers.devices import device as device_named
from remat.tracers.retarget import as_on_cuda

Tensor = torch.Tensor


def labels_of(x: Tensor) -> Tensor:
    return torch.zeros(len(x), dtype=torch.long, device=x.device)


# low: of the lower type, as a product returns it; wide: float32
CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "linear": lambda low, wide: F.linear(wide, low),
    "einsum": lambda low, wide: torch.einsum("ij,kj->ik", wide, low),
    "bmm": lambda low, wide: torch.bmm(wide.unsqueeze(0), low.unsqueeze(0)),
    "mv": lambda low, wide: torch.mv(wide, wide.select(0, 0)),
    "conv": lambda low, wide: F.conv1d(wide.unsqueeze(0), wide.unsqueeze(-1)),
    "conv padded": lambda low, wide: F.conv1d(wide.unsqueeze(0), low.unsqueeze(-1), padding="same"),
    "conv transposed": lambda low, wide: F.conv_transpose1d(wide.unsqueeze(0), wide.unsqueeze(-1)),
    "prelu": lambda low, wide: F.prelu(low, wide.select(0, 0)),
    "attention": lambda low, wide: F.scaled_dot_product_attention(wide, wide, wide),
    "layer norm": lambda low, wide: F.layer_norm(low, (8,), wide.select(0, 0), wide.select(0, 0)),
    "rms norm": lambda low, wide: F.rms_norm(low, (8,)),
    "group norm": lambda low, wide: F.group_norm(low, 2),
    "batch norm": lambda low, wide: F.batch_norm(low, None, None, training=True),
    "softmax": lambda low, wide: low.softmax(-1),
    "softmax of a type": lambda low, wide: torch.softmax(low, -1, dtype=torch.float64),
    "log softmax": lambda low, wide: low.log_softmax(-1),
    "log sum exp": lambda low, wide: low.logsumexp(-1),
    "cross entropy": lambda low, wide: F.cross_entropy(low, labels_of(low)),
    "mse": lambda low, wide: F.mse_loss(low, low),
    "l1": lambda low, wide: F.l1_loss(low, low),
    "cosine": lambda low, wide: F.cosine_similarity(low, low),
    "binary": lambda low, wide: F.binary_cross_entropy_with_logits(low, low),
    "pow": lambda low, wide: low.pow(2),
    "pow of a number": lambda low, wide: torch.pow(2.0, low),
    "rsqrt": lambda low, wide: low.rsqrt(),
    "exp": lambda low, wide: low.exp(),
    "log": lambda low, wide: low.log(),
    "softplus": lambda low, wide: F.softplus(low),
    "sum": lambda low, wide: low.sum(),
    "sum of a row": lambda low, wide: low.sum(-1),
    "mean": lambda low, wide: low.mean(),
    "cumsum": lambda low, wide: low.cumsum(-1),
    "prod": lambda low, wide: low.prod(),
    "norm": lambda low, wide: low.norm(),
    "norm of a row": lambda low, wide: low.norm(dim=-1),
    "vector norm": lambda low, wide: torch.linalg.vector_norm(low),
    "matrix norm": lambda low, wide: torch.linalg.matrix_norm(low),
    "normalize": lambda low, wide: F.normalize(low),
    "addcmul of both": lambda low, wide: torch.addcmul(low, low, wide),
    "addcmul": lambda low, wide: torch.addcmul(low, low, low),
    "dot of both": lambda low, wide: torch.dot(low.select(0, 0), wide.select(0, 0)),
    "scatter": lambda low, wide: wide.scatter_add(0, labels_of(wide).unsqueeze(0), low),
    "cat": lambda low, wide: torch.cat([low, wide]),
    "stack": lambda low, wide: torch.stack([low, low]),
    "add": lambda low, wide: low + wide,
    "gelu": lambda low, wide: F.gelu(low),
    "silu": lambda low, wide: F.silu(low),
    "pool": lambda low, wide: F.avg_pool3d(low.expand(1, 1, 2, 8, 8), 2, ceil_mode=True, padding=1),
    "upsample": lambda low, wide: F.interpolate(low.unsqueeze(0), scale_factor=2.0),
    "padding": lambda low, wide: F.pad(low.unsqueeze(0), (1, 1), mode="reflect"),
    "double": lambda low, wide: wide.double().softmax(-1),
    "integers": lambda low, wide: labels_of(low).sum(),
}  # fmt: skip


class Types(TorchDispatchMode):
    """Notes the types that each operator returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        dtypes = [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func.namespace == "aten":  # fake tensors call `prim.device`
            self.found.append((str(func), dtypes))
        return result


@contextmanager
def autocast_on(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Sets what `torch.autocast` would set; that refuses a GPU that is not there."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def types_on(device: str, dtype: torch.dtype, call: Callable[[Tensor, Tensor], Any]) -> Any:
    with FakeTensorMode(), torch.no_grad():
        low = torch.ones(8, 8, dtype=dtype, device=device)
        wide = torch.ones(8, 8, device=device)
        with autocast_on(device, dtype), Types() as noted:
            result = call(low, wide)
    return result.dtype, noted.found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_types_are_those_of_a_gpu(name: str, dtype: torch.dtype) -> None:
    (wanted, on_gpu) = types_on("cuda", dtype, CALLS[name])
    with cuda_autocast():
        (found, here) = types_on("cpu", dtype, CALLS[name])

    assert found == wanted
    if name not in ("attention", "batch norm", "rms norm"):  # the GPU has other kernels
        assert here == on_gpu


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a build of torch for CUDA")
@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["rms norm", "rms norm of both", "rms norm of one type"])
def test_rms_norm_is_that_of_a_gpu(name: str, dtype: torch.dtype, *, is_cast: bool) -> None:
    """Builds without CUDA decompose it on every device."""

    def types(device: str) -> Any:
        lower = torch.bfloat16 if dtype == torch.float32 else dtype
        with FakeTensorMode(), torch.no_grad(), Types() as noted:
            low = torch.ones(8, 8, dtype=dtype, device=device)
            wide = torch.ones(8, device=device)
            with autocast_on(device, lower) if is_cast else nullcontext():
                weight = {"rms norm": None, "rms norm of both": wide}.get(name, low.select(0, 0))
                return F.rms_norm(low, (8,), weight).dtype, noted.found

    with as_on_cuda(device_named("H100")):
        here = types("cpu")
    assert here == types("cuda")


def test_the_cpu_casts_as_before_afterwards() -> None:
    """Torch's own kernels are back, and the kernels that it did not have are gone."""

    def types() -> dict[str, Any]:
        refused = ("dot of both", "scatter")  # mixed types are refused if neither is cast
        calls = {name: call for name, call in CALLS.items() if name not in refused}
        return {name: types_on("cpu", torch.bfloat16, call) for name, call in calls.items()}

    before = types()
    with cuda_autocast():
        inside = types()

    assert types() == before
    assert sum(inside[name] != before[name] for name in before) > 20


def test_each_operator_that_torch_casts_for_has_a_policy() -> None:
    """A new version of torch may bring such an operator, which is then added to the lists."""
    named = {"Dimname", "dimname", "dim_Dimname", "dim_DimnameList", "names_ScalarOpt_dim"}
    found = {name for name in operators_cast_for("cuda") if name.partition(".")[2] not in named}
    assert found <= POLICIES, "named tensors, gone in torch 2.13, can't be captured"


def test_a_loss_that_a_gpu_refuses_is_refused() -> None:
    x = torch.full((4,), 0.5)
    with (
        cuda_autocast(),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"),
    ):
        F.binary_cross_entropy(x, x)


class Attentive(nn.Module):
    """Norms and a softmax between products."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.norm(self.first(x)).softmax(-1))
        return x.pow(2).mean()


@pytest.mark.usefixtures("fresh_torch")
def test_a_step_for_a_card_holds_what_its_autocast_makes() -> None:
    """On a CPU the norm and the softmax keep the lower type, of 2 bytes per element."""
    args = (torch.randn(1024, 64),)
    card, cpu = (
        remat.fits(
            Attentive(),
            args,
            device=device,
            optimizer="none",
            autocast=torch.bfloat16,
            time_limit_s=1,
        )
        for device in ("H100", "cpu")
    )

    def types_of(fit: remat.Fit, target: str) -> set[str]:
        graph = fit.graph
        return {
            graph.values[value].dtype
            for operator in graph.operators
            if operator.target == target
            for value in operator.writes
        }

    lower = "bfloat16"
    for target in ("aten.native_layer_norm.default", "aten._softmax.default"):
        assert "float32" in types_of(card, target)
        assert lower not in types_of(card, target)
    assert lower in types_of(card, "aten.addmm.default")
    assert lower in types_of(cpu, "aten._softmax.default")

    size_bytes = 1024 * 64
    assert card.keep_all.total > cpu.keep_all.total + 2 * size_bytes
    assert card.plain_bytes is not None and cpu.plain_bytes is not None
    assert card.plain_bytes > cpu.plain_bytes + 2 * size_bytes
