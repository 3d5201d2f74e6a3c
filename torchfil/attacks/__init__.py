"""Attacks to compare with bounds: every attack says what it knew and what it achieved for each example."""

from torchfil.attacks.attributes import (
    BlackBoxInversion,
    WhiteBoxInversion,
    accuracy_by_part,
    ideal_inversion,
    prior_inversion,
)
from torchfil.attacks.base import AttackResult
from torchfil.attacks.comparison import BoundComparison, compare_with_bounds
from torchfil.attacks.glm_reconstruction import BiasedBound, GLMReconstruction, biased_bound
from torchfil.attacks.guesses import GuessAttack, best_guess
from torchfil.attacks.inversion import invert_gradients, observed_gradients
from torchfil.attacks.membership import membership_inference, shadow_runs
from torchfil.attacks.property import federated_gradients, property_inference
from torchfil.attacks.transcripts import expected_information, informed_reconstruction, record_dpsgd
from torchfil.glm.guesses import NominalAttribute

__all__ = [
    "AttackResult",
    "BiasedBound",
    "BlackBoxInversion",
    "BoundComparison",
    "GLMReconstruction",
    "GuessAttack",
    "NominalAttribute",
    "WhiteBoxInversion",
    "accuracy_by_part",
    "best_guess",
    "biased_bound",
    "compare_with_bounds",
    "expected_information",
    "federated_gradients",
    "ideal_inversion",
    "informed_reconstruction",
    "invert_gradients",
    "membership_inference",
    "observed_gradients",
    "prior_inversion",
    "property_inference",
    "record_dpsgd",
    "shadow_runs",
]
