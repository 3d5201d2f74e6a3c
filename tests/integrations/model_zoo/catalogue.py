"""All models of the table, by name."""

from __future__ import annotations

from tests.opacus_suite.vision import import_torchvision

from . import adapters, hugging_face, plain, timm_models, torchvision_models
from .model import Model, unique

__all__ = ["MODELS"]

import_torchvision()
MODELS: dict[str, Model] = unique(
    [
        *hugging_face.MODELS,
        *adapters.MODELS,
        *timm_models.MODELS,
        *torchvision_models.MODELS,
        *plain.MODELS,
    ]
)
