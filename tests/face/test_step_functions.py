"""Step functions: one plan for all that a function calls, which trains as plain PyTorch."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.face.reached_modules import reached_modules
from tests.support.planned import UNLIMITED, Given, assert_same, keep_nothing, loss_of

pytestmark = pytest.mark.usefixtures("fresh_torch", "quick_first_step")

WIDTH, ROWS = 16, 32


def net(last: int = WIDTH, *, width: int = WIDTH) -> nn.Module:
    """Dropout and batch norm; activations take more memory than parameters."""
    hidden = 4 * width
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.GELU(), nn.Dropout(0.2)]
        layers += [nn.Linear(hidden, width)]
    return nn.Sequential(*layers, nn.Linear(width, last))


def rows(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*(size or (ROWS, WIDTH)), generator=torch.Generator().manual_seed(seed))


@dataclass
class Setting:
    """Modules, and the steps that train them in turn, each with its arguments."""

    modules: dict[str, nn.Module]
    steps: list[Callable[..., Any]]
    args: list[tuple[Any, ...]]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> Iterable[torch.Tensor]:
        for module in self.modules.values():
            yield from module.parameters()
            yield from module.buffers()


def closure() -> Setting:
    model, criterion = net(), nn.CrossEntropyLoss(weight=rows(5, WIDTH).abs())
    labels = torch.arange(ROWS) % WIDTH

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return criterion(model(x), y)  # type: ignore[no-any-return]

    return Setting({"model": model, "criterion": criterion}, [step], [(rows(1), labels)])


def siamese() -> Setting:
    model = net()
    margin = nn.TripletMarginLoss()
    step = lambda a, b, c: margin(model(a), model(b), model(c))  # noqa: E731
    return Setting({"model": model}, [step], [(rows(1), rows(2), rows(3))])


def preference() -> Setting:
    """A model against a frozen one under `no_grad`, each scored in its own helper."""
    policy = net()
    reference = copy.deepcopy(policy).eval()

    def scores(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(model(x), -1)[:, 0]

    @torch.no_grad()
    def reference_scores(x: torch.Tensor) -> torch.Tensor:
        return scores(reference, x)

    def step(chosen: torch.Tensor, *, rejected: torch.Tensor) -> torch.Tensor:
        ratio = scores(policy, chosen) - scores(policy, rejected)
        with torch.no_grad():
            ratio_before = scores(reference, chosen)
        ratio_before = ratio_before - reference_scores(rejected)
        return -F.logsigmoid(0.1 * (ratio - ratio_before)).mean()

    modules = {"policy": policy, "reference": reference}
    return Setting(modules, [step], [(rows(1),)], {"rejected": rows(2)})


def adversarial() -> Setting:
    """Two functions that share both modules, one detached in each turn."""
    generator, critic, bce = net(), net(1), nn.BCEWithLogitsLoss()

    def critic_step(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        real, fake = critic(x), critic(generator(noise).detach())
        return bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))  # type: ignore[no-any-return]

    def generator_step(_: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        fake = critic(generator(noise))
        return bce(fake, torch.ones_like(fake))  # type: ignore[no-any-return]

    modules = {"generator": generator, "critic": critic}
    return Setting(modules, [critic_step, generator_step], [(rows(1), rows(2))] * 2)


def frozen_parts() -> Setting:
    """Some modules are trained, one is frozen, one is half frozen; a loss of several terms."""
    parts = nn.ModuleDict({"a": net(), "b": net()})
    teacher, heads = net().requires_grad_(False), [nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 3)]
    parts["b"][0].requires_grad_(False)  # type: ignore[index]

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = parts["b"](parts["a"](x))
        losses = [head(hidden).pow(2).mean() for head in heads]
        distance = F.mse_loss(hidden, teacher(x))
        return {"loss": distance + sum(losses), "distance": distance.detach(), "hidden": hidden}

    modules = {"parts": parts, "teacher": teacher, "heads": nn.ModuleList(heads)}
    return Setting(modules, [step], [(rows(1),)])


class Trainer:
    """Not a module, but its attributes are."""

    def __init__(self) -> None:
        self.nets, self.lists = {"up": net(), "down": net()}, [nn.Linear(WIDTH, WIDTH)]
        self.settings = SimpleNamespace(head=nn.Linear(WIDTH, 1), weight=0.5)
        self.unused = net()

    @property
    def scale(self) -> float:
        return self.settings.weight  # type: ignore[no-any-return]

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.nets["down"](self.nets["up"](x))  # type: ignore[no-any-return]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.lists:
            x = layer(x)
        return self.settings.head(self.features(x)).square().mean() * self.scale  # type: ignore[no-any-return]


def bound_method() -> Setting:
    trainer = Trainer()
    modules = {"nets": nn.ModuleDict(trainer.nets), "lists": trainer.lists[0]}
    return Setting(modules | {"head": trainer.settings.head}, [trainer.step], [(rows(1),)])


def distillation(
    student: nn.Module, teacher: nn.Module, x: torch.Tensor, *, temperature: float
) -> torch.Tensor:
    target = F.softmax(teacher(x) / temperature, -1)
    return F.kl_div(F.log_softmax(student(x) / temperature, -1), target, reduction="batchmean")


def partial() -> Setting:
    student, teacher = net(), net().requires_grad_(False)
    step = functools.partial(distillation, student, teacher=teacher, temperature=2.0)
    modules = {"student": student, "teacher": teacher}
    return Setting(modules, [step], [()], {"x": rows(1)})


def modules_as_arguments() -> Setting:
    student, teacher = net(), net().requires_grad_(False)
    modules = {"student": student, "teacher": teacher}
    args = [(student, teacher, rows(1))]
    return Setting(modules, [distillation], args, {"temperature": 2.0})


class Learner(nn.Module):
    """A module whose step is not its forward, as in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)


