"""All models of the table, by name."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.opacus_suite.vision import import_torchvision

from . import adapters, hugging_face, plain, timm_models, torchvision_models
from .model import Model, unique

__all__ = ["MODELS"]

# Beside the environment, not in it, as the Makefile says why; torchvision comes before what looks for it.
sys.path.append(str(Path(sys.prefix) / "vision"))
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
