"""Will it fit: predictions without the device, against what a real training step holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import remat
from remat.cli.commands import app
from remat.fit.max_batch import _largest
from remat.fit.optimizer_memory import OPTIMIZERS, optimizer_memory
from remat.fit.question import Question
from remat.tracers import devices

WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, depth: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()  # type: ignore[no-any-return]


def batch_of(size: int) -> tuple[torch.Tensor]:
    return (torch.randn(size, 16, WIDTH),)


@pytest.fixture(scope="module")
def fit() -> remat.Fit:
    return remat.fits(Net(), batch_of(64), device="cpu", budget="60%")


class Remembers(nn.Module):
    """Stores what it computes, counts its calls, and registers a buffer."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.places: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.places is None:
            self.places = torch.arange(x.shape[1]).float()[:, None]
            self.register_buffer("mask", torch.ones(x.shape[1], 1), persistent=False)
        hidden: torch.Tensor = self.layer(x + self.places * self.mask)
        return hidden.square().mean()


def test_a_model_that_stores_what_it_computes_is_left_as_it_was() -> None:
    """Naive: it keeps fake tensors, and the next real step fails."""
    model = Remembers()
    before = {*vars(model), *model._buffers}
    remat.fits(model, batch_of(4), device="cpu", budget="1GiB", time_limit_s=0.5)
    assert model.places is None and model.calls == 0
    assert {*vars(model), *model._buffers} == before
    model(*batch_of(4)).backward()


def test_a_plan_within_the_budget_is_found_and_its_parts_sum_to_its_peak(fit: remat.Fit) -> None:
    assert fit and fit.planned is not None and fit.solution is not None
    assert (
        fit.planned.total
        == fit.solution.peak_bytes + fit.held.total
        <= fit.budget_bytes
        < fit.keep_all.total
    )
    assert fit.budget_bytes == int(0.6 * fit.keep_all.total)

    assert fit.bound_bytes <= fit.minimum_bytes <= fit.planned.total
    assert 0 < fit.overhead < 0.4

    model_bytes = sum(p.nbytes for p in Net().parameters())
    assert fit.planned.parameters == model_bytes == fit.held.gradient_bytes
    assert fit.planned.optimizer == optimizer_memory("adamw", Net().parameters()).state_bytes


