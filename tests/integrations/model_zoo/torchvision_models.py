"""torchvision's image models, small; batch normalisation, which mixes examples, is GroupNorm in all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from .model import CLASSES, Model, images

__all__ = ["MODELS", "group_norm"]


def group_norm(channels: int, **_: Any) -> nn.Module:
    """GroupNorm in the place of batch normalisation."""
    return nn.GroupNorm(2 if channels % 2 == 0 else 1, channels)


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

    model = SwinTransformer([2, 2], 4, [2, 1], [1, 2], [2, 2], 2.0, dropout, dropout, dropout, CLASSES)
    nn.init.normal_(model.head.weight, std=0.3)
    return model


def mobilenet(dropout: float) -> nn.Module:
    """mobilenet_v3's class."""
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    settings = [
        InvertedResidualConfig(16, 3, 16, 16, True, "RE", 2, 1, 0.25),
        InvertedResidualConfig(16, 3, 24, 16, True, "HS", 1, 1, 0.25),
    ]
    return MobileNetV3(settings, 8, CLASSES, norm_layer=group_norm, dropout=dropout)


def smooth_mobilenet(dropout: float) -> nn.Module:
    """The same with smooth activations: torch has no second derivative of Hardsigmoid."""
    from torchfil import SmoothnessValidator

    return SmoothnessValidator.fix(mobilenet(dropout), activation="silu")


def densenet(dropout: float) -> nn.Module:
    """densenet121's class, by Opacus's ModuleValidator."""
    from opacus.validators import ModuleValidator
    from torchvision.models import DenseNet

    return ModuleValidator.fix(DenseNet(4, (1, 1), 8, 2, dropout, CLASSES))


def model(name: str, build: Any, size: int = 8, drops: bool = True) -> Model:
    """A line of the table."""
    return Model(name, "torchvision", build, partial(images, 3, size), F.cross_entropy, drops)


MODELS = [
    model("torchvision resnet18, GroupNorm", resnet, 16, drops=False),
    model("torchvision vit_b", vit),
    model("torchvision convnext", convnext),
    model("torchvision swin_t", swin),
    model("torchvision mobilenet_v3, GroupNorm", mobilenet, 16),
    model("torchvision mobilenet_v3, GroupNorm, SmoothnessValidator.fix(activation='silu')", smooth_mobilenet, 16),
    model("torchvision densenet, GroupNorm", densenet, 16),
]
