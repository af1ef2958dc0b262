"""Language models and embeddings of sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from experiments.models import Workload

from .steps import (
    VOCABULARY,
    Registry,
    load,
    next_token,
    step,
    tokens,
)

LANGUAGE = Registry()
_LENGTH = 64


def _x_transformer(
    wrapped: dict[str, Any] | None = None, kind: str = "Decoder", **options: Any
) -> nn.Module:
    x = load("x_transformers")
    layers = getattr(x, kind)(
        dim=64, depth=3, heads=4, attn_dim_head=16, attn_dropout=0.1, ff_dropout=0.1, **options
    )
    model: nn.Module = x.TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=_LENGTH, attn_layers=layers, **(wrapped or {})
    )
    return model


@LANGUAGE.add("x-transformers", "language", "x-transformers decoder, rotary")
def _rotary() -> Workload:
    model = _x_transformer(rotary_pos_emb=True, attn_flash=True, use_rmsnorm=True, ff_glu=True)
    return step(
        load("x_transformers").AutoregressiveWrapper(model),
        lambda model, ids: model(ids),
        ids=tokens(_LENGTH),
    )


@LANGUAGE.add("x-transformers", "language", "x-transformers decoder, ALiBi and memory")
def _alibi() -> Workload:
    model = _x_transformer(
        {"num_memory_tokens": 4, "emb_dropout": 0.1},
        alibi_pos_bias=True,
        macaron=True,
        attn_num_mem_kv=2,
    )
    return step(model, next_token, ids=tokens(_LENGTH))


@LANGUAGE.add("x-transformers", "language", "x-transformers encoder, layer dropout")
def _dropped() -> Workload:
    model = _x_transformer(kind="Encoder", layer_dropout=0.2, rel_pos_bias=True)
    return step(model, next_token, ids=tokens(_LENGTH))


@LANGUAGE.add("x-transformers", "language", "x-transformers encoder and decoder")
def _both() -> Workload:
    sides = {
        f"{side}_{key}": value
        for side in ("enc", "dec")
        for key, value in {
            "num_tokens": VOCABULARY,
            "depth": 2,
            "heads": 4,
            "max_seq_len": 32,
        }.items()
    }

    model = load("x_transformers").XTransformer(dim=64, tie_token_emb=True, **sides)
    return step(
        model,
        lambda model, source, target: model(source, target),
        source=tokens(32),
        target=tokens(32),
    )


@LANGUAGE.add("performer-pytorch", "language", "performer-pytorch PerformerLM")
def _performer() -> Workload:
    sizes = {
        "num_tokens": VOCABULARY,
        "max_seq_len": _LENGTH,
        "dim": 64,
        "depth": 2,
        "heads": 4,
        "dim_head": 16,
    }

    model = load("performer_pytorch").PerformerLM(
        **sizes, causal=False, nb_features=16, ff_dropout=0.1
    )
    return step(model, next_token, ids=tokens(_LENGTH + 1))


@LANGUAGE.add("reformer-pytorch", "language", "reformer-pytorch ReformerLM")
def _reformer() -> Workload:
    sizes = {
        "num_tokens": VOCABULARY,
        "dim": 64,
        "depth": 2,
        "max_seq_len": _LENGTH,
        "heads": 4,
        "bucket_size": 16,
        "n_hashes": 2,
    }

    model = load("reformer_pytorch").ReformerLM(**sizes, ff_chunks=2, causal=True)
    return step(model, next_token, ids=tokens(_LENGTH + 1))


@LANGUAGE.add(
    "linear-attention-transformer", "language", "linear-attention-transformer, reversible"
)
def _linear_attention() -> Workload:
    sizes = {"num_tokens": VOCABULARY, "dim": 64, "depth": 2, "max_seq_len": _LENGTH, "heads": 4}
    model = load("linear_attention_transformer").LinearAttentionTransformerLM(
        **sizes, reversible=True, ff_dropout=0.1
    )
    return step(model, next_token, ids=tokens(_LENGTH + 1))


@LANGUAGE.add("local-attention", "language", "local-attention LocalTransformer")
def _local() -> Workload:
    sizes = {
        "num_tokens": VOCABULARY,
        "max_seq_len": _LENGTH,
        "dim": 64,
        "depth": 2,
        "heads": 4,
        "dim_head": 16,
    }

    model = load("local_attention").LocalTransformer(
        **sizes, local_attn_window_size=16, attn_dropout=0.1
    )
    return step(model, next_token, ids=tokens(_LENGTH + 1))


class _Encoder(nn.Module):
    """BERT, as a module of sentence-transformers."""

    def __init__(self) -> None:
        super().__init__()
        transformers = load("transformers")
        sizes = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
        }
        self.bert = transformers.BertModel(
            transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes)
        )

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Adds an embedding per token to the features."""
        found = self.bert(
            input_ids=features["input_ids"], attention_mask=features["attention_mask"]
        )
        return {**features, "token_embeddings": found.last_hidden_state}


def _sentences(loss: str, columns: int, labels: torch.Tensor | None = None) -> Workload:
    library = load("sentence_transformers")
    parts = load("sentence_transformers.models")
    pooling = parts.Pooling(32, pooling_mode="mean")

    model = library.SentenceTransformer(
        modules=[_Encoder(), pooling, parts.Dense(32, 16), parts.Normalize()], device="cpu"
    )

    criterion = getattr(load("sentence_transformers.losses"), loss)(model)
    ids = [tokens(24, 8) for _ in range(columns)]
    features = [
        {
            "input_ids": column,
            "attention_mask": (torch.arange(24) < 12 + torch.arange(8)[:, None]).long(),
        }
        for column in ids
    ]

    return step(
        criterion,
        _loss_of_sentences,
        features=features,
        labels=labels,
    )


def _loss_of_sentences(
    model: nn.Module, features: Sequence[dict[str, torch.Tensor]], labels: torch.Tensor | None
) -> torch.Tensor:
    loss: torch.Tensor = model([dict(column) for column in features], labels)
    return loss


@LANGUAGE.add("sentence-transformers", "sentences", "sentence-transformers, negatives ranked")
def _ranking() -> Workload:
    return _sentences("MultipleNegativesRankingLoss", 2)


@LANGUAGE.add("sentence-transformers", "sentences", "sentence-transformers, cosine")
def _cosine() -> Workload:
    return _sentences("CosineSimilarityLoss", 2, torch.rand(8))


@LANGUAGE.add("sentence-transformers", "sentences", "sentence-transformers, triplets")
def _triplets() -> Workload:
    return _sentences("TripletLoss", 3)
