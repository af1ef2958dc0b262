"""Volumes, diffusion and autoencoders: monai and diffusers."""

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
    step,
)

DIFFUSION = Registry()


def _monai(
    model: nn.Module, shape: tuple[int, ...] = (2, 1, 32, 32, 32), classes: int = 3
) -> Workload:
    loss = load("monai.losses").DiceCELoss(to_onehot_y=True, softmax=True)
    targets = torch.randint(0, classes, (shape[0], 1, *shape[2:]))
    return step(
        model,
        lambda model, inputs, targets: loss(model(inputs), targets),
        inputs=torch.randn(shape),
        targets=targets,
    )


def _nets() -> Any:
    return load("monai.networks.nets")


@DIFFUSION.add("monai", "volumes", "monai UNet 3D")
def _unet_3d() -> Workload:
    sizes = {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 2, "dropout": 0.1}
    return _monai(_nets().UNet(spatial_dims=3, in_channels=1, out_channels=3, **sizes))


@DIFFUSION.add("monai", "segmentation", "monai SwinUNETR")
def _swin_unetr() -> Workload:
    sizes = {
        "feature_size": 12,
        "depths": (1, 1, 1, 1),
        "num_heads": (1, 2, 2, 4),
        "window_size": 4,
    }
    model = _nets().SwinUNETR(in_channels=1, out_channels=3, drop_rate=0.1, spatial_dims=2, **sizes)
    return _monai(model, (2, 1, 64, 64))


@DIFFUSION.add("monai", "volumes", "monai SegResNet")
def _seg_res_net() -> Workload:
    return _monai(
        _nets().SegResNet(
            spatial_dims=3, init_filters=8, in_channels=1, out_channels=3, dropout_prob=0.1
        )
    )


@DIFFUSION.add("monai", "volumes", "monai DynUNet")
def _dyn_unet() -> Workload:
    sizes = {
        "kernel_size": [3, 3, 3],
        "strides": [1, 2, 2],
        "upsample_kernel_size": [2, 2],
        "filters": [8, 16, 32],
    }
    return _monai(
        _nets().DynUNet(spatial_dims=3, in_channels=1, out_channels=3, res_block=True, **sizes)
    )


@DIFFUSION.add("monai", "volumes", "monai UNETR")
def _unetr() -> Workload:
    sizes = {"img_size": 32, "feature_size": 8, "hidden_size": 48, "mlp_dim": 96, "num_heads": 4}
    return _monai(_nets().UNETR(in_channels=1, out_channels=3, dropout_rate=0.1, **sizes))


@DIFFUSION.add("monai", "diffusion", "monai DiffusionModelUNet")
def _monai_diffusion() -> Workload:
    sizes = {
        "channels": (16, 32),
        "attention_levels": (False, True),
        "num_res_blocks": 1,
        "num_head_channels": 16,
    }

    model = _nets().DiffusionModelUNet(
        spatial_dims=2, in_channels=1, out_channels=1, norm_num_groups=8, **sizes
    )

    return step(
        model,
        _denoise_monai,
        sample=torch.randn(BATCH, 1, 32, 32),
        timesteps=torch.randint(0, 1000, (BATCH,)),
    )


def _denoise_monai(model: nn.Module, sample: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(sample)
    return F.mse_loss(model(sample + noise, timesteps), noise)


def _denoise(
    model: nn.Module, sample: torch.Tensor, timesteps: torch.Tensor, **conditions: Any
) -> torch.Tensor:
    noise = torch.randn_like(sample)
    return F.mse_loss(model(sample + noise, timesteps, **conditions).sample, noise)


def _diffusers(
    kind: str, sample: tuple[int, ...], config: dict[str, Any], **conditions: torch.Tensor
) -> Workload:
    model = getattr(load("diffusers"), kind)(**config)
    timesteps = torch.randint(0, 1000, sample[:1])
    return step(model, _denoise, sample=torch.randn(sample), timesteps=timesteps, **conditions)


@DIFFUSION.add("diffusers", "diffusion", "diffusers UNet2DModel")
def _unet_2d() -> Workload:
    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }

    sizes = {
        "sample_size": 32,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "dropout": 0.1,
    }

    return _diffusers("UNet2DModel", (BATCH, 3, 32, 32), {**blocks, **sizes})