def method_of_a_module() -> Setting:
    learner = Learner()
    return Setting({"learner": learner}, [learner.training_step], [((rows(1), rows(2)), 0)])


def in_pieces() -> Setting:
    """A branch on data cuts the step."""
    model, other = net(), net()

    def step(x: torch.Tensor) -> torch.Tensor:
        hidden = model(x)
        scale = 2.0 if hidden.detach().mean().item() > -100 else 1.0
        return other(hidden * scale).square().mean()  # type: ignore[no-any-return]

    return Setting({"model": model, "other": other}, [step], [(rows(1),)])


SETTINGS = [
    closure, siamese, preference, adversarial, frozen_parts, bound_method, partial,
    modules_as_arguments, method_of_a_module, in_pieces,
]  # fmt: skip
Planning = Callable[[Callable[..., Any]], Callable[..., Any]]


def plain(step: Callable[..., Any]) -> Callable[..., Any]:
    return step


def keeping_nothing(step: Callable[..., Any]) -> Callable[..., Any]:
    return remat.checkpoint(step, UNLIMITED, solver=Given(keep_nothing), costs="flops")


def after_training(
    make: Callable[[], Setting], planning: Planning
) -> tuple[list[Any], Setting, Callable[..., Any]]:
    """Two rounds of all steps with an optimizer: results, gradients, state and random state.

    Returns the trained setting and its last step as well.
    """
    torch.manual_seed(0)
    setting = make()
    steps = [planning(step) for step in setting.steps]
    trained = [t for t in setting.tensors() if t.requires_grad]
    optimizer, found = torch.optim.SGD(trained, lr=0.1), []

    for _ in range(2):
        for step, args in zip(steps, setting.args, strict=True):
            optimizer.zero_grad()
            result = step(*args, **setting.kwargs)
            loss_of(result).backward()
            found.append([copy.deepcopy([t.grad for t in trained]), torch.get_rng_state()])
            found[-1].append({name: t.detach().clone() for name, t in _named(result)})
            optimizer.step()

    states = [module.state_dict() for module in setting.modules.values()]
    return [found, states], setting, steps[-1]


def _named(result: Any) -> Iterable[tuple[str, torch.Tensor]]:
    return result.items() if isinstance(result, dict) else [("loss", result)]


@pytest.mark.parametrize("make", SETTINGS, ids=lambda make: make.__name__)
def test_a_planned_function_trains_as_the_plain_one_and_counts_all_it_reaches(
    make: Callable[[], Setting],
) -> None:
    found, setting, planned = after_training(make, keeping_nothing)
    assert_same(found, after_training(make, plain)[0])
    assert_all_is_counted(setting, planned, rows(1).nbytes if make is adversarial else 0)


