"""Attacks beside bounds: every attack says what it knew and gives, by example, what it achieved."""

from torchfil.attacks.attributes import (
    BlackBoxInversion,
    NominalAttribute,
    WhiteBoxInversion,
    accuracy_by_part,
    ideal_inversion,
    prior_inversion,
)
from torchfil.attacks.base import AttackResult
from torchfil.attacks.glm_reconstruction import GLMReconstruction

__all__ = [
    "AttackResult",
    "BlackBoxInversion",
    "GLMReconstruction",
    "NominalAttribute",
    "WhiteBoxInversion",
    "accuracy_by_part",
    "ideal_inversion",
    "prior_inversion",
]
