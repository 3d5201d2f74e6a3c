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

__all__ = [
    "ClippedJacobian",
    "Estimate",
    "Estimator",
    "ExampleGradients",
    "Mechanism",
    "NoAmplification",
    "PoissonAmplification",
    "StepSettings",
    "Theorem4Amplification",
    "analytic_gaussian_epsilon",
    "available_amplifications",
    "available_estimators",
    "classical_gaussian_epsilon",
    "exact_fim",
    "fim_diagonal",
    "fim_matrix",
    "fim_spectral_norm",
    "fim_trace",
    "get_amplification",
    "get_estimator",
    "poisson_amplification",
    "reference",
    "register_amplification",
    "register_estimator",
]
