"""Generalised linear models with output perturbation: exact Fisher information loss at any
granularity.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from torchfil.glm.fil import Sensitivity
from torchfil.glm.guesses import BestGuess, NominalAttribute, Shift, guess
from torchfil.glm.solver import MarginLoss, NotConvergedError, SingularHessianError
from torchfil.questions import Absent, Label, Question

if TYPE_CHECKING:
    from torchfil.glm.model import (
        IRFIL,
        Composition,
        GeneralizedLinearModel,
        LinearRegression,
        LogisticRegression,
        PoissonRegression,
        SoftmaxRegression,
        iteratively_reweighted_fil,
    )

# models, what they leak, guesses, errors
__all__ = [
    "GeneralizedLinearModel",
    "LinearRegression",
    "LogisticRegression",
    "PoissonRegression",
    "SoftmaxRegression",
]
__all__ += ["IRFIL", "Composition", "MarginLoss", "Sensitivity", "iteratively_reweighted_fil"]
__all__ += [
    "Absent",
    "BestGuess",
    "Label",
    "NominalAttribute",
    "NotConvergedError",
    "Question",
    "Shift",
]
__all__ += ["SingularHessianError", "guess"]


def __getattr__(name: str) -> object:
    """Import the models on first use, so that attacks on them can be imported without
    scikit-learn.
    """
    if name not in __all__:
        raise AttributeError(f"module 'torchfil.glm' has no attribute {name!r}")
    return getattr(import_module("torchfil.glm.model"), name)
