"""State-space, recurrent, spiking and speech models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from experiments.models import Workload

from .steps import (
    BATCH,
    VOCABULARY,
    Registry,
    load,
    mean_square,
    step,
    tokens,
)

RECURRENT = Registry()


@RECURRENT.add("mambapy", "state space", "mambapy Mamba, parallel scan")
def _mamba() -> Workload:
    library = load("mambapy.mamba")
    model = library.Mamba(library.MambaConfig(d_model=32, n_layers=2, d_state=8, pscan=True))
    return step(
        model, mean_square, inputs=torch.randn(BATCH, 32, 32), targets=torch.randn(BATCH, 32, 32)
    )


@RECURRENT.add("mambapy", "state space", "mambapy Mamba, loop")
def _mamba_loop() -> Workload:
    library = load("mambapy.mamba")
    model = library.Mamba(library.MambaConfig(d_model=32, n_layers=2, d_state=8, pscan=False))
    return step(
        model, mean_square, inputs=torch.randn(BATCH, 32, 32), targets=torch.randn(BATCH, 32, 32)
    )


@RECURRENT.add("minGRU-pytorch", "state space", "minGRU-pytorch minLM")
def _min_gru() -> Workload:
    model = load("minGRU_pytorch.minLM").minLM(num_tokens=VOCABULARY, dim=64, depth=2)
    return step(model, lambda model, ids: model(ids, return_loss=True), ids=tokens(64))


def _xlstm(**blocks: Any) -> Workload:
    x = load("xlstm")
    sizes = {"context_length": 32, "num_blocks": 2, "embedding_dim": 32, "dropout": 0.1}
    model = x.xLSTMBlockStack(x.xLSTMBlockStackConfig(**blocks, **sizes))
    return step(
        model, mean_square, inputs=torch.randn(BATCH, 32, 32), targets=torch.randn(BATCH, 32, 32)
    )


@RECURRENT.add("xlstm", "state space", "xlstm mLSTM")
def _mlstm() -> Workload:
    x = load("xlstm")
    return _xlstm(mlstm_block=x.mLSTMBlockConfig(mlstm=x.mLSTMLayerConfig(num_heads=4)))


@RECURRENT.add("xlstm", "recurrent", "xlstm sLSTM")
def _slstm() -> Workload:
    x = load("xlstm")
    cell = x.sLSTMLayerConfig(backend="vanilla", num_heads=4)
    return _xlstm(slstm_block=x.sLSTMBlockConfig(slstm=cell), slstm_at="all")


@RECURRENT.add("ncps", "recurrent", "ncps CfC")
def _cfc() -> Workload:
    model = load("ncps.torch").CfC(8, 32, backbone_dropout=0.1)
    return step(
        model,
        _last_of_recurrent,
        inputs=torch.randn(BATCH, 16, 8),
        targets=torch.randn(BATCH, 16, 32),
    )


@RECURRENT.add("ncps", "recurrent", "ncps LTC, wired")
def _ltc() -> Workload:
    model = load("ncps.torch").LTC(8, load("ncps.wirings").AutoNCP(16, 4), ode_unfolds=3)
    return step(
        model, _last_of_recurrent, inputs=torch.randn(BATCH, 8, 8), targets=torch.randn(BATCH, 8, 4)
    )


def _last_of_recurrent(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    outputs, _ = model(inputs)
    return F.mse_loss(outputs, targets)


@RECURRENT.add("pytorch-tcn", "recurrent", "pytorch-tcn TCN")
def _tcn() -> Workload:
    model = load("pytorch_tcn").TCN(
        8, [16, 16, 16], kernel_size=3, dropout=0.1, use_skip_connections=True
    )
    return step(
        model, mean_square, inputs=torch.randn(BATCH, 8, 64), targets=torch.randn(BATCH, 16, 64)
    )


class _Tagger(nn.Module):
    """A GRU below a conditional random field."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.recurrent = nn.GRU(16, 32, batch_first=True, bidirectional=True)
        self.emissions, self.crf = nn.Linear(64, 5), load("torchcrf").CRF(5, batch_first=True)

    def forward(self, ids: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns the negative log likelihood of the tags."""
        emissions = self.emissions(self.recurrent(self.embedding(ids))[0])
        loss: torch.Tensor = -self.crf(emissions, tags, mask=mask)
        return loss


@RECURRENT.add("pytorch-crf", "recurrent", "pytorch-crf GRU and CRF")
def _crf() -> Workload:
    mask = torch.arange(16).expand(BATCH, 16) < torch.tensor([[16], [12], [9], [5]])
    return Workload(
        _Tagger().train(),
        {"ids": tokens(16), "tags": torch.randint(0, 5, (BATCH, 16)), "mask": mask},
    )


@RECURRENT.add("speechbrain", "speech", "speechbrain Conformer")
def _conformer() -> Workload:
    model = load("speechbrain.lobes.models.transformer.Conformer").ConformerEncoder(
        num_layers=2, d_model=32, d_ffn=64, nhead=4, kernel_size=7, dropout=0.1
    )
    positions = load("speechbrain.nnet.attention").RelPosEncXL(32)
    encoder = nn.ModuleDict({"encoder": model, "positions": positions})

    def loss(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        encoded, _ = model["encoder"](inputs, pos_embs=model["positions"](inputs))
        return F.mse_loss(encoded, targets)

    return step(
        encoder, loss, inputs=torch.randn(BATCH, 48, 32), targets=torch.randn(BATCH, 48, 32)
    )


@RECURRENT.add("speechbrain", "speech", "speechbrain ECAPA-TDNN")
def _ecapa() -> Workload:
    sizes = {
        "channels": [32, 32, 32, 32, 96],
        "attention_channels": 16,
        "se_channels": 16,
        "lin_neurons": 10,
        "res2net_scale": 4,
    }
    model = load("speechbrain.lobes.models.ECAPA_TDNN").ECAPA_TDNN(20, **sizes)

    def loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs).squeeze(1), labels)

    return step(model, loss, inputs=torch.randn(BATCH, 48, 20), labels=torch.arange(BATCH))


@RECURRENT.add("speechbrain", "speech", "speechbrain CRDNN, CTC")
def _crdnn() -> Workload:
    sizes = {
        "cnn_channels": [8, 8],
        "rnn_layers": 1,
        "rnn_neurons": 16,
        "dnn_blocks": 1,
        "dnn_neurons": 12,
    }
    model = load("speechbrain.lobes.models.CRDNN").CRDNN(input_shape=[BATCH, 32, 20], **sizes)

    def loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        log_probabilities = model(inputs).log_softmax(-1).transpose(0, 1)
        lengths = (
            torch.full((BATCH,), log_probabilities.shape[0]),
            torch.full((BATCH,), targets.shape[1]),
        )
        return F.ctc_loss(log_probabilities, targets, *lengths)

    return step(
        model, loss, inputs=torch.randn(BATCH, 32, 20), targets=torch.randint(1, 12, (BATCH, 4))
    )


@RECURRENT.add("conformer", "speech", "conformer Conformer")
def _other_conformer() -> Workload:
    model = load("conformer").Conformer(
        dim=32, depth=2, dim_head=8, heads=4, conv_kernel_size=7, attn_dropout=0.1, ff_dropout=0.1
    )
    return step(
        model, mean_square, inputs=torch.randn(BATCH, 48, 32), targets=torch.randn(BATCH, 48, 32)
    )


class _Spiking(nn.Module):
    """Two layers of leaky neurons over time, trained through a surrogate gradient."""

    def __init__(self) -> None:
        super().__init__()
        neurons = load("snntorch")
        slope = load("snntorch.surrogate").fast_sigmoid(slope=25)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 10)
        self.leaky1 = neurons.Leaky(beta=0.9, spike_grad=slope, learn_beta=True)
        self.leaky2 = neurons.Synaptic(alpha=0.8, beta=0.9, spike_grad=slope)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the cross entropy of the potentials, summed; images are (time, batch, 32)."""
        potential1 = self.leaky1.init_leaky()
        synapse, potential2 = self.leaky2.init_synaptic()
        loss = torch.zeros(())
        for image in images:
            spikes, potential1 = self.leaky1(self.first(image), potential1)
            _, synapse, potential2 = self.leaky2(self.second(spikes), synapse, potential2)
            loss = loss + F.cross_entropy(potential2, labels)
        return loss


@RECURRENT.add("snntorch", "spiking", "snntorch Leaky and Synaptic")
def _snn() -> Workload:
    return Workload(
        _Spiking().train(), {"images": torch.rand(10, BATCH, 32), "labels": torch.arange(BATCH)}
    )


@RECURRENT.add("norse", "spiking", "norse LIF")
def _norse() -> Workload:
    norse = load("norse.torch")
    model = norse.SequentialState(
        nn.Conv2d(1, 4, 3),
        norse.LIFCell(),
        nn.Flatten(),
        nn.Linear(4 * 14 * 14, 10),
        norse.LICell(),
    )

    def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        state, largest = None, torch.full((BATCH, 10), -torch.inf)
        for image in images:
            voltage, state = model(image, state)
            largest = torch.maximum(largest, voltage)
        return F.cross_entropy(largest, labels)

    return step(model, loss, images=torch.rand(8, BATCH, 1, 16, 16) * 5, labels=torch.arange(BATCH))
