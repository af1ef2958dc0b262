"""Every family of architectures and `torch.nn` itself.

A planned step equals the plain one to the bit, or is refused with one clear error.

`experiments/coverage.py` does the same for all of them, at three budgets; this is a quick sample.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import remat
from experiments.comparison import is_same_step
from experiments.coverage_models import ARCHITECTURES, Architecture
from experiments.coverage_modules import module_cases
from experiments.models import Workload
from remat.run.plain_kernels import plain_kernels
from remat.solvers.core.on_demand import steps_on_demand
from remat.torch_border.kernels import FakeTensorMode
from tests.support.planned import UNLIMITED, planned

# One of each family that is quickly traced, and those that failed before a fix.
SAMPLE = (
    "Bloom",  # a custom autograd function, whose backward AOTAutograd does not mark
    "Funnel",  # slices of padded tensors, whose memory fake tensors forgot
    "Marian",
    "PVT",  # a dropout behind a transposed tensor
    "Mixtral",  # hooks that are installed under a lock
    "LFM2",
    "Audio Spectrogram Transformer",
    "U-Net, diffusion step",
    "GAN step",
    "PatchTST",  # batch norm of a transposed tensor
)
MODULES = (
    "nn.GRU",
    "nn.Softshrink",
    "nn.MultiMarginLoss",
    "nn.BatchNorm1d",
    "nn.GLU",
    "nn.Embedding",
    "nn.ReflectionPad3d",
)


pytestmark = pytest.mark.usefixtures("fresh_torch")


def keep_half(graph: remat.Graph) -> Sequence[int]:
    """Recomputes every other value, random ones too, so that a wrong replay shows."""
    return steps_on_demand(graph, [value for value in range(len(graph.values)) if value % 2])


def assert_is_plain(plain: Workload) -> None:
    """Two steps that keep half leave the plain loss, gradients, buffers and random state."""
    mine = Workload(planned(copy.deepcopy(plain.model), keep_half), plain.kwargs)
    assert all(is_same_step(mine, plain, seed) for seed in (1, 2))


def with_one_layer(name: str) -> Workload:
    """An architecture of the experiments, with one layer of each kind where it counts layers."""
    architecture = ARCHITECTURES[name]
    if not isinstance(architecture, Architecture) or "layer_types" in architecture.config:
        return architecture.make()
    counts = ("n_layer", "num_hidden_layers", "encoder_layers", "decoder_layers")
    fewer = {count: 1 for count in counts if count in architecture.config}
    return replace(architecture, config={**architecture.config, **fewer}).make()


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("name", SAMPLE)
def test_planned_architectures_equal_plain_ones(name: str) -> None:
    assert_is_plain(with_one_layer(name))


def test_a_part_of_transformers_may_be_imported_without_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A report: no model was planned unless `transformers.modeling_utils` was imported."""
    monkeypatch.setitem(
        sys.modules, "transformers.utils.output_capturing", ModuleType("output_capturing")
    )
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    assert remat.trace(nn.Linear(2, 2), (torch.ones(2, 2),), costs="flops").operators


@cache
def cases() -> dict[str, Callable[[], Workload]]:
    return dict(module_cases())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_planned_torch_nn_modules_equal_plain_ones(name: str) -> None:
    pytest.importorskip("expecttest", reason="PyTorch's module database needs expecttest")
    assert_is_plain(cases()[f"{name}, 0"]())


