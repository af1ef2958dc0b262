"""The real training libraries: the same losses and weights, within the budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.fit.optimizer_memory import state_bytes_of

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning.pytorch")

from remat.huggingface import RematCallback as TrainerPlan  # noqa: E402
from remat.lightning import RematCallback as LightningPlan  # noqa: E402
from remat.solvers.auto.minimum import minimum  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own warnings


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps `accelerate` from collecting Python's garbage around each training.

    Collections take long among all the objects of the libraries.
    """
    monkeypatch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=lambda: 0))


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (count, 32), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


class Watch(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Keeps the losses, and the report of each step that has one."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.reports: list[remat.Report] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        try:
            self.reports.append(remat.report(model))
        except remat.TraceError:
            return

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


def with_trainer(folder: Path, *callbacks: Any, **options: Any) -> tuple[Watch, Any]:
    watch, model = Watch(), gpt2()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, max_steps=4, logging_steps=1,
        report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, seed=3, **options,
    )  # fmt: skip

    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=rows(32),
        eval_dataset=rows(8),
        callbacks=[watch, *callbacks],
    )

    trainer.train()
    trainer.evaluate()
    return watch, model


def test_the_trainer_trains_as_without_a_plan(tmp_path: Path) -> None:
    options = {"bf16": True, "gradient_accumulation_steps": 2}
    plain, plain_model = with_trainer(tmp_path, **options)
    watch, model = with_trainer(tmp_path, TrainerPlan("90%", costs="flops", gap=0.2), **options)

    assert watch.losses == plain.losses and len(set(watch.losses)) > 1
    for mine, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(mine, theirs)

    report = watch.reports[-1]
    assert report.solution.overhead > 0 and report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.solution.budget_bytes
    with pytest.raises(remat.TraceError, match="has no plan"):
        remat.report(model)  # plain again


class LossOutside(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Computes the loss from the logits, as users do to weight classes or rows."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.1)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_trainers_own_loss_is_part_of_the_plan(tmp_path: Path, num_micro_batches: int) -> None:
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, gradient_accumulation_steps=num_micro_batches,
    )  # fmt: skip

    def trained(budget: str) -> tuple[list[torch.Tensor], list[float], TrainerPlan | None]:
        watch, model, callback = Watch(), gpt2(), None
        trainer = LossOutside(model, arguments, train_dataset=rows(64), callbacks=[watch])
        if budget:
            callback = TrainerPlan(budget, trainer=trainer, costs="flops", gap=0.2)
            trainer.add_callback(callback)

        trainer.train()
        assert "compute_loss" not in vars(trainer)  # the trainer's own method is back
        return list(model.parameters()), watch.losses, callback

    plain, plain_losses, _ = trained("")
    mine, losses, callback = trained("85%")
    assert losses == plain_losses and len(set(losses)) == 3
    assert all(map(torch.equal, mine, plain))

    assert callback is not None
    report = remat.report(callback.planned)
    assert report.solution.overhead > 0 and report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.solution.budget_bytes
    assert any("log_softmax" in operator.name for operator in report.graph.operators)


