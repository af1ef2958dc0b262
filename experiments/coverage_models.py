"""Tiny training steps of many architectures, from `transformers` and hand-written.

Every model is in training mode with dropout on. Sizes are tiny on purpose: the question is whether
a planned step equals the plain one to the bit, not how long it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .coverage_batches import (
    VOCABULARY,
    Batch,
    image_in_words,
    images,
    images_alone,
    masked_images,
    padded_words,
    question_about_image,
    segments,
    series,
    sized,
    sound_and_class,
    spectrogram,
    text_and_image,
    waves,
    words,
    words_alone,
)
from .hand_written import HAND_WRITTEN, HandWritten
from .models import Workload


@dataclass(frozen=True)
class Architecture:
    """A model of `transformers` in a small configuration, and a batch for it.

    Attributes:
        family: what kind of model it is.
        model: name of its class.
        config: arguments of its configuration.
        batch: makes the keyword arguments of one step.
        is_summed: the loss is the mean square of the logits, because the model's own loss needs a
            library that is not installed.
    """

    family: str
    model: str
    config: Mapping[str, Any]
    batch: Batch
    is_summed: bool = False

    def make(self) -> Workload:
        """Returns the model with random weights, in training mode, and its batch."""
        import transformers

        kind = getattr(transformers, self.model)
        config = {
            name: value() if callable(value) else value for name, value in self.config.items()
        }
        model = kind(kind.config_class(**config))
        return Workload(
            _MeanSquare(model).train() if self.is_summed else model.train(), self.batch()
        )


class _MeanSquare(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(**batch).logits
        return logits.pow(2).mean()


_LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
}
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    **_LAYERS,
    **_TOKEN_IDS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
    "use_cache": False,
}
_GPT = {
    "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, **_TOKEN_IDS, "use_cache": False,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
}  # fmt: skip
_BERT = {
    **_LAYERS, "pad_token_id": 0, "max_position_embeddings": 64, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
_BART = {
    **_TOKEN_IDS, "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.1,
    "attention_dropout": 0.1, "decoder_start_token_id": 2, "forced_eos_token_id": None, "use_cache": False,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
    "pad_token_id": 0, "eos_token_id": 1, "use_cache": False,
}  # fmt: skip
_VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
_SPEECH = {
    **_LAYERS, "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    "mask_time_prob": 0.0, "layerdrop": 0.0, "pad_token_id": 0, "ctc_loss_reduction": "mean",
}  # fmt: skip
_MAMBA = {
    **_TOKEN_IDS, "vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "use_cache": False,
    "use_associative_scan": False,
}  # fmt: skip
_NO_LAYER_DROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}


def _causal(model: str, config: Mapping[str, Any], batch: Batch = words) -> Architecture:
    return Architecture("causal", model, config, batch)


def _masked(model: str, config: Mapping[str, Any], batch: Batch = padded_words) -> Architecture:
    return Architecture("masked", model, config, batch)


def _encoder_decoder(model: str, config: Mapping[str, Any], batch: Batch = words) -> Architecture:
    return Architecture("encoder-decoder", model, config, batch)


def _vision(
    model: str, config: Mapping[str, Any], batch: Batch = images, *, is_summed: bool = False
) -> Architecture:
    return Architecture("vision", model, config, batch, is_summed)


def _speech(model: str, config: Mapping[str, Any], batch: Batch) -> Architecture:
    return Architecture("speech", model, config, batch)


def _experts(model: str, config: Mapping[str, Any], batch: Batch = words) -> Architecture:
    return Architecture("mixture of experts", model, config, batch)


def _state_space(model: str, config: Mapping[str, Any], batch: Batch = words) -> Architecture:
    return Architecture("state space", model, config, batch)


def _several(model: str, config: Mapping[str, Any], batch: Batch) -> Architecture:
    return Architecture("several inputs", model, config, batch)


def _clip_config() -> dict[str, Any]:
    text = {**_LAYERS, **_TOKEN_IDS, "max_position_embeddings": 64, "attention_dropout": 0.1}
    image = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
    }

    return {
        "text_config": text,
        "vision_config": {**image, "attention_dropout": 0.1},
        "projection_dim": 16,
    }


def _named(kind: str, **config: Any) -> Callable[[], Any]:
    """Returns a maker of a nested configuration; it imports `transformers` when called."""

    def make() -> Any:
        import transformers

        return getattr(transformers, kind)(**config)

    return make


_SMALL_RESNET = _named(
    "ResNetConfig",
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
    layer_type="basic",
    out_features=["stage2"],
)
_STAGES = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "num_attention_heads": [1, 2],
}

ARCHITECTURES: dict[str, Architecture | HandWritten] = {
    **HAND_WRITTEN,
    # causal
    "GPT-2": _causal("GPT2LMHeadModel", _GPT),
    "GPT-Neo": _causal("GPTNeoForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
        "window_size": 8, "max_position_embeddings": 64, "attention_dropout": 0.1, "resid_dropout": 0.1, "embed_dropout": 0.1,
        "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
    }),
    "GPT-J": _causal("GPTJForCausalLM", {**_GPT, "rotary_dim": 4}),
    "GPT-NeoX": _causal("GPTNeoXForCausalLM", {**_LAYERS, "hidden_dropout": 0.1, "attention_dropout": 0.1, "use_cache": False}),
    "GPT-BigCode": _causal("GPTBigCodeForCausalLM", _GPT),
    "CodeGen": _causal("CodeGenForCausalLM", {**_GPT, "rotary_dim": 4}),
    "OPT": _causal("OPTForCausalLM", {
        **_LAYERS, **_TOKEN_IDS, "ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.1, "attention_dropout": 0.1,
        "word_embed_proj_dim": 32, "use_cache": False,
    }),
    "Bloom": _causal("BloomForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1,
        **_TOKEN_IDS, "use_cache": False,
    }),
    "Llama": _causal("LlamaForCausalLM", _LLAMA),
    "Mistral": _causal("MistralForCausalLM", {**_LLAMA, "sliding_window": 8}),
    "Qwen2": _causal("Qwen2ForCausalLM", _LLAMA),
    "Qwen3": _causal("Qwen3ForCausalLM", {**_LLAMA, "head_dim": 8}),
    "Phi": _causal("PhiForCausalLM", {**_LLAMA, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "Phi-3": _causal("Phi3ForCausalLM", {**_LLAMA, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "Gemma": _causal("GemmaForCausalLM", {**_LLAMA, "head_dim": 8}),
    "Gemma 2": _causal("Gemma2ForCausalLM", {**_LLAMA, "head_dim": 8, "sliding_window": 8}),
    "Gemma 3": _causal("Gemma3ForCausalLM", {**_LLAMA, "head_dim": 8, "sliding_window": 8}),
    "Falcon": _causal("FalconForCausalLM", {**_LAYERS, **_TOKEN_IDS, "hidden_dropout": 0.1, "attention_dropout": 0.1, "use_cache": False}),
    "MPT": _causal("MptForCausalLM", {
        "vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "resid_pdrop": 0.1, "emb_pdrop": 0.1,
        "use_cache": False,
    }),
    "StableLM": _causal("StableLmForCausalLM", {**_LLAMA, "hidden_dropout": 0.1}),
    "Granite": _causal("GraniteForCausalLM", _LLAMA),
    "OLMo": _causal("OlmoForCausalLM", _LLAMA),
    "OLMo 2": _causal("Olmo2ForCausalLM", _LLAMA),
    "Starcoder 2": _causal("Starcoder2ForCausalLM", {**_LLAMA, "residual_dropout": 0.1, "embedding_dropout": 0.1}),
    "Cohere": _causal("CohereForCausalLM", _LLAMA),
    "Persimmon": _causal("PersimmonForCausalLM", {**_LLAMA, "hidden_dropout": 0.1}),
    "Nemotron": _causal("NemotronForCausalLM", {**_LLAMA, "hidden_dropout": 0.1}),
    "GLM": _causal("GlmForCausalLM", {**_LLAMA, "head_dim": 8}),
    "SmolLM 3": _causal("SmolLM3ForCausalLM", _LLAMA),
    "XGLM": _causal("XGLMForCausalLM", {
        **_TOKEN_IDS, "vocab_size": VOCABULARY, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64,
        "max_position_embeddings": 64, "dropout": 0.1, "attention_dropout": 0.1, "layerdrop": 0.0, "use_cache": False,
    }),
    "BioGPT": _causal("BioGptForCausalLM", {
        **_BERT, **_TOKEN_IDS, "layerdrop": 0.0, "activation_dropout": 0.1, "use_cache": False,
    }),
    "XLNet": _causal("XLNetLMHeadModel", {
        "vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "dropout": 0.1, "use_mems_train": False,
    }, words_alone),
    # masked
    "BERT": _masked("BertForMaskedLM", _BERT),
    "RoBERTa": _masked("RobertaForMaskedLM", _BERT),
    "DistilBERT": _masked("DistilBertForMaskedLM", {
        "vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64,
    }),
    "ALBERT": _masked("AlbertForMaskedLM", {**_BERT, "embedding_size": 16}),
    "ELECTRA": _masked("ElectraForMaskedLM", {**_BERT, "embedding_size": 16}),
    "DeBERTa": _masked("DebertaForMaskedLM", {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "DeBERTa-v2": _masked("DebertaV2ForMaskedLM", {
        **_BERT, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
    }),
    "ModernBERT": _masked("ModernBertForMaskedLM", {
        **_LAYERS, **_TOKEN_IDS, "cls_token_id": 1, "sep_token_id": 2, "max_position_embeddings": 64, "attention_dropout": 0.1,
        "embedding_dropout": 0.1, "mlp_dropout": 0.1, "local_attention": 8, "reference_compile": False,
    }),
    "MPNet": _masked("MPNetForMaskedLM", _BERT),
    "ConvBERT": _masked("ConvBertForMaskedLM", {**_BERT, "embedding_size": 32}),
    "SqueezeBERT": _masked("SqueezeBertForMaskedLM", {**_BERT, "embedding_size": 32}),
    "MobileBERT": _masked("MobileBertForMaskedLM", {**_BERT, "embedding_size": 16, "intra_bottleneck_size": 16,
        "hidden_dropout_prob": 0.1}),
    "FNet": _masked("FNetForMaskedLM", {**_LAYERS, "max_position_embeddings": 64, "hidden_dropout_prob": 0.1}, words_alone),
    "Longformer": _masked("LongformerForMaskedLM", {**_BERT, "attention_window": 8}),
    "BigBird": _masked("BigBirdForMaskedLM", {**_BERT, "attention_type": "original_full"}),
    "Nystromformer": _masked("NystromformerForMaskedLM", {**_BERT, "num_landmarks": 4, "segment_means_seq_len": 32,
        "conv_kernel_size": 3}, words_alone),
    "Funnel": _masked("FunnelForMaskedLM", {
        "vocab_size": VOCABULARY, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64,
    }),
    "RemBERT": _masked("RemBertForMaskedLM", {**_BERT, "input_embedding_size": 16, "output_embedding_size": 16}),
    "ESM": _masked("EsmForMaskedLM", {**_BERT, "position_embedding_type": "rotary", "mask_token_id": 3}),
    # encoder-decoder
    "T5": _encoder_decoder("T5ForConditionalGeneration", _T5),
    "mT5": _encoder_decoder("MT5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "LongT5": _encoder_decoder("LongT5ForConditionalGeneration", {**_T5, "local_radius": 4}),
    "BART": _encoder_decoder("BartForConditionalGeneration", _BART),
    "BART, layer drop": _encoder_decoder("BartForConditionalGeneration", {**_BART, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}),
    "Pegasus": _encoder_decoder("PegasusForConditionalGeneration", _BART),
    "Marian": _encoder_decoder("MarianMTModel", _BART),
    "mBART": _encoder_decoder("MBartForConditionalGeneration", _BART),
    "M2M-100": _encoder_decoder("M2M100ForConditionalGeneration", {**_BART, **_NO_LAYER_DROP}),
    "Blenderbot": _encoder_decoder("BlenderbotForConditionalGeneration", _BART),
    "PLBart": _encoder_decoder("PLBartForConditionalGeneration", {**_BART, "decoder_start_token_id": None}),
    "LED": _encoder_decoder("LEDForConditionalGeneration", {
        **_BART, "attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
    }),
    "ProphetNet": _encoder_decoder("ProphetNetForConditionalGeneration", {
        **_TOKEN_IDS, "vocab_size": VOCABULARY, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "max_position_embeddings": 64, "decoder_start_token_id": 1, "use_cache": False,
    }),
    # vision
    "ViT": _vision("ViTForImageClassification", _VIT),
    "ViT, masked images": _vision("ViTForMaskedImageModeling", {**_VIT, "encoder_stride": 8}, masked_images),
    "DeiT": _vision("DeiTForImageClassification", _VIT),
    "BEiT": _vision("BeitForImageClassification", {**_VIT, "drop_path_rate": 0.3, "use_relative_position_bias": True}),
    "DINOv2": _vision("Dinov2ForImageClassification", {**_VIT, "drop_path_rate": 0.3}),
    "Swin": _vision("SwinForImageClassification", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "drop_path_rate": 0.3,
    }),
    "Swin v2": _vision("Swinv2ForImageClassification", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "drop_path_rate": 0.3,
    }),
    "ConvNeXt": _vision("ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [2, 2],
        "num_stages": 2, "drop_path_rate": 0.3}),
    "ConvNeXt v2": _vision("ConvNextV2ForImageClassification", {
        "hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "drop_path_rate": 0.3,
    }),
    "ResNet": _vision("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]}),
    "RegNet": _vision("RegNetForImageClassification", {
        "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "groups_width": 8,
    }),
    "BiT": _vision("BitForImageClassification", {
        "embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 8, "drop_path_rate": 0.3,
    }),
    "MobileNetV1": _vision("MobileNetV1ForImageClassification", {"depth_multiplier": 0.25, "image_size": 32}),
    "MobileNetV2": _vision("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "image_size": 32}),
    "MobileViT": _vision("MobileViTForImageClassification", {
        "image_size": 32, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 48], "expand_ratio": 2.0,
    }),
    "EfficientNet": _vision("EfficientNetForImageClassification", {
        "image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320,
    }),
    "SegFormer": _vision("SegformerForSemanticSegmentation", {
        **_STAGES, "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "drop_path_rate": 0.3,
    }, segments),
    "PVT": _vision("PvtForImageClassification", {
        **_STAGES, "image_size": 32, "patch_sizes": [4, 2], "strides": [4, 2], "mlp_ratios": [2, 2], "hidden_dropout_prob": 0.1,
        "drop_path_rate": 0.3, "sequence_reduction_ratios": [2, 1],
    }),
    "PoolFormer": _vision("PoolFormerForImageClassification", {
        "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1],
        "drop_path_rate": 0.3,
    }),
    "FocalNet": _vision("FocalNetForImageClassification", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "focal_levels": [2, 2],
        "focal_windows": [3, 3], "hidden_dropout_prob": 0.1, "drop_path_rate": 0.3,
    }),
    "CvT": _vision("CvtForImageClassification", {
        "num_heads": [1, 2, 2], "embed_dim": [16, 32, 32], "depth": [1, 2, 3], "drop_rate": [0.1, 0.1, 0.1],
        "attention_drop_rate": [0.1, 0.1, 0.1], "drop_path_rate": [0.0, 0.0, 0.1],
    }, sized(images, 64)),
    "LeViT": _vision("LevitForImageClassification", {
        "image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [8, 8, 8],
    }, sized(images, 64)),
    "DETR": _vision("DetrForObjectDetection", {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 5, "use_timm_backbone": False, "use_pretrained_backbone": False,
        "backbone": None, "backbone_config": _SMALL_RESNET,
    }, images_alone, is_summed=True),
    "YOLOS": _vision("YolosForObjectDetection", {**_VIT, "image_size": [32, 32], "num_detection_tokens": 5}, images_alone, is_summed=True),
    "DPT": _vision("DPTForSemanticSegmentation", {
        **_VIT, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16,
    }, segments),
    # speech
    "Wav2Vec2": _speech("Wav2Vec2ForCTC", _SPEECH, waves),
    "Wav2Vec2, layer drop": _speech("Wav2Vec2ForCTC", {**_SPEECH, "layerdrop": 0.5}, waves),
    "Wav2Vec2, masking": _speech("Wav2Vec2ForCTC", {**_SPEECH, "mask_time_prob": 0.3, "mask_time_length": 2}, waves),
    "HuBERT": _speech("HubertForCTC", _SPEECH, waves),
    "WavLM": _speech("WavLMForCTC", _SPEECH, waves),
    "SEW": _speech("SEWForCTC", {**_SPEECH, "squeeze_factor": 2}, waves),
    "UniSpeech-SAT": _speech("UniSpeechSatForCTC", _SPEECH, waves),
    "Wav2Vec2-BERT": _speech("Wav2Vec2BertForCTC", {
        **_LAYERS, "feature_projection_input_dim": 16, "hidden_dropout": 0.1, "attention_dropout": 0.1, "layerdrop": 0.0,
        "mask_time_prob": 0.0, "pad_token_id": 0, "ctc_loss_reduction": "mean",
    }, spectrogram("input_features", (30, 16))),
    "Whisper": _speech("WhisperForConditionalGeneration", {
        **_BART, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16, "suppress_tokens": None,
    }, spectrogram("input_features", (8, 40))),
    "Speech2Text": _speech("Speech2TextForConditionalGeneration", {
        **_BART, **_NO_LAYER_DROP, "input_feat_per_channel": 8, "input_channels": 1, "conv_channels": 16, "conv_kernel_sizes": [3, 3],
        "max_source_positions": 64, "max_target_positions": 16,
    }, spectrogram("input_features", (40, 8))),
    "Moonshine": _speech("MoonshineForConditionalGeneration", {
        **_LLAMA, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "decoder_start_token_id": 1,
    }, spectrogram("input_values", (2000,))),
    "Audio Spectrogram Transformer": _speech("ASTForAudioClassification", {
        **_VIT, "num_mel_bins": 16, "max_length": 32, "frequency_stride": 8, "time_stride": 8,
    }, sound_and_class),
    # mixture of experts
    "Mixtral": _experts("MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4, "output_router_logits": True}),
    "Qwen2-MoE": _experts("Qwen2MoeForCausalLM", {
        **_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    }),
    "Qwen3-MoE": _experts("Qwen3MoeForCausalLM", {
        **_LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }),
    "OLMoE": _experts("OlmoeForCausalLM", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V3": _experts("DeepseekV3ForCausalLM", {
        **_LLAMA, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8,
    }),
    "GPT-OSS": _experts("GptOssForCausalLM", {**_LLAMA, "head_dim": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 8}),
    "Granite-MoE": _experts("GraniteMoeForCausalLM", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "PhiMoE": _experts("PhimoeForCausalLM", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Switch Transformers": _experts("SwitchTransformersForConditionalGeneration", {
        **_T5, "num_experts": 4, "expert_capacity": 16, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
        "router_jitter_noise": 0.1,
    }),
    # state space
    "Mamba": _state_space("MambaForCausalLM", _MAMBA, words_alone),
    "Mamba, associative scan": _state_space("MambaForCausalLM", {**_MAMBA, "use_associative_scan": True}, words_alone),
    "Mamba 2": _state_space("Mamba2ForCausalLM", {
        **_TOKEN_IDS, "vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8,
        "n_groups": 2, "chunk_size": 8, "use_cache": False,
    }, words_alone),
    "Falcon-Mamba": _state_space("FalconMambaForCausalLM", _MAMBA, words_alone),
    "Jamba": _state_space("JambaForCausalLM", {
        **_LLAMA, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2,
        "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False, "use_associative_scan": False,
    }),
    "Bamba": _state_space("BambaForCausalLM", {
        **_LLAMA, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2,
        "mamba_chunk_size": 8, "mamba_expand": 2,
    }),
    "RecurrentGemma": _state_space("RecurrentGemmaForCausalLM", {
        **_LLAMA, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8, "head_dim": 8,
    }),
    "RWKV": _state_space("RwkvForCausalLM", {
        "vocab_size": VOCABULARY, "context_length": 64, "hidden_size": 32, "num_hidden_layers": 2,
            "intermediate_size": 64, "use_cache": False,
    }, words_alone),
    "xLSTM": _state_space("xLSTMForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_blocks": 2, "num_heads": 4, "chunk_size": 8, **_TOKEN_IDS, "use_cache": False,
        "mode": "train",
    }, words_alone),
    "Qwen3-Next": _state_space("Qwen3NextForCausalLM", {
        **_LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    }),
    # padded: plain `transformers` drops a mask of ones and calls another kernel, which rounds
    # differently on some processors
    "LFM2": _state_space("Lfm2ForCausalLM", {**_LLAMA, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16}, padded_words),
    # several inputs
    "CLIP": _several("CLIPModel", _clip_config(), text_and_image),
    "SigLIP": _several("SiglipModel", {k: v for k, v in _clip_config().items() if k != "projection_dim"}, text_and_image),
    "BLIP": _several("BlipForQuestionAnswering", {
        "text_config": {**_LAYERS, **_TOKEN_IDS, "sep_token_id": 2, "encoder_hidden_size": 32, "max_position_embeddings": 64,
            "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
        "vision_config": {**_clip_config()["vision_config"]}, "projection_dim": 16,
    }, question_about_image),
    "ViLT": _several("ViltForMaskedLM", {**_BERT, "image_size": 32, "patch_size": 8, "max_image_length": -1}, question_about_image),
    "LLaVA": _several("LlavaForConditionalGeneration", {
        "text_config": _named("LlamaConfig", **_LLAMA), "vision_config": _named("CLIPVisionConfig", **_clip_config()["vision_config"]),
        "image_token_index": VOCABULARY - 1, "vision_feature_layer": -1,
    }, image_in_words),
    "Perceiver": _several("PerceiverForMaskedLM", {
        "num_latents": 8, "d_latents": 32, "d_model": 32, "num_blocks": 1, "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
    }, lambda: {"inputs": (batch := words())["input_ids"], "labels": batch["labels"]}),
    "PatchTST": _several("PatchTSTForPrediction", {
        "num_input_channels": 3, "context_length": 32, "prediction_length": 8, "patch_length": 8, "patch_stride": 8, "d_model": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "attention_dropout": 0.1, "ff_dropout": 0.1,
    }, series),
}  # fmt: skip
