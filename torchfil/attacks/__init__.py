"""Attacks to compare with bounds: every attack says what it knew and what it achieved for each
example.
"""

from torchfil.attacks.attributes import WhiteBoxInversion, prior_inversion
from torchfil.attacks.base import AttackResult
from torchfil.attacks.comparison import BoundComparison, compare_with_bounds
from torchfil.attacks.glm_reconstruction import GLMReconstruction
from torchfil.attacks.guesses import GuessAttack, best_guess
from torchfil.attacks.inversion import invert_gradients, observed_gradients
from torchfil.attacks.membership import membership_inference, shadow_runs
from torchfil.attacks.transcripts import expected_information, informed_reconstruction, record_dpsgd
from torchfil.glm.guesses import NominalAttribute

# on networks, on linear models, and what they return
__all__ = [
    "expected_information",
    "informed_reconstruction",
    "invert_gradients",
    "membership_inference",
]
__all__ += ["observed_gradients", "record_dpsgd", "shadow_runs"]
__all__ += [
    "GLMReconstruction",
    "GuessAttack",
    "NominalAttribute",
    "WhiteBoxInversion",
    "best_guess",
]
__all__ += ["AttackResult", "BoundComparison", "compare_with_bounds", "prior_inversion"]