@DIFFUSION.add("diffusers", "diffusion", "diffusers UNet2DConditionModel")
def _unet_2d_condition() -> Workload:
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    sizes = {
        "sample_size": 32,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "norm_num_groups": 8,
    }

    config = {**blocks, **sizes, "cross_attention_dim": 32, "attention_head_dim": 8}
    return _diffusers(
        "UNet2DConditionModel",
        (BATCH, 4, 32, 32),
        config,
        encoder_hidden_states=torch.randn(BATCH, 16, 32),
    )


@DIFFUSION.add("diffusers", "diffusion", "diffusers DiT")
def _dit() -> Workload:
    sizes = {
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "num_layers": 3,
        "sample_size": 16,
        "norm_num_groups": 4,
    }

    config = {**sizes, "num_embeds_ada_norm": 10, "dropout": 0.1}
    model = load("diffusers").DiTTransformer2DModel(**config)
    batch = {"sample": torch.randn(BATCH, 4, 16, 16), "class_labels": torch.arange(BATCH)}
    return step(model, _denoise, **batch, timesteps=torch.randint(0, 10, (BATCH,)))


@DIFFUSION.add("diffusers", "diffusion", "diffusers SD3 transformer")
def _sd3() -> Workload:
    sizes = {
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "num_layers": 2,
        "sample_size": 16,
        "joint_attention_dim": 32,
    }

    config = {
        **sizes,
        "caption_projection_dim": 64,
        "pooled_projection_dim": 32,
        "in_channels": 4,
        "out_channels": 4,
    }

    conditions = {
        "encoder_hidden_states": torch.randn(BATCH, 8, 32),
        "pooled_projections": torch.randn(BATCH, 32),
    }
    model = load("diffusers").SD3Transformer2DModel(**config, pos_embed_max_size=16)

    def loss(
        model: nn.Module, sample: torch.Tensor, timestep: torch.Tensor, **conditions: Any
    ) -> torch.Tensor:
        noise = torch.randn_like(sample)
        return F.mse_loss(
            model(sample + noise, timestep=timestep, **conditions).sample, noise - sample
        )

    return step(
        model,
        loss,
        sample=torch.randn(BATCH, 4, 16, 16),
        timestep=torch.rand(BATCH) * 1000,
        **conditions,
    )


@DIFFUSION.add("diffusers", "diffusion", "diffusers Flux transformer")
def _flux() -> Workload:
    sizes = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "in_channels": 16,
    }

    config = {
        **sizes,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 6, 6),
    }

    model = load("diffusers").FluxTransformer2DModel(**config)
    batch = {
        "hidden_states": torch.randn(BATCH, 64, 16),
        "encoder_hidden_states": torch.randn(BATCH, 8, 32),
        "pooled_projections": torch.randn(BATCH, 32),
        "timestep": torch.rand(BATCH),
        "img_ids": torch.randint(0, 8, (64, 3)).float(),
        "txt_ids": torch.zeros(8, 3),
    }

    return step(model, lambda model, **batch: model(**batch).sample.pow(2).mean(), **batch)


@DIFFUSION.add("diffusers", "autoencoders", "diffusers AutoencoderKL")
def _autoencoder() -> Workload:
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    model = load("diffusers").AutoencoderKL(
        **blocks, block_out_channels=(16, 32), norm_num_groups=8
    )

    def loss(model: Any, images: torch.Tensor) -> torch.Tensor:
        posterior = model.encode(images).latent_dist
        divergence: torch.Tensor = posterior.kl().mean()
        return F.mse_loss(model.decode(posterior.sample()).sample, images) + 1e-4 * divergence

    return step(model, loss, images=torch.randn(BATCH, 3, 32, 32))


@DIFFUSION.add("diffusers", "autoencoders", "diffusers VQModel")
def _vq() -> Workload:
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    model = load("diffusers").VQModel(
        **blocks, block_out_channels=(16, 32), norm_num_groups=8, num_vq_embeddings=32
    )

    def loss(model: Any, images: torch.Tensor) -> torch.Tensor:
        decoded = model(images)
        commitment: torch.Tensor = decoded.commit_loss.mean()
        return F.mse_loss(decoded.sample, images) + commitment

    return step(model, loss, images=torch.randn(BATCH, 3, 32, 32))