def assert_all_is_counted(setting: Setting, planned: Callable[..., Any], unread_bytes: int) -> None:
    """The plan counts parameters, buffers and inputs of called modules, and of no others.

    Measured from outside, the whole step with its loss holds what the plan predicts.

    Args:
        setting: its last step was planned, and has run.
        planned: the planned step.
        unread_bytes: of arguments that the step does not use.
    """
    given = torch.utils._pytree.tree_leaves((setting.args[-1], setting.kwargs))
    held = {t.data_ptr(): t.nbytes for t in (*setting.tensors(), *given) if torch.is_tensor(t)}
    report = remat.report(planned)
    assert report.graph.resident_bytes == sum(held.values()) - unread_bytes

    drop_gradients(setting)
    measured = remat.measure(lambda: run_step(planned, setting), device="cpu").peak_bytes
    measured += report.graph.resident_bytes
    # more: the loss and the gradient that its backward starts from; less: an estimated workspace
    predicted = report.solution.peak_bytes
    assert predicted - 3 * rows(1).nbytes <= measured <= predicted + 64
    assert report.measured_peak_bytes is not None
    assert predicted - 3 * rows(1).nbytes <= report.measured_peak_bytes <= predicted + 64


def run_step(step: Callable[..., Any], setting: Setting) -> None:
    """One step whose gradients are dropped at once."""
    loss_of(step(*setting.args[-1], **setting.kwargs)).backward()
    drop_gradients(setting)


def drop_gradients(setting: Setting) -> None:
    for tensor in setting.tensors():
        tensor.grad = None


def test_a_budget_bounds_the_whole_step() -> None:
    setting = siamese()
    planned = remat.checkpoint(
        setting.steps[0], "80%", costs="flops", time_limit_s=3.0, plan_cache=False
    )

    run_step(planned, setting)
    report = remat.report(planned)
    measured = remat.measure(lambda: run_step(planned, setting), device="cpu").peak_bytes

    assert report.solution.overhead > 0
    assert measured + report.graph.resident_bytes <= report.solution.budget_bytes


def test_gradients_that_are_held_count() -> None:
    """Gradients of all modules that the function reaches are counted."""
    setting = adversarial()
    planned = remat.checkpoint(
        setting.steps[1], 1 << 30, costs="flops", time_limit_s=1.0, plan_cache=False
    )

    for _ in range(2):
        planned(*setting.args[1]).backward()
    held = sum(t.grad.nbytes for t in setting.tensors() if t.grad is not None)
    assert remat.report(planned).solution.budget_bytes == (1 << 30) - held


def test_a_planned_function_keeps_its_signature_and_name() -> None:
    def step(x: torch.Tensor, *, weight: float = 2.0) -> torch.Tensor:
        """The loss."""
        return model(x).mean() * weight  # type: ignore[no-any-return]

    model = nn.Linear(WIDTH, WIDTH)
    planned = remat.checkpoint(step, UNLIMITED, costs="flops")

    assert inspect.signature(planned) == inspect.signature(step)
    assert (planned.__name__, planned.__doc__) == ("step", "The loss.")
    assert "step" in repr(planned)
    assert remat.checkpoint(planned, "80%", costs="flops") is planned
    assert remat.unwrap(planned) is step

    with pytest.raises(remat.TraceError, match="no plan"):
        remat.report(planned)
    with torch.no_grad():
        assert_same(planned(rows(1)), step(rows(1)))


def test_a_copy_is_plain() -> None:
    """As with a planned module: a plan belongs to the tensors it was made for."""
    trainer = Trainer()
    vars(trainer)["step"] = remat.checkpoint(trainer.step, UNLIMITED, costs="flops")
    trainer.step(rows(1)).backward()
    twin = pickle.loads(pickle.dumps(trainer))
    assert twin.step.__self__ is twin
    assert_same(seeded(twin.step), seeded(remat.unwrap(trainer.step)))


