"""Models of tables, codebooks, metric learning and normalising flows."""

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

TABLES = Registry()


@TABLES.add("vector-quantize-pytorch", "autoencoders", "vector-quantize-pytorch, averaged codes")
def _codes() -> Workload:
    model = load("vector_quantize_pytorch").VectorQuantize(
        dim=16, codebook_size=32, threshold_ema_dead_code=0, decay=0.8
    )
    return step(
        nn.ModuleList([nn.Linear(8, 16), model, nn.Linear(16, 8)]),
        _quantized,
        inputs=torch.randn(BATCH, 32, 8),
    )


@TABLES.add("vector-quantize-pytorch", "autoencoders", "vector-quantize-pytorch, residual")
def _residual_codes() -> Workload:
    model = load("vector_quantize_pytorch").ResidualFSQ(dim=16, levels=[8, 5, 5], num_quantizers=2)
    return step(
        nn.ModuleList([nn.Linear(8, 16), model, nn.Linear(16, 8)]),
        _quantized,
        inputs=torch.randn(BATCH, 32, 8),
    )


def _quantized(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    before, quantizer, after = model
    quantized, _, *commitment = quantizer(before(inputs))
    committed = sum((part.sum() for part in commitment), torch.zeros(()))
    return F.mse_loss(after(quantized), inputs) + committed


@TABLES.add("pytorch-tabnet", "tables", "pytorch-tabnet TabNet")
def _tab_net() -> Workload:
    model = load("pytorch_tabnet.tab_network").TabNet(
        16, 4, n_steps=2, virtual_batch_size=32, group_attention_matrix=torch.eye(16)
    )

    def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, sparsity = model(images)
        total: torch.Tensor = F.cross_entropy(logits, labels) - 1e-3 * sparsity
        return total

    return step(model, loss, images=torch.randn(64, 16), labels=torch.arange(64) % 4)


@TABLES.add("pykan", "tables", "pykan KAN")
def _kan() -> Workload:
    model = load("kan.MultKAN").MultKAN(
        [4, 8, 1], grid=5, auto_save=False, save_act=False, symbolic_enabled=False
    )
    return step(model, mean_square, inputs=torch.rand(256, 4), targets=torch.rand(256, 1))


@TABLES.add("pytorch-metric-learning", "tables", "pytorch-metric-learning, hard triplets")
def _metric() -> Workload:
    loss_of = load("pytorch_metric_learning.losses").TripletMarginLoss(margin=0.2)
    mined = load("pytorch_metric_learning.miners").BatchHardMiner()

    def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        embeddings = model(images)
        total: torch.Tensor = loss_of(embeddings, labels, mined(embeddings, labels))
        return total

    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 16))
    return step(net, loss, images=torch.randn(32, 16), labels=torch.arange(32) % 4)


@TABLES.add("pytorch-metric-learning", "tables", "pytorch-metric-learning, ArcFace")
def _arc_face() -> Workload:
    loss_of = load("pytorch_metric_learning.losses").ArcFaceLoss(num_classes=4, embedding_size=16)
    net = nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)), loss_of])

    def loss(model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = model[1](model[0](images), labels)
        return total

    return step(net, loss, images=torch.randn(32, 16), labels=torch.arange(32) % 4)


def _flow(kind: str, **options: Any) -> Workload:
    flow = getattr(load("zuko.flows"), kind)(4, 2, **options)
    return step(
        flow,
        lambda model, x, c: -model(c).log_prob(x).mean(),
        x=torch.randn(64, 4),
        c=torch.randn(64, 2),
    )


@TABLES.add("zuko", "flows", "zuko neural spline flow")
def _spline_flow() -> Workload:
    return _flow("NSF", transforms=2, hidden_features=(32, 32))


@TABLES.add("zuko", "flows", "zuko autoregressive flow")
def _autoregressive_flow() -> Workload:
    return _flow("MAF", transforms=3, hidden_features=(32, 32))


@TABLES.add("zuko", "flows", "zuko continuous flow")
def _continuous_flow() -> Workload:
    return _flow("CNF", hidden_features=(32,))


@TABLES.add("nflows", "flows", "nflows coupling flow")
def _coupling_flow() -> Workload:
    model = load("nflows.flows.realnvp").SimpleRealNVP(
        4, 32, 3, 2, batch_norm_between_layers=True, dropout_probability=0.1
    )
    return step(model, lambda model, x: -model.log_prob(x).mean(), x=torch.randn(64, 4))