def test_predicted_peak_is_what_training_holds(fit: remat.Fit) -> None:
    """A whole step of plain PyTorch, optimizer and its state included, on the CPU's allocator."""
    model, (x,) = Net(), batch_of(64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()

    state = sum(
        t.nbytes
        for s in optimizer.state.values()
        for t in s.values()
        if isinstance(t, torch.Tensor)
    )
    held = state + sum(p.nbytes for p in model.parameters()) + x.nbytes

    assert (
        abs(
            remat.measure(step).peak_bytes
            + held
            - max(fit.keep_all.total, fit.optimizer_step_bytes)
        )
        <= 512
    )


class Dropped(nn.Module):
    """Plain PyTorch holds more for its dropout masks and for the gradient of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(500, 32), nn.Linear(32, 500)
        self.layer = nn.TransformerEncoderLayer(32, 4, 128, batch_first=True, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layer(self.table(x))).flatten(0, 1)
        return nn.functional.cross_entropy(logits, x.flatten())


class Pictures(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 7 * 7, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).logsumexp(1).mean()  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Dropped(), torch.randint(500, (8, 48))),
        (Pictures(), torch.randn(8, 3, 16, 16)),
        (Net(), batch_of(64)[0]),
    ],
    ids=["transformer", "pictures", "mlp"],
)
def test_plain_pytorch_and_keeping_everything_are_told_apart(
    model: nn.Module, x: torch.Tensor
) -> None:
    """A user took "keeping everything" for what plain PyTorch holds, which was 7 % more."""
    found = remat.fits(
        model,
        (x,),
        device="cpu",
        budget="1GiB",
        optimizer="none",
        reserve_bytes=77,
        time_limit_s=0.5,
    )

    model(x).backward()
    model.zero_grad()
    measured = remat.measure(lambda: model(x).backward()).peak_bytes
    model.zero_grad()

    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
    assert found.plain_bytes == measured + held + 77
    assert found.keep_all.total <= found.plain_bytes
    assert found.record()["plain_bytes"] == found.plain_bytes
    assert "the same step in plain PyTorch" in str(found)
    if isinstance(model, Dropped):
        assert found.plain_bytes > 1.03 * found.keep_all.total


def test_a_model_that_reads_data_has_no_plain_peak() -> None:
    class Reads(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling() and x.sum() > 1e9:
                raise ValueError
            return super().forward(x)

    found = remat.fits(Reads(), batch_of(4), device="cpu", budget="1GiB", time_limit_s=0.5)

    assert found.plain_bytes is None
    assert "plain PyTorch" not in str(found)


class Cut(Net):
    """The same with a graph break after the first block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[1:](x).square().mean()  # type: ignore[no-any-return]


def test_a_step_in_pieces_gets_an_answer() -> None:
    """Naive: only steps that are captured whole get one."""
    whole, cut = (
        remat.fits(model(2), batch_of(1024), device="H100", budget="80%", time_limit_s=0.5)
        for model in (Net, Cut)
    )
    assert cut and cut.planned is not None
    assert cut.plain_bytes == whole.plain_bytes
    assert cut.held == whole.held
    assert 1.0 <= cut.keep_all.total / whole.keep_all.total < 1.05

    batches = remat.max_batch(
        Cut(2), batch_of, whole.keep_all.total, device="H100", optimizer="sgd", points=1
    )
    assert batches.largest > 1024


def test_a_model_on_the_meta_device_gives_the_same_answer(fit: remat.Fit) -> None:
    with torch.device("meta"):
        model = Net()
    args = (torch.empty(64, 16, WIDTH, device="meta"),)
    found = remat.fits(model, args, device="cpu", budget="60%", time_limit_s=1.0)
    assert found.graph == fit.graph and found.keep_all == fit.keep_all
    assert all(p.is_meta for p in model.parameters())


def test_seventy_billion_parameters_need_no_memory() -> None:
    with torch.device("meta"):
        model = Net(depth=2, width=1 << 16)
    found = remat.fits(
        model, (torch.empty(1, 16, 1 << 16, device="meta"),), device="H100", time_limit_s=2.0
    )

    assert not found and found.status is remat.Status.INFEASIBLE and found.planned is None
    assert found.keep_all.parameters > 250 << 30
    assert "shard them over at least" in found.verdict


def test_another_device_rounds_and_keeps_no_generator_state() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 1))
    found = remat.fits(model, (torch.randn(2, 3),), device="H100", optimizer="none")
    assert found.graph.device == "cuda" and found.graph.costs == "roofline:H100"
    assert all(value.size_bytes % 512 == 0 for value in found.graph.values)
    assert {v.size_bytes for v in found.graph.values if v.name.endswith("_generator")} == {0}


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        *((dtype, None) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        *((torch.float32, autocast) for autocast in (torch.bfloat16, torch.float16)),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_dropout_on_a_gpu_keeps_one_byte_per_element(
    dtype: torch.dtype, autocast: torch.dtype | None
) -> None:
    """On a CPU in 16 bits, the mask is a 2-byte factor."""
    model = nn.Sequential(
        nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5), nn.Flatten(0)
    ).to(dtype)
    args = (torch.randn(128, 64, dtype=dtype),)

    def masks(device: str) -> list[int]:
        graph = Question.of(model, device=device, optimizer="none", autocast=autocast).trace(args)
        bernoulli = [op for op in graph.operators if "bernoulli" in op.target]
        fused = [op for op in graph.operators if op.target == "aten.native_dropout.default"]
        assert len(bernoulli if device == "cpu" and is_narrow else fused) == 2
        assert not (bernoulli if device == "H100" or not is_narrow else fused)
        values = [graph.values[value] for op in fused for value in op.writes]
        return [value.size_bytes for value in values if value.dtype == "bool"]

    is_narrow = (autocast or dtype) != torch.float32

    assert masks("H100") == [128 * 64, 128 * 64]
    assert masks("cpu") == ([] if is_narrow else [128 * 64, 128 * 64])


