"""The Fisher information of a private step about each example: plain functions of tensors.

Start with :func:`fim_trace` (how much leaks), :func:`fim_diagonal` (about which coordinate) and
:mod:`torchfil.bounds` (what that means for an attacker). :mod:`torchfil.fisher.reference` holds slow,
obviously correct versions of everything here.
"""

from torchfil.fisher import reference
from torchfil.fisher.amplification import (
    NoAmplification,
    PoissonAmplification,
    Theorem4Amplification,
    analytic_gaussian_epsilon,
    available_amplifications,
    classical_gaussian_epsilon,
    get_amplification,
    poisson_amplification,
    register_amplification,
)
from torchfil.fisher.batch import StepSettings, exact_fim, fim_diagonal, fim_matrix, fim_spectral_norm, fim_trace
from torchfil.fisher.estimators import Estimator, available_estimators, get_estimator, register_estimator
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.results import Estimate

# Fisher information, its parts, amplification, estimators
__all__ = ["Estimate", "StepSettings", "exact_fim", "fim_diagonal", "fim_matrix", "fim_spectral_norm", "fim_trace"]
__all__ += ["ClippedJacobian", "ExampleGradients", "Mechanism", "reference"]
__all__ += ["NoAmplification", "PoissonAmplification", "Theorem4Amplification", "get_amplification"]
__all__ += ["available_amplifications", "poisson_amplification", "register_amplification"]
__all__ += ["analytic_gaussian_epsilon", "classical_gaussian_epsilon"]
__all__ += ["Estimator", "available_estimators", "get_estimator", "register_estimator"]
