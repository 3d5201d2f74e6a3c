"""The Fisher information of a private step about each example: plain functions of tensors.

Start with :func:`fim_trace` (how much leaks), :func:`fim_diagonal` (about which coordinate) and
:mod:`torchfil.bounds` (what that means for an attacker). :mod:`torchfil.fisher.reference` holds
slow, obviously correct versions of everything here.
"""

from torchfil.fisher import reference
from torchfil.fisher.amplification import (
    NoAmplification,
    PoissonAmplification,
    analytic_gaussian_epsilon,
    get_amplification,
    poisson_amplification,
)
from torchfil.fisher.batch import StepSettings, exact_fim, fim_diagonal, fim_trace
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.results import Estimate

# Fisher information, its parts, amplification
__all__ = ["Estimate", "StepSettings", "exact_fim", "fim_diagonal", "fim_trace"]
__all__ += ["ClippedJacobian", "ExampleGradients", "Mechanism", "reference"]
__all__ += ["NoAmplification", "PoissonAmplification", "get_amplification", "poisson_amplification"]
__all__ += ["analytic_gaussian_epsilon"]