def test_attention_with_dropout_uses_the_fused_kernel_on_a_gpu() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum()

    q = torch.randn(1, 2, 256, 16, requires_grad=True)
    found = remat.fits(Attention(), (q,), device="H100", optimizer="none")
    assert found.keep_all.activations < 2 * 256 * 256 * 4  # the attention matrix is not saved


def test_the_least_budget_that_fits_is_named() -> None:
    found = remat.fits(Net(), batch_of(64), device="cpu", budget="200KiB", time_limit_s=1.0)
    assert not found and found.solution is None and found.overhead == float("inf")
    assert "does not fit (proved)" in str(found)
    assert remat.fits(
        Net(), batch_of(64), device="cpu", budget=found.minimum_bytes, time_limit_s=1.0
    )


def test_accumulated_gradients_and_a_reserve_are_held_too(fit: remat.Fit) -> None:
    found = remat.fits(
        Net(),
        batch_of(64),
        device="cpu",
        time_limit_s=1.0,
        is_accumulating=True,
        reserve_bytes=12345,
    )
    assert found.keep_all.total == fit.keep_all.total + fit.held.gradient_bytes + 12345


@pytest.mark.parametrize(
    "name", ["sgd", "momentum", "adam", "adamw", "adafactor", "adagrad", "rmsprop"]
)
def test_predicted_optimizer_memory_is_right(name: str) -> None:
    parameters = [nn.Parameter(torch.zeros(48, 32)) for _ in range(3)] + [
        nn.Parameter(torch.zeros(7))
    ]
    predicted = optimizer_memory(name, parameters)

    optimizer = OPTIMIZERS[name](parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    state = sum(
        t.nbytes
        for s in optimizer.state.values()
        for t in s.values()
        if isinstance(t, torch.Tensor)
    )
    assert state == predicted.state_bytes

    # equal up to the step's scalars
    assert abs(remat.measure(optimizer.step).peak_bytes - predicted.step_bytes) <= 64


def test_any_optimizer_is_measured() -> None:
    class Three(torch.optim.Optimizer):
        def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
            super().__init__(parameters, {})

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("states", [torch.zeros_like(p) for _ in range(3)])

    parameters = [nn.Parameter(torch.zeros(100))]
    assert optimizer_memory(Three, parameters).state_bytes == 1200

    assert (
        optimizer_memory("adamw-8bit", [nn.Parameter(torch.zeros(1 << 16))]).state_bytes
        == 2 * (1 << 16) + 2 * 4 * 256
    )

    frozen = [nn.Parameter(torch.zeros(100), requires_grad=False)]
    assert optimizer_memory("adamw", frozen).state_bytes == 0

    with pytest.raises(TypeError, match="made a list"):
        optimizer_memory(list, parameters)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown optimizer 'adm'; choose one of none, sgd"):
        optimizer_memory("adm", parameters)


@pytest.mark.parametrize(("size_of", "budget", "expected"), [
    (lambda b: 100 + 10 * b, 205, 10),
    (lambda b: 100 + 10 * b, 99, 0),
    (lambda b: 100 + 10 * b, 10**9, 1000),
    (lambda b: b * b, 50, 7),
    (lambda b: 512 * -(-b // 7), 5120, 70),
])  # fmt: skip
def test_the_largest_batch_is_found_in_few_probes(
    size_of: Callable[[int], int], budget: int, expected: int
) -> None:
    probes: list[int] = []

    def probe(batch: int) -> int:
        probes.append(batch)
        return size_of(batch)

    assert _largest(probe, budget, 1000) == expected
    assert len(probes) <= 14 and len(set(probes)) == len(probes)


def test_the_largest_batch_fits_and_four_times_it_does_not() -> None:
    budget = (2 << 20) + devices.device("T4").library_bytes
    found = remat.max_batch(
        Net(depth=1), batch_of, budget, device="T4", optimizer="sgd", points=2, time_limit_s=0.5
    )

    sizes = [row.batch for row in found.rows]
    assert sizes == sorted(sizes) and sizes[-1] == found.largest
    assert all(
        row.fit.planned is not None and row.fit.planned.total <= budget for row in found.rows
    )

    assert not remat.fits(
        Net(depth=1),
        batch_of(4 * found.largest),
        device="T4",
        optimizer="sgd",
        budget=budget,
        time_limit_s=0.5,
    )

    assert found.best.samples_per_s == max(row.samples_per_s for row in found.rows)
    assert "largest that fits" in str(found)
    assert json.loads(json.dumps(found.record()))["largest"] == found.largest


def test_a_solver_without_a_plan_for_any_batch_is_an_error() -> None:
    budget = (2 << 20) + devices.device("T4").library_bytes
    with pytest.raises(remat.BudgetError, match='use solver="auto"'):
        remat.max_batch(
            Net(), batch_of, budget, device="T4", optimizer="sgd", points=1, solver="keep-all"
        )


def test_a_planned_module_is_answered_like_the_plain_one() -> None:
    model, args = Net(depth=1), batch_of(8)
    options: Any = {"device": "T4", "budget": "1GiB", "time_limit_s": 0.5}
    plain = remat.fits(model, args, **options)
    remat.checkpoint(model, "1GiB", costs="flops")
    assert plain and remat.fits(model, args, **options).record() == plain.record()
    assert model._compiled_call_impl is not None  # the plan stays


def test_a_sample_that_does_not_fit_alone_is_an_error() -> None:
    with pytest.raises(remat.BudgetError, match="does not fit") as caught:
        remat.max_batch(Net(), batch_of, "100KiB", device="T4")
    assert caught.value.minimum_bytes > 100 << 10
    with pytest.raises(ValueError, match="percentage"):
        remat.max_batch(Net(), batch_of, "60%", device="T4")


@pytest.mark.parametrize("budget", ["8G", "60x", 0])
def test_an_invalid_budget_is_refused_before_the_trace(budget: int | str) -> None:
    class NeverRun(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    with pytest.raises(ValueError, match="budget"):
        remat.fits(NeverRun(), (torch.ones(1),), budget=budget)
    with pytest.raises(ValueError, match="budget"):
        remat.max_batch(NeverRun(), batch_of, budget)


def test_the_command_line_answers_for_ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "import torch",
        "def make():",
        "    return torch.nn.Linear(64, 64, device='meta'), (torch.empty(8, 64, device='meta'),)",
    ]
    (tmp_path / "ci_model.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["doctor", "ci_model:make", "--device", "L4", *options])
        return result.exit_code, result.output

    try:
        code, text = run()
        assert code == 0 and "Linear in 21 GiB of L4: fits, keeping everything." in text
        code, text = run("--budget", "1KiB", "--format", "json")
        assert code == 3 and json.loads(text)["fits"] is False
        one, many, cast = (
            json.loads(run("--format", "json", *options)[1])
            for options in ((), ("--accumulate",), ("--autocast", "float16"))
        )
        assert many["keep_all"]["total"] - one["keep_all"]["total"] == one["gradient_bytes"]
        assert cast["keep_all"]["step_s"] > one["keep_all"]["step_s"]  # casts of a small product
        code, text = run("--device", "abacus")
        assert code == 2 and "unknown device 'abacus'" in text
    finally:
        sys.modules.pop("ci_model", None)


def test_on_a_gpu_what_torch_will_reserve_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: the budget is met, and fragments run out of memory all the same."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    options: dict[str, Any] = {"device": "H100", "budget": "97%", "time_limit_s": 2.0}
    found = remat.fits(Net(), batch_of(64), **options)
    assert found.planned is not None
    kept, planned = found.cuda_peaks

    assert kept.requested_bytes == found.keep_all.total
    assert planned.requested_bytes == found.planned.total <= found.budget_bytes
    assert planned.requested_bytes <= planned.allocated_bytes < planned.reserved_bytes
    assert ("expandable_segments" in str(found)) == bool(planned.advice())
    assert found.record()["expected_on_cuda"][1]["reserved_bytes"] == planned.reserved_bytes

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    del found.__dict__["cuda_peaks"]
    assert found.cuda_peaks[1].allocated_bytes == planned.requested_bytes
    assert "expandable_segments" not in str(found)


def test_on_a_cpu_no_blocks_are_expected(fit: remat.Fit) -> None:
    assert fit.cuda_peaks == () and "by torch" not in str(fit)
