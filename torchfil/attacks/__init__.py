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

# on networks, on linear models, and what they return
__all__ = ["federated_gradients", "informed_reconstruction", "invert_gradients", "membership_inference"]
__all__ += ["expected_information", "observed_gradients", "property_inference", "record_dpsgd", "shadow_runs"]
__all__ += ["BlackBoxInversion", "WhiteBoxInversion", "accuracy_by_part", "ideal_inversion", "prior_inversion"]
__all__ += ["BiasedBound", "GLMReconstruction", "GuessAttack", "NominalAttribute", "best_guess", "biased_bound"]
__all__ += ["AttackResult", "BoundComparison", "compare_with_bounds"]
