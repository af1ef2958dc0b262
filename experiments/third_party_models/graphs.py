"""Graph networks and equivariant networks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from experiments.models import Workload

from .steps import (
    Registry,
    load,
    step,
)

GRAPHS = Registry()
_NODES, _EDGES, _FEATURES = 512, 2048, 16


def _graph() -> dict[str, torch.Tensor]:
    edges = torch.stack([torch.randint(0, _NODES, (_EDGES,)), torch.arange(_EDGES) % _NODES])
    return {
        "x": torch.randn(_NODES, _FEATURES),
        "edge_index": edges,
        "labels": torch.randint(0, 4, (_NODES,)),
    }


def _node_loss(
    model: nn.Module, x: torch.Tensor, edge_index: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return F.cross_entropy(model(x, edge_index), labels)


_GRAPH_MODELS: dict[str, dict[str, Any]] = {
    "GCN": {"norm": "batch_norm"},
    "GAT": {"heads": 4, "v2": True},
    "GraphSAGE": {"jk": "cat"},
    "GIN": {"norm": "batch_norm"},
    "PNA": {
        "aggregators": ["mean", "max", "std"],
        "scalers": ["identity", "amplification"],
        "deg": torch.ones(16, dtype=torch.long),
    },
}


def _graph_model(kind: str, options: dict[str, Any]) -> Workload:
    model = getattr(load("torch_geometric.nn"), kind)(
        _FEATURES, 32, num_layers=3, out_channels=4, dropout=0.1, **options
    )
    return step(model, _node_loss, **_graph())


for _kind, _options in _GRAPH_MODELS.items():
    GRAPHS.add("torch_geometric", "graphs", f"torch_geometric {_kind}")(
        partial(_graph_model, _kind, _options)
    )


@GRAPHS.add("torch_geometric", "graphs", "torch_geometric GraphUNet, top-k pooling")
def _graph_unet() -> Workload:
    model = load("torch_geometric.nn").GraphUNet(_FEATURES, 32, 4, depth=2, pool_ratios=0.5)
    return step(model, _node_loss, **_graph())


@GRAPHS.add("torch_geometric", "graphs", "torch_geometric SchNet")
def _schnet() -> Workload:
    def connected(position: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        near = (torch.arange(128)[:, None] + torch.arange(1, 5)) % 128
        edges = torch.stack([near.flatten(), torch.arange(128).repeat_interleave(4)])
        return edges, (position[edges[0]] - position[edges[1]]).norm(dim=-1)

    model = load("torch_geometric.nn").SchNet(
        hidden_channels=32, num_filters=32, num_interactions=2, interaction_graph=connected
    )

    def loss(
        model: nn.Module, z: torch.Tensor, pos: torch.Tensor, energy: torch.Tensor
    ) -> torch.Tensor:
        return F.mse_loss(model(z, pos), energy)

    return step(
        model,
        loss,
        z=torch.randint(1, 10, (128,)),
        pos=torch.randn(128, 3) * 3,
        energy=torch.randn(1, 1),
    )


@GRAPHS.add("torch_geometric", "graphs", "torch_geometric AttentiveFP")
def _attentive() -> Workload:
    model = load("torch_geometric.nn").AttentiveFP(
        _FEATURES, 32, 1, edge_dim=8, num_layers=2, num_timesteps=2, dropout=0.1
    )

    graph = _graph()
    batch = {
        "x": graph["x"],
        "edge_index": graph["edge_index"],
        "edge_attr": torch.randn(_EDGES, 8),
        "batch": torch.arange(_NODES) // 128,
    }

    def loss(model: nn.Module, targets: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(**batch), targets)

    return step(model, loss, **batch, targets=torch.randn(4, 1))


@GRAPHS.add("torch_geometric", "graphs", "torch_geometric GPS, global attention")
def _gps() -> Workload:
    layers = load("torch_geometric.nn")
    local = layers.GINConv(nn.Sequential(nn.Linear(_FEATURES, 16), nn.ReLU(), nn.Linear(16, 16)))
    model = layers.GPSConv(_FEATURES, local, heads=4, dropout=0.1)

    def loss(model: nn.Module, labels: torch.Tensor, **graph: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(**graph)[:, :4], labels)

    return step(model, loss, **_graph(), batch=torch.arange(_NODES) // 128)


@GRAPHS.add("torch_geometric", "graphs", "torch_geometric graph autoencoder")
def _graph_autoencoder() -> Workload:
    library = load("torch_geometric.nn")

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.mean, self.log_std = (
                library.GCNConv(*size) for size in ((_FEATURES, 32), (32, 8), (32, 8))
            )

        def forward(
            self, x: torch.Tensor, edge_index: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.shared(x, edge_index).relu()
            return self.mean(hidden, edge_index), self.log_std(hidden, edge_index)

    def loss(
        model: Any, x: torch.Tensor, edge_index: torch.Tensor, missing: torch.Tensor
    ) -> torch.Tensor:
        codes = model.encode(x, edge_index)
        total: torch.Tensor = (
            model.recon_loss(codes, edge_index, missing) + model.kl_loss() / _NODES
        )
        return total

    graph = _graph()
    missing = torch.randint(0, _NODES, (2, _EDGES))
    return step(
        library.VGAE(Encoder()), loss, x=graph["x"], edge_index=graph["edge_index"], missing=missing
    )


@GRAPHS.add("egnn-pytorch", "graphs", "egnn-pytorch EGNN")
def _egnn() -> Workload:
    model = load("egnn_pytorch").EGNN_Network(
        num_tokens=21,
        dim=32,
        depth=2,
        num_nearest_neighbors=4,
        dropout=0.1,
        coor_weights_clamp_value=2.0,
    )

    def loss(model: nn.Module, atoms: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        features, moved = model(atoms, positions)
        total: torch.Tensor = features.pow(2).mean() + F.mse_loss(moved, positions)
        return total

    return step(model, loss, atoms=torch.randint(0, 21, (2, 16)), positions=torch.randn(2, 16, 3))


@GRAPHS.add("e3nn", "equivariant", "e3nn message passing")
def _e3nn() -> Workload:
    o3 = load("e3nn.o3")
    module = load("e3nn.nn.models.v2106.gate_points_message_passing")
    model = module.MessagePassing(
        ["4x0e", "8x0e + 4x1o", "1x0e"], "1x0e", "1x0e + 1x1o", [8, 16], 4.0
    )
    edges = torch.stack([torch.randint(0, 16, (64,)), torch.arange(64) % 16])

    def loss(
        model: Any,
        position: torch.Tensor,
        features: torch.Tensor,
        edges: torch.Tensor,
        energy: torch.Tensor,
    ) -> torch.Tensor:
        source, target = edges
        vector = position[source] - position[target]
        attributes = o3.spherical_harmonics(
            "1x0e + 1x1o", vector, normalize=True, normalization="component"
        )

        scalars = torch.exp(-((vector.norm(dim=-1, keepdim=True) - torch.linspace(0, 3, 8)) ** 2))
        out = model(features, torch.ones(16, 1), source, target, attributes, scalars)
        return F.mse_loss(out.sum(), energy)

    return step(
        model,
        loss,
        position=torch.randn(16, 3),
        features=torch.randn(16, 4),
        edges=edges,
        energy=torch.tensor(1.0),
    )


@GRAPHS.add("e3nn", "equivariant", "e3nn tensor products")
def _tensor_products() -> Workload:
    o3 = load("e3nn.o3")
    irreps = "8x0e + 4x1o + 2x2e"
    product = o3.FullyConnectedTensorProduct(irreps, irreps, irreps)
    net = nn.ModuleList(
        [o3.Linear(irreps, irreps), product, load("e3nn.nn").NormActivation(irreps, torch.sigmoid)]
    )

    def loss(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        linear, product, activation = model
        return F.mse_loss(activation(product(linear(inputs), inputs)), targets)

    width = o3.Irreps(irreps).dim
    return step(net, loss, inputs=torch.randn(64, width), targets=torch.randn(64, width))
