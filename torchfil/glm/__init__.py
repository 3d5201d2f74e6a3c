"""Generalised linear models with output perturbation: exact Fisher information loss at any granularity."""

from torchfil.glm.composition import Composition
from torchfil.glm.estimators import (
    GeneralizedLinearModel,
    LinearRegression,
    LogisticRegression,
    PoissonRegression,
    SoftmaxRegression,
)
from torchfil.glm.fil import Sensitivity
from torchfil.glm.irfil import IRFIL, iteratively_reweighted_fil
from torchfil.glm.losses import MarginLoss
from torchfil.glm.solver import NotConvergedError, SingularHessianError

__all__ = [
    "IRFIL",
    "Composition",
    "GeneralizedLinearModel",
    "LinearRegression",
    "LogisticRegression",
    "MarginLoss",
    "NotConvergedError",
    "PoissonRegression",
    "Sensitivity",
    "SingularHessianError",
    "SoftmaxRegression",
    "iteratively_reweighted_fil",
]
