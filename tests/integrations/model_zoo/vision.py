"""timm's and torchvision's image models, small.

Batch normalisation, which mixes examples, is GroupNorm in all.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from .model import CLASSES, Model, labelled


def group_norm(channels: int, **_: Any) -> nn.Module:
    """GroupNorm in the place of batch normalisation."""
    return nn.GroupNorm(2 if channels % 2 == 0 else 1, channels)


def of_timm(
    dropout: float,
    name: str,
    more_drops: tuple[str, ...] = (),
    groups: bool = False,
    **options: Any,
) -> nn.Module:
    """A model of timm's registry, with GroupNorm of two groups where told."""
    import timm
    from timm.layers import GroupNorm

    options |= {"norm_layer": partial(GroupNorm, num_groups=2)} if groups else {}
    options |= dict.fromkeys(("drop_rate", "drop_path_rate", *more_drops), dropout)
    model: nn.Module = timm.create_model(name, num_classes=CLASSES, in_chans=1, **options)
    return model


def efficient(dropout: float) -> nn.Module:
    """An EfficientNet of two stages."""
    from timm.models._efficientnet_builder import decode_arch_def
    from timm.models.efficientnet import EfficientNet

    stages = decode_arch_def([["ds_r1_k3_s1_e1_c4_se0.25"], ["ir_r1_k3_s2_e2_c6_se0.25"]])
    sizes = {"num_classes": CLASSES, "num_features": 8, "in_chans": 1, "stem_size": 4}
    drops = {"drop_rate": dropout, "drop_path_rate": dropout}
    return EfficientNet(stages, **sizes, norm_layer=group_norm, act_layer=nn.SiLU, **drops)


def mixer(dropout: float) -> nn.Module:
    """A mixer of one block."""
    from timm.models.mlp_mixer import MlpMixer

    sizes = {
        "num_classes": CLASSES,
        "img_size": 8,
        "in_chans": 1,
        "patch_size": 4,
        "num_blocks": 1,
        "embed_dim": 8,
    }
    drops = dict.fromkeys(("drop_rate", "proj_drop_rate", "drop_path_rate"), dropout)
    return MlpMixer(**sizes, mlp_ratio=(0.5, 1.0), **drops)


def resnet(dropout: float) -> nn.Module:
    """resnet18 with a sixteenth of its planes behind the stem, and one block a stage."""
    from torchvision.models.resnet import BasicBlock, ResNet

    class Narrow(ResNet):
        def _make_layer(self, block: Any, planes: int, *args: Any, **options: Any) -> Any:
            return super()._make_layer(block, planes // 16, *args, **options)

    model = Narrow(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, norm_layer=group_norm)
    model.fc = nn.Linear(32, CLASSES)
    return model


def vit(dropout: float) -> nn.Module:
    """vit_b's class."""
    from torchvision.models import VisionTransformer

    model = VisionTransformer(8, 4, 1, 2, 8, 8, dropout, dropout, CLASSES)
    nn.init.normal_(model.heads[0].weight, std=0.3)
    return model


def convnext(dropout: float) -> nn.Module:
    """convnext's class."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(4, 6, 1), CNBlockConfig(6, None, 1)], dropout, 0.5, CLASSES)


def swin(dropout: float) -> nn.Module:
    """swin_t's class."""
    from torchvision.models import SwinTransformer

    model = SwinTransformer(
        [2, 2], 4, [2, 1], [1, 2], [2, 2], 2.0, dropout, dropout, dropout, CLASSES
    )
    nn.init.normal_(model.head.weight, std=0.3)
    return model


def mobilenet(dropout: float, smooth: bool = False) -> nn.Module:
    """mobilenet_v3's class.

    With smooth activations: torch has no second derivative of Hardsigmoid.
    """
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    from torchfil import SmoothnessValidator

    settings = [
        InvertedResidualConfig(16, 3, 16, 16, True, "RE", 2, 1, 0.25),
        InvertedResidualConfig(16, 3, 24, 16, True, "HS", 1, 1, 0.25),
    ]
    model = MobileNetV3(settings, 8, CLASSES, norm_layer=group_norm, dropout=dropout)
    return SmoothnessValidator.fix(model, activation="silu") if smooth else model


def densenet(dropout: float) -> nn.Module:
    """densenet121's class, by Opacus's ModuleValidator."""
    from opacus.validators import ModuleValidator
    from torchvision.models import DenseNet

    return ModuleValidator.fix(DenseNet(4, (1, 1), 8, 2, dropout, CLASSES))


def model(name: str, build: Any, size: int = 8, *, drops: bool = True, **options: Any) -> Model:
    """A line of the table; ``build``: a function, or the name of a model in timm's registry."""
    make = (
        partial(of_timm, name=build, **options)
        if isinstance(build, str)
        else partial(build, **options)
    )
    channels = 1 if name.startswith("timm") else 3
    return Model(name, make, partial(labelled, channels, size, size), F.cross_entropy, drops)


VIT: dict[str, Any] = {
    "img_size": 8,
    "patch_size": 4,
    "embed_dim": 8,
    "depth": 1,
    "num_heads": 2,
    "mlp_ratio": 1.0,
}
CONVNEXT: dict[str, Any] = {"dims": (4, 4, 6, 6), "depths": (1, 1, 1, 1), "patch_size": 1}
RESNET: dict[str, Any] = {
    "stem_type": "deep",
    "stem_width": 4,
    "channels": (4, 4, 6, 6),
    "layers": (1, 1, 1, 1),
}
RESNET |= {"groups": True}
SWIN: dict[str, Any] = {
    "img_size": 8,
    "patch_size": 2,
    "embed_dim": 4,
    "depths": (2, 1),
    "num_heads": (1, 2),
}
SWIN |= {"window_size": 2, "more_drops": ("attn_drop_rate", "proj_drop_rate")}
SMOOTH = "torchvision mobilenet_v3, GroupNorm, SmoothnessValidator.fix(activation='silu')"
MODELS = [
    model("timm vit", "vit_tiny_patch16_224", **VIT),
    model("timm deit3", "deit3_small_patch16_224", **VIT),
    model("timm convnext", "convnext_atto", **CONVNEXT),
    model("timm mixer", mixer),
    model("timm resnet, GroupNorm", "resnet10t", 16, **RESNET),
    model("timm swin", "swin_tiny_patch4_window7_224", **SWIN),
    model("timm efficientnet, GroupNorm", efficient),
    model(
        "timm nfnet (weight standardisation)",
        "nf_resnet26",
        16,
        width_factor=0.0625,
        depths=(1, 1, 1, 1),
    ),
    model("torchvision resnet18, GroupNorm", resnet, 16, drops=False),
    model("torchvision vit_b", vit),
    model("torchvision convnext", convnext),
    model("torchvision swin_t", swin),
    model("torchvision mobilenet_v3, GroupNorm", mobilenet, 16),
    model(SMOOTH, mobilenet, 16, smooth=True),
    model("torchvision densenet, GroupNorm", densenet, 16),
]
