"""Scikit-learn's base classes, or how to install it."""

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
except ImportError as error:
    raise ImportError("torchfil.glm needs scikit-learn: pip install 'torchfil[glm]'") from error

__all__ = ["BaseEstimator", "ClassifierMixin", "RegressorMixin"]