class Interpolated(nn.Module):
    """Interpolates up and down, which AOTAutograd computes from indices unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(images))
        x = F.interpolate(x, scale_factor=1.7, mode="bilinear", align_corners=False)
        x = F.interpolate(x.sin(), size=(5, 5), mode="bicubic")
        return F.softshrink(F.interpolate(x, scale_factor=2.0), 0.1).pow(2).mean()


def test_interpolation_runs_torchs_own_kernels() -> None:
    assert_is_plain(Workload(Interpolated(), {"images": torch.randn(2, 3, 7, 7)}))


class Recurrent(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 5, num_layers=2, dropout=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0].pow(2).mean()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:TF32")  # warned when oneDNN is turned off
def test_an_lstm_in_onednn_is_refused_and_torchs_own_is_planned() -> None:
    x = torch.randn(3, 2, 4)
    with torch.backends.mkldnn.flags(enabled=False):
        assert_is_plain(Workload(Recurrent(), {"x": x}))
    if torch.backends.mkldnn.is_available():
        with pytest.raises(remat.TraceError, match="oneDNN"):
            remat.checkpoint(Recurrent(), UNLIMITED, costs="flops")(x)


def test_an_lstm_in_cudnn_is_refused() -> None:
    """Fake tensors report no bytes for what cuDNN keeps."""
    with pytest.raises(remat.TraceError, match="LSTM on a GPU runs in cuDNN"):
        remat.trace(Recurrent(), (torch.randn(3, 2, 4),), device="H100")


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_a_recurrent_cell_that_a_gpu_fuses_is_refused_without_it(cell: type[nn.Module]) -> None:
    """Naive: the plan has the gates of the CPU, and is refused on the card."""

    class Celled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell(4, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.cell(x)
            return (hidden if isinstance(hidden, torch.Tensor) else hidden[0]).pow(2).mean()

    x = torch.randn(8, 4)
    assert remat.trace(Celled(), (x,), device="cpu").operators
    with pytest.raises(remat.TraceError, match=r"one fused kernel"):
        remat.trace(Celled(), (x,), device="H100")


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers_without_cudnn_are_refused_without_the_gpu(layer: type[nn.Module]) -> None:
    model = nn.Sequential(layer(4, 32))
    with (
        torch.backends.cudnn.flags(enabled=False),
        pytest.raises(remat.TraceError, match=r"one fused kernel"),
    ):
        remat.trace(model, (torch.randn(3, 2, 4),), device="H100", differentiate="all")


def test_plain_recurrent_layers_without_cudnn_are_traced_for_a_gpu() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        graph = remat.trace(
            nn.RNN(4, 32), (torch.randn(3, 2, 4),), device="H100", differentiate="all"
        )
    assert graph.device == "cuda"


def test_a_recurrent_cell_with_gates_of_partial_vectors_is_refused() -> None:
    """A capture lays the gates out in memory differently from plain PyTorch.

    Gradients differed in the last bit.
    """
    model = nn.Sequential(nn.GRU(4, 16, num_layers=2))
    with pytest.raises(remat.TraceError, match="multiple of 32 units"):
        remat.checkpoint(model, UNLIMITED, costs="flops", differentiate="all")(torch.randn(2, 8, 4))
    assert_is_plain(Workload(LastOfGRU(), {"x": torch.randn(2, 8, 4)}))


class LastOfGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(4, 32, num_layers=2, dropout=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0].sin().pow(2).mean()  # type: ignore[no-any-return]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, buffer)
        return x * x + buffer

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, buffer = ctx.saved_tensors
        buffer.add_(1)
        return 2 * x * gradients[0], None


class WritesInBackward(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Doubled.apply(self.linear(x), self.count)  # type: ignore[no-untyped-call]
        return result.sum()


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function:DeprecationWarning")  # dynamo's
def test_a_backward_that_changes_a_buffer_is_refused() -> None:
    with pytest.raises(remat.TraceError, match="backward of this step changes"):
        remat.checkpoint(WritesInBackward(), UNLIMITED, costs="flops")(torch.randn(2, 4))


aten = torch.ops.aten
_X = torch.randn(4, 3, 5, 6)
_STATISTICS = (torch.zeros(3), torch.ones(3))
CALLS: dict[Any, tuple[Any, ...]] = {
    aten.native_dropout_backward.default: (_X, _X > 0, 1.5),
    aten.softplus_backward.default: (_X, _X, 1, 20),
    aten.glu_backward.default: (torch.randn(4, 3, 5, 3), _X, -1),
    aten.mse_loss_backward.default: (_X, _X, _X.sin(), 0),
    aten.smooth_l1_loss_backward.default: (_X, _X, _X.sin(), 0, 1.0),
    aten.log_sigmoid_forward.default: (_X,),
    aten._log_softmax_backward_data.default: (_X, _X, 1, torch.float32),
    aten.native_batch_norm.default: (
        torch.randn(4, 3, 6),
        torch.ones(3),
        torch.zeros(3),
        *_STATISTICS,
        True,
        0.1,
        1e-5,
    ),
    aten.xlogy.Tensor: (_X, _X.exp()),
    aten.mse_loss.default: (_X, _X.sin(), 1),
    aten.upsample_bilinear2d_backward.default: (_X, [5, 6], [4, 3, 3, 4], False, None, None),
}


@pytest.mark.parametrize("transposed", [(-1, -2), (1, 3), (1, 2)])
@pytest.mark.parametrize("operator", CALLS, ids=str)
def test_fake_layouts_are_those_of_the_kernels(operator: Any, transposed: tuple[int, int]) -> None:
    """The first argument is not contiguous."""
    first, *rest = CALLS[operator]
    first = (
        first.transpose(*transposed[: first.dim()]).contiguous().transpose(*transposed)
        if first.dim() == 4
        else first.mT.contiguous().mT
    )

    real = operator(first, *rest)
    with plain_kernels(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = operator(
            *(
                mode.from_tensor(a, static_shapes=True) if isinstance(a, torch.Tensor) else a
                for a in (first, *rest)
            )
        )

    for got, want in zip(tree_leaves(fake), tree_leaves(real), strict=True):
        assert (got.shape, got.untyped_storage().nbytes()) == (
            want.shape,
            want.untyped_storage().nbytes(),
        )
        assert [s for s, n in zip(got.stride(), got.shape, strict=True) if n > 1] == [
            s for s, n in zip(want.stride(), want.shape, strict=True) if n > 1
        ]


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: torch.ops.aten.copy(x, torch.ones(x.shape)),
        lambda x: torch.ops.aten.slice_scatter(x, torch.ones(1, *x.shape[1:]), 0, 0, 1),
        lambda x: torch.ops.aten.select_scatter(x, torch.ones(x.shape[1:]), 0, 0),
        lambda x: torch.ops.aten.diagonal_scatter(x, torch.ones(min(x.shape))),
    ],
    ids=["copy", "slice", "select", "diagonal"],
)
@pytest.mark.parametrize("part", ["middle", "first rows", "last row", "columns", "repeated"])
def test_copying_a_view_copies_all_the_memory_it_spans(
    operator: Callable[[torch.Tensor], torch.Tensor], part: str
) -> None:
    """Circular padding uses these operators, whose fakes are as large as what the view spans."""
    whole = torch.randn(6, 8)
    views = {
        "middle": whole[1:3, 2:5],
        "first rows": whole[:2],
        "last row": whole[5:],
        "columns": whole.t()[1:4],
        "repeated": whole[:1, :1].expand(3, 4),
    }

    real = operator(views[part])
    with plain_kernels(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        memory = mode.from_tensor(whole, static_shapes=True)
        view = views[part]
        fake = operator(memory.as_strided(view.shape, view.stride(), view.storage_offset()))

    assert fake.shape == real.shape
    assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()
    assert (fake.stride(), fake.storage_offset()) == (real.stride(), real.storage_offset())


class DividesNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # two numbers, as in Longformer
        parts = int(torch.div(x.shape[0], 2, rounding_mode="trunc"))
        first: torch.Tensor = self.linear(x).tanh().chunk(parts)[0]
        return first.sum()


def test_an_operator_given_two_numbers_has_no_layout_to_correct() -> None:
    model = DividesNumbers()
    with plain_kernels(), FakeTensorMode():
        assert int(torch.div(32, 4, rounding_mode="trunc")) == 8
    assert remat.checkpoint(model, UNLIMITED, costs="flops")(torch.randn(4, 4)).requires_grad


def test_lazy_modules_are_refused_until_they_have_shapes() -> None:
    model, x = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(8, 8)
    with pytest.raises(remat.TraceError, match=r"run it once under torch.no_grad\(\)"):
        remat.trace(model, args=(x,), costs="flops")
    planned = remat.checkpoint(model, UNLIMITED, costs="flops")
    with pytest.raises(remat.TraceError, match=r"run it once under torch.no_grad\(\)"):
        planned(x)
