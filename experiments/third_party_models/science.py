"""Differential equations, Gaussian processes and neural operators."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from experiments.models import Workload

from .steps import (
    BATCH,
    Registry,
    load,
    mean_square,
    step,
)

SCIENCE = Registry()


class _Field(nn.Module):
    """The right-hand side of a differential equation."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width))

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns dy/dt."""
        out: torch.Tensor = self.net(y**3) * torch.cos(t)
        return out


def _ode(solver: str, method: str, **options: Any) -> Workload:
    solve = getattr(load("torchdiffeq"), solver)

    def loss(
        model: nn.Module, start: torch.Tensor, times: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        return F.mse_loss(solve(model, start, times, method=method, **options), targets)

    times = torch.linspace(0, 1, 6)
    return step(
        _Field(), loss, start=torch.randn(16, 8), times=times, targets=torch.randn(6, 16, 8)
    )


@SCIENCE.add("torchdiffeq", "differential equations", "torchdiffeq Runge-Kutta 4")
def _rk4() -> Workload:
    return _ode("odeint", "rk4", options={"step_size": 0.1})


@SCIENCE.add("torchdiffeq", "differential equations", "torchdiffeq Dormand-Prince, adaptive")
def _dopri() -> Workload:
    return _ode("odeint", "dopri5", rtol=1e-3, atol=1e-4)


@SCIENCE.add("torchdiffeq", "differential equations", "torchdiffeq adjoint")
def _adjoint() -> Workload:
    return _ode("odeint_adjoint", "rk4", options={"step_size": 0.2})


class _Noisy(nn.Module):
    """A stochastic differential equation with diagonal noise."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self) -> None:
        super().__init__()
        self.drift, self.noise = nn.Linear(4, 4), nn.Linear(4, 4)

    def f(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns the drift."""
        out: torch.Tensor = self.drift(y).tanh()
        return out

    def g(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns the diffusion."""
        out: torch.Tensor = self.noise(y).sigmoid() * 0.1
        return out

    def forward(self, start: torch.Tensor) -> torch.Tensor:
        """Returns the mean square at the end."""
        times = torch.linspace(0, 1, 5)
        motion = load("torchsde").BrownianInterval(t0=0.0, t1=1.0, size=(16, 4), entropy=1)
        path: torch.Tensor = load("torchsde").sdeint(
            self, start, times, bm=motion, dt=0.1, method="euler"
        )
        return path[-1].pow(2).mean()


@SCIENCE.add("torchsde", "differential equations", "torchsde Euler-Maruyama")
def _sde() -> Workload:
    return Workload(_Noisy().train(), {"start": torch.randn(16, 4)})


class _Controlled(nn.Module):
    """The vector field of a neural controlled differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.net, self.out = nn.Linear(3, 8), nn.Linear(8, 24), nn.Linear(8, 1)

    def forward(self, t: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Returns the field; shape (batch, 8, 3)."""
        field: torch.Tensor = self.net(z).tanh().view(*z.shape[:-1], 8, 3)
        return field


@SCIENCE.add("torchcde", "differential equations", "torchcde cubic splines")
def _cde() -> Workload:
    torchcde = load("torchcde")

    def loss(model: Any, coefficients: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        path = torchcde.CubicSpline(coefficients)
        start = model.first(path.evaluate(path.interval[0]))

        ends = torchcde.cdeint(
            X=path,
            func=model,
            z0=start,
            t=path.interval,
            adjoint=False,
            method="rk4",
            options={"step_size": 1.0},
        )

        return F.mse_loss(model.out(ends[:, -1]), targets)

    coefficients = torchcde.hermite_cubic_coefficients_with_backward_differences(
        torch.randn(BATCH, 8, 3)
    )
    return step(_Controlled(), loss, coefficients=coefficients, targets=torch.randn(BATCH, 1))


def _exact_process(deep: bool) -> Workload:
    gpytorch = load("gpytorch")
    x, y = torch.rand(64, 4), torch.randn(64)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class Process(gpytorch.models.ExactGP):  # type: ignore[misc, name-defined]  # the library has no types
        def __init__(self) -> None:
            super().__init__(x, y, likelihood)
            self.features = (
                nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
                if deep
                else nn.Identity()
            )
            self.mean, self.kernel = (
                gpytorch.means.ConstantMean(),
                gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()),
            )

        def forward(self, x: torch.Tensor) -> Any:
            features = self.features(x)
            return gpytorch.distributions.MultivariateNormal(
                self.mean(features), self.kernel(features)
            )

    model = Process()
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    return step(model, lambda model, x, y: -marginal(model(x), y), x=x, y=y)


@SCIENCE.add("gpytorch", "Gaussian processes", "gpytorch exact")
def _exact() -> Workload:
    return _exact_process(deep=False)


@SCIENCE.add("gpytorch", "Gaussian processes", "gpytorch deep kernel")
def _deep_kernel() -> Workload:
    return _exact_process(deep=True)


@SCIENCE.add("gpytorch", "Gaussian processes", "gpytorch variational")
def _variational() -> Workload:
    gpytorch = load("gpytorch")
    variational = gpytorch.variational

    class Process(gpytorch.models.ApproximateGP):  # type: ignore[misc, name-defined]  # the library has no types
        def __init__(self, points: torch.Tensor) -> None:
            distribution = variational.CholeskyVariationalDistribution(len(points))
            super().__init__(variational.VariationalStrategy(self, points, distribution))
            self.mean, self.kernel = (
                gpytorch.means.ConstantMean(),
                gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel()),
            )

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    model = Process(torch.rand(16, 4))
    bound = gpytorch.mlls.VariationalELBO(
        gpytorch.likelihoods.GaussianLikelihood(), model, num_data=64
    )
    x, y = torch.rand(64, 4), torch.randn(64)
    model.train()(x)  # initialises the variational distribution
    return step(model, lambda model, x, y: -bound(model(x), y), x=x, y=y)


def _operator(model: nn.Module) -> Workload:
    return step(
        model,
        mean_square,
        inputs=torch.randn(BATCH, 1, 32, 32),
        targets=torch.randn(BATCH, 1, 32, 32),
    )


@SCIENCE.add("neuraloperator", "neural operators", "neuraloperator FNO")
def _fno() -> Workload:
    return _operator(
        load("neuralop.models").FNO(
            n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16, n_layers=3
        )
    )


@SCIENCE.add("neuraloperator", "neural operators", "neuraloperator TFNO, factorised")
def _tfno() -> Workload:
    options = {
        "hidden_channels": 16,
        "n_layers": 2,
        "factorization": "tucker",
        "rank": 0.3,
        "implementation": "factorized",
    }
    return _operator(
        load("neuralop.models").TFNO(
            n_modes=(8, 8), in_channels=1, out_channels=1, norm="instance_norm", **options
        )
    )


@SCIENCE.add("neuraloperator", "neural operators", "neuraloperator UNO")
def _uno() -> Workload:
    sizes = {
        "hidden_channels": 16,
        "lifting_channels": 16,
        "projection_channels": 16,
        "n_layers": 3,
        "channel_mlp_skip": "linear",
    }
    scales = {
        "uno_out_channels": [16, 16, 16],
        "uno_n_modes": [[6, 6]] * 3,
        "uno_scalings": [[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]],
    }
    return _operator(load("neuralop.models").UNO(in_channels=1, out_channels=1, **sizes, **scales))