def seeded(step: Callable[..., torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(3)
    return step(rows(1))


def test_a_method_of_a_class_is_planned_for_each_object() -> None:
    class Planned(Trainer):
        step = remat.checkpoint(Trainer.step, UNLIMITED, costs="flops")

    first, second = Planned(), Planned()
    for trainer in (first, second, first):
        loss = seeded(trainer.step)
        loss.backward()
        assert_same(loss, seeded(functools.partial(Trainer.step, trainer)))
    assert first.lists[0].weight.grad is not None and second.lists[0].weight.grad is not None


def test_a_function_can_be_traced_solved_and_fitted() -> None:
    setting = closure()
    (step,), (args,) = setting.steps, setting.args
    graph = remat.trace(step, args, costs="flops")
    least = remat.minimum(graph, time_limit_s=0.5).peak_bytes
    solution = remat.solve(graph, least, time_limit_s=0.5)

    planned = remat.wrap(step, solution, costs="flops")
    planned(*args).backward()
    assert remat.report(planned).solution == solution

    fit = remat.fits(step, args, device="H100", time_limit_s=0.5)
    trained = sum(p.nbytes for p in setting.modules["model"].parameters())
    assert fit and fit.model.endswith("step") and fit.held.gradient_bytes == trained

    setting.modules["model"].eval()  # one row has no variance
    found = remat.max_batch(
        step, batch, budget="69MiB", limit=2, device="H100", points=1, time_limit_s=0.2
    )
    assert found.largest == 2


def module_in(x: torch.Tensor, modules: list[nn.Module]) -> torch.Tensor:
    loss: torch.Tensor = modules[0](x).square().mean()
    return loss


def test_planning_again_keeps_the_modules_that_calls_gave() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    planned = remat.checkpoint(module_in, UNLIMITED, costs="flops")
    planned(rows(1, 8, 4), [model]).backward()

    graph = remat.trace(planned, (rows(1, 8, 4), [other]), costs="flops")
    assert graph.num_operators
    remat.checkpoint(planned, "2GiB", costs="flops")
    model.zero_grad()
    planned(rows(1, 8, 4), [model]).backward()
    assert remat.report(planned).solution.budget_bytes == 2 << 30
    assert other.weight.grad is None


def test_a_module_in_a_list_may_be_another_one_at_each_call() -> None:
    planned: Any = remat.checkpoint(module_in, UNLIMITED, costs="flops")
    for model in (nn.Linear(4, 4), nn.Linear(4, 4)):
        planned(rows(1, 8, 4), [model]).backward()
        assert list(planned.step.children()) == [model]
        expected = torch.autograd.grad(module_in(rows(1, 8, 4), [model]), model.weight)
        assert_same(model.weight.grad, expected[0])


def test_the_largest_batch_of_a_function_of_its_model_is_found() -> None:
    found = remat.max_batch(
        lambda x, model: model(x).sum(), lambda size: (torch.empty(size, WIDTH), net().eval()),
        budget="69MiB", limit=2, device="H100", points=1, time_limit_s=0.2,
    )  # fmt: skip
    assert found.largest == 2 and found.best.fit.held.gradient_bytes > 0


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(size, WIDTH), torch.empty(size, dtype=torch.long)


def test_what_cannot_be_a_step_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="or a function is needed, and str was given"):
        remat.checkpoint("gpt2", "1GiB")  # type: ignore[type-var]
    with pytest.raises(TypeError, match="the class Linear was given"):
        remat.checkpoint(nn.Linear, "1GiB")
    with pytest.raises(ValueError, match="blocks= plans the blocks of one module"):
        remat.checkpoint(lambda x: model(x), "1GiB", blocks=[model[0]])

    with pytest.raises(remat.TraceError, match="nothing to differentiate"):
        remat.checkpoint(torch.sin, "1GiB")(torch.ones(2))
    copies = nn.DataParallel(model)
    with pytest.raises(remat.TraceError, match="DataParallel copies the module"):
        remat.checkpoint(lambda x: copies(x), "1GiB")


LED_BY: dict[str, Callable[[Any, nn.Module], Any]] = {
    "attribute": lambda holder, model: setattr(holder, "model", model),
    "list": lambda holder, model: setattr(holder, "models", [model]),
    "item": lambda holder, model: holder.models.__setitem__(0, model),
    "inner object": lambda holder, model: setattr(holder, "inner", SimpleNamespace(model=model)),
    "dictionary of lists": lambda holder, model: holder.named["all"].__setitem__(0, model),
}


def model_of(holder: Any, where: str) -> Any:
    if where == "attribute":
        return holder.model
    if where == "inner object":
        return holder.inner.model
    return holder.named["all"][0] if where == "dictionary of lists" else holder.models[0]


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("where", LED_BY)
def test_another_module_may_be_found_later(where: str, is_argument: bool) -> None:
    """Naive: the old one is kept alive, and the gradients of the new one are not counted."""
    variable = SimpleNamespace(models=[None], named={"all": [None]})
    LED_BY[where](variable, nn.Linear(WIDTH, WIDTH))

    def step(x: torch.Tensor, given: Any = None) -> Any:
        return model_of(given or variable, where)(x).square().mean()

    planned: Any = remat.checkpoint(step, UNLIMITED, costs="flops")
    given = (variable,) if is_argument else ()
    planned(rows(1), *given).backward()
    old = weakref.ref(model_of(variable, where))

    LED_BY[where](variable, nn.Linear(WIDTH, 2 * WIDTH))
    model = model_of(variable, where)
    for _ in range(2):
        planned(rows(1), *given).backward()
    assert list(planned.step.children()) == [model]
    held = sum(p.nbytes for p in model.parameters())
    assert remat.report(planned).solution.budget_bytes == UNLIMITED - held
    torch._dynamo.reset()
    gc.collect()
    assert old() is None


def test_a_variable_of_the_enclosing_function_may_name_another_module() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    planned: Any = remat.checkpoint(lambda x: model(x).sum(), UNLIMITED, costs="flops")
    planned(rows(1)).backward()
    model = nn.Linear(WIDTH, 2 * WIDTH)
    planned(rows(1)).backward()
    assert list(planned.step.children()) == [model]


def test_objects_that_live_for_one_call_are_told_apart() -> None:
    """Naive: by their numbers, which Python gives to the next object."""

    def step(x: torch.Tensor, holder: Any) -> Any:
        return holder.model(x).square().mean()

    planned: Any = remat.checkpoint(step, UNLIMITED, costs="flops")
    models = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    for model in models:
        planned(rows(1), SimpleNamespace(model=model)).backward()
        assert list(planned.step.children()) == [model]


def test_what_stays_the_same_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: devices, types and bound methods are taken for other ones at each call."""
    device, pairs = torch.device("cpu"), [(1, torch.ones(2)), (2, torch.ones(2))]
    settings = {"a": {"b": {"c": {"d": Path("x")}}}}

    def step(x: torch.Tensor, call: Any, dtype: torch.dtype) -> Any:
        assert device.type == "cpu" and pairs and settings
        return call(x.to(dtype)).square().mean()

    model = nn.Linear(WIDTH, WIDTH)
    planned: Any = remat.checkpoint(step, UNLIMITED, costs="flops")
    planned(rows(1), model.forward, torch.float32).backward()
    monkeypatch.setattr(type(planned.step), "reach", None)
    for _ in range(2):
        pairs.append((3, torch.ones(2)))  # data
        planned(rows(1), model.forward, torch.float32).backward()


def test_arguments_are_not_kept_alive() -> None:
    def step(batch: Any) -> Any:
        return model(batch.rows["x"]).square().mean()

    model = nn.Linear(WIDTH, WIDTH)
    planned: Any = remat.checkpoint(step, UNLIMITED, costs="flops")
    for _ in range(2):
        batch = SimpleNamespace(rows={"x": rows(1)})
        planned(batch).backward()
    tensor = weakref.ref(batch.rows["x"])
    del batch
    gc.collect()
    assert tensor() is None


def test_decorated_functions_are_searched() -> None:
    """Naive: a decorator's wrapper has its code in a library, and is skipped."""
    model, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    @torch.enable_grad()
    def helper(x: torch.Tensor) -> Any:
        return other(x)

    @torch.autocast("cpu", torch.bfloat16)  # type: ignore[untyped-decorator]
    def step(x: torch.Tensor) -> Any:
        return helper(model(x)).square().mean()

    assert set(reached_modules(step).values()) == {model, other}
    planned = remat.checkpoint(step, UNLIMITED, costs="flops")
    planned(rows(1)).backward()
    assert model.weight.grad is not None and other.weight.grad is not None


@pytest.mark.parametrize("name", ["task.a", "forward", "function", "half", "training"])
def test_modules_of_any_name_are_reached(name: str) -> None:
    heads = {name: nn.Linear(2, 2)}

    def step(x: torch.Tensor) -> Any:
        return heads[name](x).sum()

    for function in (step, functools.partial(heads[name])):
        remat.trace(function, (torch.ones(2, 2),), costs="flops", differentiate="all")


MODEL = nn.Linear(2, 2)
HELD: dict[str, Any] = {"models": [MODEL], "data": list(range(5000))}


def test_a_function_reaches_what_its_code_names() -> None:
    """Closures, defaults, globals and attributes that its code names, and nothing else."""
    other, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    holder = SimpleNamespace(inner=SimpleNamespace(part=other), unused=unused)

    def deep(x: torch.Tensor) -> Any:
        return (lambda: [holder.inner.part(x) for _ in range(2)])()

    def by_default(x: torch.Tensor, *, of: nn.Module = other) -> Any:
        return of(MODEL(x))

    def late(x: torch.Tensor) -> Any:
        return assigned_later(x)

    assert reached_modules(deep) == {"part": other}
    assert set(reached_modules(by_default).values()) == {MODEL, other}
    assert reached_modules(lambda x: HELD["models"][0](x)) == {"HELD_models_0": MODEL}

    assert reached_modules(late) == {}
    assigned_later = other
    assert reached_modules(late) == {"assigned_later": other}

    assert reached_modules(other.forward) == {"self": other}
    assert reached_modules(lambda x: F.relu(x)) == {}
