"""Graphs of training steps of real size: bf16, roofline costs of an H100.

    python -m experiments.real_graphs FOLDER [NAME ...]     saves FOLDER/NAME.json

Large models are built and traced under fake tensors on the CPU: a machine with 24 GiB traces a
model of 7 billion parameters. The graphs are what the CPU would run: attention and convolution
layouts differ in detail from a GPU's kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import remat
from experiments.command_line import add_names, parser_of
from experiments.large_models import DenseNet, UNet, UnrolledLSTM

Step = tuple[nn.Module, dict[str, Any]]
COSTS = "roofline:H100"


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def gpt2(num_layers: int, width: int, heads: int, batch: int) -> Step:
    """GPT-2 (Radford et al., 2019) at its published sizes, 1,024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = _tokens(batch, 1024)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=num_layers, n_embd=width, n_head=heads, use_cache=False)
    )
    return model, {"input_ids": ids, "labels": ids}


def llama(num_layers: int, batch: int = 1, length: int = 2048) -> Step:
    """Llama's layers (Touvron et al., 2023) with the width of the 7 billion parameter model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = _tokens(batch, length)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers, use_cache=False)), {
        "input_ids": ids,
        "labels": ids,
    }


def bert_large() -> Step:
    """BERT large (Devlin et al., 2018), 512 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    ids = _tokens(16, 512)
    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids}


def t5_large() -> Step:
    """T5 large (Raffel et al., 2019), 512 tokens in and out."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, use_cache=False
    )
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config), {
        "input_ids": _tokens(8, 512),
        "labels": _tokens(8, 512),
    }


def vit_large() -> Step:
    """ViT-L/16 (Dosovitskiy et al., 2020), 224 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return ViTForImageClassification(config), _images(64)


def resnet(depths: list[int]) -> Step:
    """ResNet with bottlenecks (He et al., 2015), 224 pixels."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(depths=depths)), _images(128)


def mobilenet_v2() -> Step:
    """MobileNetV2 (Sandler et al., 2018), 224 pixels."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(MobileNetV2Config()), _images(256)


def mixtral(num_layers: int) -> Step:
    """Mixtral 8x7B (Jiang et al., 2024) at its width, with fewer layers.

    Eight experts, two per token.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    ids = _tokens(2, 2048)
    config = MixtralConfig(num_hidden_layers=num_layers, use_cache=False, output_router_logits=True)
    return MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}


def densenet121() -> Step:
    """DenseNet-121, 224 pixels."""
    return DenseNet(), {
        "images": torch.zeros(64, 3, 224, 224),
        "labels": torch.zeros(64, dtype=torch.long),
    }


def unet() -> Step:
    """U-Net, 512 pixels."""
    return UNet(), {
        "images": torch.zeros(4, 3, 512, 512),
        "labels": torch.zeros(4, 512, 512, dtype=torch.long),
    }


def lstm(num_tokens: int) -> Step:
    """Two layers of LSTM cells over a sequence."""
    return UnrolledLSTM(), {"ids": _tokens(64, num_tokens)}


def _images(batch: int, pixels: int = 224) -> dict[str, Any]:
    return {
        "pixel_values": torch.zeros(batch, 3, pixels, pixels),
        "labels": torch.zeros(batch, dtype=torch.long),
    }


STEPS: dict[str, Callable[[], Step]] = {
    "gpt2_12": lambda: gpt2(12, 768, 12, 8),
    "gpt2_24": lambda: gpt2(24, 1024, 16, 8),
    "gpt2_48": lambda: gpt2(48, 1600, 25, 4),
    "llama_32": lambda: llama(32, 4, 4096),
    "bert_large": bert_large,
    "t5_large": t5_large,
    "vit_large": vit_large,
    "resnet50": lambda: resnet([3, 4, 6, 3]),
    "resnet152": lambda: resnet([3, 8, 36, 3]),
    "densenet121": densenet121,
    "unet": unet,
    "mobilenet_v2": mobilenet_v2,
    "lstm_100": lambda: lstm(100),
    "mixtral_4": lambda: mixtral(4),
    "gpt2_100": lambda: gpt2(100, 768, 12, 8),
    "gpt2_200": lambda: gpt2(200, 768, 12, 8),
}
BENCHMARKED = tuple(name for name in STEPS if name not in ("gpt2_100", "gpt2_200"))
# one architecture from small to large
DEEP = ("gpt2_12", "gpt2_24", "gpt2_48", "gpt2_100", "gpt2_200")


# these read their weights while they are built, which fake tensors can't do; they are small enough
# to have real weights
_READS_ITS_WEIGHTS = ("vit", "resnet", "mobilenet")


@contextmanager
def _half_precision(*, is_fake: bool) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode() if is_fake else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


def graph_of(name: str, *, costs: str = COSTS) -> remat.Graph:
    """Returns the traced training step; takes 5 to 60 seconds."""
    with _half_precision(is_fake=not name.startswith(_READS_ITS_WEIGHTS)):
        model, kwargs = STEPS[name]()
    return remat.trace(model.train(), kwargs=kwargs, costs=costs)


def cached_graph(name: str, folder: Path) -> remat.Graph:
    """Returns the graph that was saved in `folder`, or traces and saves it."""
    path = folder / f"{name}.json"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        graph_of(name).save(path)
    return remat.Graph.load(path)


def main() -> None:
    """Traces and saves."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    add_names(parser, STEPS, "NAME")
    asked = parser.parse_args()

    folder: Path = asked.folder
    folder.mkdir(parents=True, exist_ok=True)

    for name in asked.names:
        start = time.perf_counter()
        graph = graph_of(name)
        graph.save(folder / f"{name}.json")

        print(
            f"{name}: {graph.num_operators:,} operators, {time.perf_counter() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
