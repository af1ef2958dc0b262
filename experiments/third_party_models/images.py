"""Image models: classifiers, segmentation, matching, contrastive text and image."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from experiments.models import Workload

from .steps import (
    BATCH,
    VOCABULARY,
    Registry,
    classify,
    images,
    load,
    mean_square,
    step,
    tokens,
)

IMAGES = Registry()


def _timm(name: str, pixels: int = 64, batch: int = 8, **options: Any) -> Workload:
    model = load("timm").create_model(name, num_classes=10, **options)
    return step(model, classify, **images(pixels, batch))


_TIMM: dict[str, dict[str, Any]] = {
    "resnet26": {"drop_path_rate": 0.1, "drop_rate": 0.1},
    "efficientnet_b0": {"drop_path_rate": 0.2},
    "convnext_atto": {"drop_path_rate": 0.1},
    "vit_tiny_patch16_224": {
        "pixels": 96,
        "img_size": 96,
        "depth": 4,
        "proj_drop_rate": 0.1,
        "drop_path_rate": 0.1,
    },
    "swin_tiny_patch4_window7_224": {
        "pixels": 56,
        "img_size": 56,
        "embed_dim": 24,
        "depths": (2, 2, 2, 2),
    },
    "mobilenetv3_small_100": {},
    "mobilevit_xxs": {},
    "nf_resnet26": {},
    "levit_128s": {"pixels": 224, "batch": 4},
    "xcit_nano_12_p16_224": {"pixels": 96, "img_size": 96, "drop_path_rate": 0.1},
    "hrnet_w18_small": {},
    "eva02_tiny_patch14_224": {"pixels": 56, "img_size": 56, "depth": 3},
}

for _name, _options in _TIMM.items():
    IMAGES.add("timm", "images", f"timm {_name}")(partial(_timm, _name, **_options))


def _vit_pytorch(module: str, kind: str, pixels: int = 64, **options: Any) -> Workload:
    model = getattr(load(f"vit_pytorch.{module}"), kind)(
        image_size=pixels, num_classes=10, **options
    )
    return step(model, classify, **images(pixels))


_SIZE: dict[str, Any] = {"dim": 64, "heads": 4, "mlp_dim": 128}
_DROPPED: dict[str, Any] = {"dropout": 0.1, "emb_dropout": 0.1}


@IMAGES.add("vit-pytorch", "images", "vit-pytorch ViT")
def _vit() -> Workload:
    return _vit_pytorch("vit", "ViT", patch_size=8, depth=3, **_SIZE, **_DROPPED)


@IMAGES.add("vit-pytorch", "images", "vit-pytorch CaiT")
def _cait() -> Workload:
    return _vit_pytorch(
        "cait", "CaiT", patch_size=8, depth=3, cls_depth=1, layer_dropout=0.05, **_SIZE, **_DROPPED
    )


@IMAGES.add("vit-pytorch", "images", "vit-pytorch NesT")
def _nest() -> Workload:
    return _vit_pytorch(
        "nest", "NesT", patch_size=4, dim=32, heads=2, num_hierarchies=3, block_repeats=(1, 1, 2)
    )


@IMAGES.add("vit-pytorch", "images", "vit-pytorch SimpleViT, patch dropout")
def _fewer_patches() -> Workload:
    return _vit_pytorch(
        "simple_vit_with_patch_dropout",
        "SimpleViT",
        patch_size=8,
        depth=3,
        patch_dropout=0.5,
        **_SIZE,
    )


def _segmented(kind: str, encoder: str = "resnet18", pixels: int = 64) -> Workload:
    smp = load("segmentation_models_pytorch")
    model = getattr(smp, kind)(encoder, encoder_weights=None, classes=3)
    dice, focal = smp.losses.DiceLoss("multiclass"), smp.losses.FocalLoss("multiclass")

    def loss(model: nn.Module, images: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        logits = model(images)
        total: torch.Tensor = dice(logits, masks) + focal(logits, masks)
        return total

    masks = torch.randint(0, 3, (BATCH, pixels, pixels))
    return step(model, loss, images=torch.randn(BATCH, 3, pixels, pixels), masks=masks)


for _kind, _encoder in {
    "Unet": "tu-resnet18",
    "DeepLabV3Plus": "timm-mobilenetv3_small_100",
    "FPN": "efficientnet-b0",
    "Segformer": "mit_b0",
}.items():
    IMAGES.add("segmentation-models-pytorch", "segmentation", f"smp {_kind}")(
        partial(_segmented, _kind, _encoder)
    )


@IMAGES.add("open_clip_torch", "text and image", "open_clip CLIP")
def _clip() -> Workload:
    open_clip, model = load("open_clip"), load("open_clip.model")
    vision = model.CLIPVisionCfg(
        layers=3, width=64, head_width=16, patch_size=8, image_size=32, patch_dropout=0.25
    )
    text = model.CLIPTextCfg(context_length=16, vocab_size=VOCABULARY, width=48, heads=4, layers=3)
    criterion = open_clip.ClipLoss()

    def loss(model: nn.Module, images: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = criterion(*model(images, text))
        return total

    return step(
        open_clip.CLIP(32, vision, text), loss, images=torch.randn(8, 3, 32, 32), text=tokens(16, 8)
    )


@IMAGES.add("open_clip_torch", "text and image", "open_clip CoCa")
def _coca() -> Workload:
    open_clip, model = load("open_clip"), load("open_clip.model")
    vision = model.CLIPVisionCfg(
        layers=2,
        width=64,
        head_width=16,
        patch_size=8,
        image_size=32,
        attentional_pool=True,
        output_tokens=True,
    )

    text = model.CLIPTextCfg(
        context_length=16,
        vocab_size=VOCABULARY,
        width=64,
        heads=4,
        layers=2,
        embed_cls=True,
        output_tokens=True,
    )

    decoder = load("open_clip.coca_model").MultimodalCfg(
        context_length=16, vocab_size=VOCABULARY, width=64, heads=4, layers=2
    )
    criterion = load("open_clip.loss").CoCaLoss(caption_loss_weight=2.0, clip_loss_weight=1.0)

    def loss(model: nn.Module, images: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        contrastive, caption = criterion(**model(images, text), output_dict=False)
        total: torch.Tensor = contrastive + caption
        return total

    return step(
        open_clip.CoCa(64, decoder, text, vision),
        loss,
        images=torch.randn(8, 3, 32, 32),
        text=tokens(16, 8),
    )


@IMAGES.add("kornia", "matching", "kornia LoFTR's transformer")
def _loftr() -> Workload:
    sizes = {
        "d_model": 32,
        "d_ffn": 64,
        "nhead": 4,
        "layer_names": ["self", "cross"] * 2,
        "attention": "linear",
    }
    model = load("kornia.feature.loftr.loftr_module").LocalFeatureTransformer(sizes)

    def loss(model: nn.Module, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        first, second = model(one, other)
        scores = torch.einsum("nlc,nsc->nls", first, second) * 0.1
        matched = scores.softmax(1) * scores.softmax(2)
        return -matched.diagonal(dim1=1, dim2=2).clamp_min(1e-6).log().mean()

    return step(model, loss, one=torch.randn(2, 64, 32), other=torch.randn(2, 64, 32))


@IMAGES.add("kornia", "matching", "kornia HardNet, triplets")
def _hard_net() -> Workload:
    def loss(model: nn.Module, patches: torch.Tensor, warped: torch.Tensor) -> torch.Tensor:
        anchor, positive = model(patches), model(warped)
        distance = torch.cdist(anchor, positive)
        hardest = (distance + 10 * torch.eye(len(distance))).amin(dim=1)
        return F.relu(1 + distance.diagonal() - hardest).mean()

    patches = torch.rand(16, 1, 32, 32)
    return step(
        load("kornia.feature").HardNet(pretrained=False),
        loss,
        patches=patches,
        warped=patches.roll(1, -1),
    )


class _Aligned(nn.Module):
    """A network that learns the homography between two images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(6, 8, 3, 2, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, 2, 1),
            nn.Flatten(),
            nn.LazyLinear(8),
        )

    def forward(self, moving: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
        """Returns how much the aligned images differ, in structure and in colour."""
        kornia = load("kornia")
        corners = torch.tensor([[0.0, 0.0], [31.0, 0.0], [31.0, 31.0], [0.0, 31.0]]).expand(
            len(moving), 4, 2
        )

        moved = corners + self.features(torch.cat([moving, fixed], 1)).tanh().view(-1, 4, 2)
        transform = kornia.geometry.get_perspective_transform(corners, moved)
        aligned = kornia.geometry.warp_perspective(moving, transform, (32, 32))
        loss: torch.Tensor = kornia.losses.ssim_loss(aligned, fixed, 5) + F.l1_loss(
            kornia.color.rgb_to_hsv(aligned), kornia.color.rgb_to_hsv(fixed)
        )
        return loss


@IMAGES.add("kornia", "geometry", "kornia homography, SSIM and HSV")
def _aligned() -> Workload:
    batch = {"moving": torch.rand(BATCH, 3, 32, 32), "fixed": torch.rand(BATCH, 3, 32, 32)}
    model = _Aligned()
    model(**batch)  # the lazy layer gets its shape
    return Workload(model.train(), batch)


@IMAGES.add("x-unet", "images", "x-unet XUnet")
def _x_unet() -> Workload:
    model = load("x_unet").XUnet(
        dim=16,
        dim_mults=(1, 2),
        num_blocks_per_stage=(1, 1),
        num_self_attn_per_stage=(0, 1),
        nested_unet_depths=(1, 0),
        channels=3,
    )

    return step(
        model, mean_square, inputs=torch.randn(2, 3, 32, 32), targets=torch.randn(2, 3, 32, 32)
    )


@IMAGES.add("perceiver-pytorch", "images", "perceiver-pytorch Perceiver")
def _perceiver() -> Workload:
    sizes = {
        "num_freq_bands": 4,
        "depth": 2,
        "max_freq": 10.0,
        "num_latents": 16,
        "latent_dim": 32,
        "latent_heads": 2,
        "latent_dim_head": 16,
        "cross_dim_head": 16,
    }

    model = load("perceiver_pytorch").Perceiver(
        **sizes, num_classes=10, attn_dropout=0.1, weight_tie_layers=True
    )

    batch = images(32)
    return step(
        model, classify, images=batch["images"].movedim(1, -1).contiguous(), labels=batch["labels"]
    )


@IMAGES.add("mlp-mixer-pytorch", "images", "mlp-mixer-pytorch MLPMixer")
def _mixer() -> Workload:
    model = load("mlp_mixer_pytorch").MLPMixer(
        image_size=64, channels=3, patch_size=8, dim=64, depth=4, num_classes=10, dropout=0.1
    )
    return step(model, classify, **images())


@IMAGES.add("siren-pytorch", "images", "siren-pytorch SIREN")
def _siren() -> Workload:
    net = load("siren_pytorch").SirenNet(dim_in=2, dim_hidden=64, dim_out=3, num_layers=4)
    return step(net, mean_square, inputs=torch.rand(1024, 2), targets=torch.rand(1024, 3))


@IMAGES.add("pytorch-msssim", "image losses", "pytorch-msssim denoiser")
def _msssim() -> Workload:
    similarity = load("pytorch_msssim").MS_SSIM(data_range=1.0, channel=3, win_size=3)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.PReLU(), nn.Conv2d(16, 3, 3, padding=1), nn.Sigmoid()
    )

    def loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = 1 - similarity(model(inputs), targets)
        return total

    return step(net, loss, inputs=torch.rand(2, 3, 64, 64), targets=torch.rand(2, 3, 64, 64))
