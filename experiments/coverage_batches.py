"""Batches of random data for the architectures of `coverage_models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Batch = Callable[[], dict[str, Any]]

VOCABULARY = 96
_BATCH = 4
_TOKENS = 32


def words(tokens: int = _TOKENS) -> dict[str, Any]:
    """Token ids that are their own labels."""
    ids = torch.randint(3, VOCABULARY, (_BATCH, tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def words_alone(tokens: int = _TOKENS) -> dict[str, Any]:
    """Token ids and labels without a mask."""
    batch = words(tokens)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"]}


def padded_words() -> dict[str, Any]:
    """Token ids whose second row is half padding."""
    batch = words()
    batch["attention_mask"][1, _TOKENS // 2 :] = 0
    return batch


def images(pixels: int = 32) -> dict[str, Any]:
    """Images and a class for each."""
    return {
        "pixel_values": torch.randn(_BATCH, 3, pixels, pixels),
        "labels": torch.arange(_BATCH) % 2,
    }


def sized(make: Callable[[int], dict[str, Any]], size: int) -> Batch:
    """Returns a function that makes batches of another size."""
    return lambda: make(size)


def waves(labels: int = 4) -> dict[str, Any]:
    """Sound waves and their transcription."""
    return {
        "input_values": torch.randn(_BATCH, 400),
        "labels": torch.randint(3, VOCABULARY, (_BATCH, labels)),
    }


def spectrogram(name: str, shape: tuple[int, ...]) -> Batch:
    """Makes spectrograms under `name`, and their transcription."""
    return lambda: {
        name: torch.randn(_BATCH, *shape),
        "labels": torch.randint(3, VOCABULARY, (_BATCH, 6)),
    }


def sound_and_class() -> dict[str, Any]:
    """Spectrograms and a class for each."""
    return {"input_values": torch.randn(_BATCH, 32, 16), "labels": torch.arange(_BATCH) % 2}


def masked_images() -> dict[str, Any]:
    """Images, and which of their patches are hidden."""
    return {
        "pixel_values": torch.randn(_BATCH, 3, 32, 32),
        "bool_masked_pos": torch.arange(16).expand(_BATCH, 16) % 2 == 0,
    }


def segments() -> dict[str, Any]:
    """Images and a class for each pixel."""
    return {
        "pixel_values": torch.randn(_BATCH, 3, 32, 32),
        "labels": torch.randint(0, 2, (_BATCH, 32, 32)),
    }


def images_alone() -> dict[str, Any]:
    """Images without labels."""
    return {"pixel_values": torch.randn(_BATCH, 3, 32, 32)}


def text_and_image() -> dict[str, Any]:
    """Texts and the images that belong to them."""
    batch = words()
    del batch["labels"]
    return {**batch, "pixel_values": torch.randn(_BATCH, 3, 32, 32), "return_loss": True}


def question_about_image() -> dict[str, Any]:
    """Token ids with labels, and images."""
    return {**words(), "pixel_values": torch.randn(_BATCH, 3, 32, 32)}


def image_in_words() -> dict[str, Any]:
    """Token ids; the first 16 stand for the patches of an image."""
    batch = words(48)
    batch["input_ids"][:, :16] = VOCABULARY - 1
    batch["input_ids"][:, 16:].clamp_(max=VOCABULARY - 2)
    return {**batch, "pixel_values": torch.randn(_BATCH, 3, 32, 32)}


def series() -> dict[str, Any]:
    """Time series: past and future values."""
    return {"past_values": torch.randn(_BATCH, 32, 3), "future_values": torch.randn(_BATCH, 8, 3)}
