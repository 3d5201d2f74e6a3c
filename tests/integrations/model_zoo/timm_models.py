"""timm's image models, small; batch normalisation, which mixes examples, is GroupNorm in all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from .model import CLASSES, Model, images

__all__ = ["MODELS"]


def built(dropout: float, name: str, drops: tuple[str, ...] = ("drop_rate", "drop_path_rate"), **options: Any) -> Any:
    """A model of timm's registry."""
    import timm

    return timm.create_model(name, num_classes=CLASSES, **options, **dict.fromkeys(drops, dropout))


def normed(dropout: float, **options: Any) -> Any:
    """The same with GroupNorm of two groups."""
    from timm.layers import GroupNorm

    return built(dropout, norm_layer=partial(GroupNorm, num_groups=2), **options)


def efficient(dropout: float) -> nn.Module:
    """An EfficientNet of two stages."""
    from timm.models._efficientnet_builder import decode_arch_def
    from timm.models.efficientnet import EfficientNet

    from .torchvision_models import group_norm

    return EfficientNet(
        decode_arch_def([["ds_r1_k3_s1_e1_c4_se0.25"], ["ir_r1_k3_s2_e2_c6_se0.25"]]),
        num_classes=CLASSES,
        num_features=8,
        in_chans=1,
        stem_size=4,
        norm_layer=group_norm,
        drop_rate=dropout,
        drop_path_rate=dropout,
        act_layer=nn.SiLU,
    )


def mixer(dropout: float) -> nn.Module:
    """A mixer of one block."""
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(
        num_classes=CLASSES,
        img_size=8,
        in_chans=1,
        patch_size=4,
        num_blocks=1,
        embed_dim=8,
        mlp_ratio=(0.5, 1.0),
        drop_rate=dropout,
        proj_drop_rate=dropout,
        drop_path_rate=dropout,
    )


def model(name: str, build: Any, channels: int = 1, size: int = 8) -> Model:
    """A line of the table."""
    return Model(name, "timm", build, partial(images, channels, size), F.cross_entropy)


VIT = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 8, "depth": 1, "num_heads": 2, "mlp_ratio": 1.0}

MODELS = [
    model("timm vit", partial(built, name="vit_tiny_patch16_224", **VIT)),
    model("timm deit3", partial(built, name="deit3_small_patch16_224", **VIT)),
    model(
        "timm convnext",
        partial(built, name="convnext_atto", in_chans=1, dims=(4, 4, 6, 6), depths=(1, 1, 1, 1), patch_size=1),
    ),
    model("timm mixer", mixer),
    model(
        "timm resnet, GroupNorm",
        partial(
            normed,
            name="resnet10t",
            in_chans=1,
            stem_type="deep",
            stem_width=4,
            channels=(4, 4, 6, 6),
            layers=(1, 1, 1, 1),
        ),
        size=16,
    ),
    model(
        "timm swin",
        partial(
            built,
            name="swin_tiny_patch4_window7_224",
            img_size=8,
            patch_size=2,
            in_chans=1,
            embed_dim=4,
            depths=(2, 1),
            num_heads=(1, 2),
            window_size=2,
            drops=("drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop_rate"),
        ),
    ),
    model("timm efficientnet, GroupNorm", efficient),
    model(
        "timm nfnet (weight standardisation)",
        partial(
            built,
            name="nf_resnet26",
            in_chans=1,
            width_factor=0.0625,
            depths=(1, 1, 1, 1),
        ),
        size=16,
    ),
]