def test_a_loss_that_was_set_on_the_trainer_is_planned_and_stays(tmp_path: Path) -> None:
    """Naive: it is taken for what an interrupted run left, and the class's loss is trained."""
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(gpt2(), arguments, train_dataset=rows(64))
    calls: list[int] = []

    def own_loss(model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        calls.append(1)
        return 2 * model(**inputs).loss

    vars(trainer)["compute_loss"] = own_loss
    callback = TrainerPlan("95%", trainer=trainer, costs="flops", gap=0.2)
    trainer.add_callback(callback)
    trainer.train()
    assert calls
    assert vars(trainer)["compute_loss"] is own_loss


def test_a_trainer_that_compiles_keeps_the_plan(tmp_path: Path) -> None:
    plain, _ = with_trainer(tmp_path)
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    callback = TrainerPlan("90%", costs="flops", gap=0.2, time_limit_s=5)
    watch, _ = with_trainer(tmp_path, callback, **options)

    assert watch.losses == plain.losses
    report = watch.reports[-1]
    assert report.recomputed and report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.solution.budget_bytes


def bytes_between(small: int, large: int) -> int:
    """A budget that a batch of `small` meets and one of `large` does not."""

    def least(batch: int) -> int:
        tokens = torch.stack([row["input_ids"] for row in rows(batch)])
        graph = remat.trace(
            gpt2().train(), kwargs={"input_ids": tokens, "labels": tokens}, costs="flops"
        )
        return minimum(graph, time_limit_s=1).peak_bytes

    return (least(small) + least(large)) // 2


def test_a_trainer_that_searches_a_batch_size_finds_one(tmp_path: Path) -> None:
    budget = bytes_between(7, 8)
    options: Any = {"costs": "flops", "gap": 0.5, "time_limit_s": 1, "reserve_bytes": 0}
    callback = TrainerPlan(budget, **options)
    watch, _ = with_trainer(tmp_path, callback, auto_find_batch_size=True)

    assert watch.reports and watch.losses
    measured = watch.reports[-1].measured_peak_bytes
    assert measured is not None and measured <= budget


def test_accelerate_treats_an_unmet_budget_as_oom() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    graph = remat.trace(model, (torch.ones(256, 8),), costs="flops")
    budget = minimum(graph, time_limit_s=1).peak_bytes * 3 // 2
    tried: list[int] = []

    @accelerate.utils.find_executable_batch_size(starting_batch_size=400)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        remat.checkpoint(model, budget, costs="flops", gap=0.5, time_limit_s=3)
        model(torch.ones(batch_size, 8)).mean().backward()

    train()
    assert len(tried) > 1 and 256 <= tried[-1] < 400


def test_lightning_treats_an_unmet_budget_as_oom() -> None:
    from lightning.pytorch.utilities.memory import is_oom_error

    with pytest.raises(remat.BudgetError) as error:
        remat.solve(remat.Graph.from_arrays([1.0], [1024], []), 1)
    assert is_oom_error(error.value)
    assert "CUDA" not in str(error.value)  # the message is for people


def test_gradient_checkpointing_may_stay_enabled() -> None:
    """Models that call `torch.utils.checkpoint` are planned as if they did not.

    Nothing is recomputed twice.
    """

    def step(change: Callable[[Any], Any]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        model = gpt2().train()
        change(model)
        torch.manual_seed(5)
        tokens = torch.stack([row["input_ids"] for row in rows(8)])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach(), model.transformer.h[0].attn.c_attn.weight.grad, model

    def both(model: Any) -> None:
        model.gradient_checkpointing_enable()
        remat.checkpoint(model, "100%", costs="flops")

    loss, gradient, _ = step(lambda model: model.gradient_checkpointing_enable())
    mine, my_gradient, model = step(both)
    assert torch.equal(loss, mine) and torch.equal(gradient, my_gradient)
    assert remat.report(model).recomputed == {}


def test_peft_with_checkpointing_on_is_planned_as_with_it_off() -> None:
    """For checkpointing, PEFT hooks the embeddings; the hooks would cut the step."""
    peft = pytest.importorskip("peft")
    tokens = torch.stack([row["input_ids"] for row in rows(2)])

    def graph(is_enabled: bool) -> remat.Graph:
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(gpt2(), config).train()
        if is_enabled:
            model.gradient_checkpointing_enable()
        return remat.trace(model, kwargs={"input_ids": tokens, "labels": tokens}, costs="flops")

    assert graph(True).fingerprint == graph(False).fingerprint


class Regression(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

        layers = [
            nn.Linear(16, 64),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(64, 64),
            nn.GELU(),
            nn.Linear(64, 1),
        ]
        self.model = nn.Sequential(*layers)

        self.losses: list[float] = []
        self.report: remat.Report | None = None

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.model(batch), batch.sum(-1, keepdim=True))
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        try:
            self.report = remat.report(self.model)
        except remat.TraceError:
            return

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def with_lightning(
    folder: Path, *callbacks: Any, make: Callable[[], Regression] = Regression
) -> Regression:
    torch.manual_seed(7)
    module, data = (
        make(),
        torch.randn(4 * 256, 16, generator=torch.Generator().manual_seed(1)),
    )

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=list(callbacks),
    )  # fmt: skip

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the number of workers
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=256))  # type: ignore[arg-type]
    return module


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Regression:
    """Trained without a plan."""
    return with_lightning(tmp_path_factory.mktemp("plain"))


def test_lightning_trains_as_without_a_plan(tmp_path: Path, plain: Regression) -> None:
    module = with_lightning(tmp_path, LightningPlan("85%", module="model", costs="flops", gap=0.2))

    assert module.losses == plain.losses and len(set(module.losses)) == 4
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert module.report is not None and module.report.measured_peak_bytes is not None
    assert module.report.measured_peak_bytes <= module.report.solution.budget_bytes


def test_lightning_plans_all_of_a_training_step(tmp_path: Path, plain: Regression) -> None:
    """Logging, and reading the loss, work as before."""
    callback = LightningPlan("85%", costs="flops", gap=0.2)
    module = with_lightning(tmp_path, callback)

    assert module.losses == plain.losses and len(set(module.losses)) == 4
    assert module.trainer.callback_metrics == plain.trainer.callback_metrics
    assert all(map(torch.equal, module.parameters(), plain.parameters()))
    assert "training_step" not in vars(module)  # the module's own method is back

    report = remat.report(callback.planned)
    assert report.solution.overhead > 0 and report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.solution.budget_bytes
    assert any("mse_loss" in operator.name for operator in report.graph.operators)


def test_lightning_refuses_manual_optimization_and_says_what_to_name(tmp_path: Path) -> None:
    class Manual(Regression):
        automatic_optimization = False

    with pytest.raises(ValueError, match=r"Manual uses manual optimization.*module=.*model"):
        with_lightning(tmp_path, LightningPlan("80%"), make=Manual)


def test_lightning_names_the_known_modules(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Regression has no module 'net' to plan; it has: model"):
        with_lightning(tmp_path, LightningPlan("80%", module="net"))


@pytest.mark.parametrize("is_given", [False, True])
def test_a_given_reserve_takes_the_place_of_the_optimizers(is_given: bool, tmp_path: Path) -> None:
    """The state of an LBFGS can't be counted, since it does not step on fake tensors."""

    class WithLBFGS(Regression):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters())

    options: dict[str, Any] = {"reserve_bytes": 1 << 20} if is_given else {}
    callback = LightningPlan("2GiB", module="model", costs="flops", **options)
    expected: Any = nullcontext() if is_given else pytest.raises(TypeError, match="reserve_bytes")
    with expected:
        module = with_lightning(tmp_path, callback, make=WithLBFGS)
        assert module.report is not None
        assert module.report.room is not None
        assert module.report.room.reserve_bytes == 1 << 20


def test_the_state_of_an_existing_optimizer_is_counted() -> None:
    model = nn.Linear(10, 10)
    optimizer = torch.optim.AdamW([{"params": model.weight, "lr": 0.1}, {"params": model.bias}])  # type: ignore[arg-type]
    assert state_bytes_of(optimizer) == 2 * (440) + 8
