"""torchfil: for every training example, how much a trained model leaks about it.

torchfil.FILPrivacyEngine  Opacus's engine, with every example's leakage besides ε
torchfil.LeakageLogger  the run in TensorBoard, W&B, MLflow or Aim, while it trains
torchfil.check       before training: what a run with a model would do with its batches
torchfil.PrivateClassifier, torchfil.PrivateRegressor  the same in scikit-learn's style
torchfil.equalise    rounds of training that spare the few who are exposed most
torchfil.fisher      Fisher information of a private step, per example, attribute or direction
torchfil.bounds      what it means for an attacker
torchfil.clipping    smooth gradient clipping
torchfil.attribution  PLIS (which pixels or columns drive a privacy loss), exposure, layers
torchfil.viz         pictures of it
torchfil.glm         generalised linear models with output perturbation, in closed form
torchfil.audit       canaries that test ε in one run; torchfil.testing replays a step
torchfil.attacks     what attackers achieve; torchfil.compare_with_bounds: beside the bounds
torchfil.smoothness  is the model smooth enough, and how to make it so
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchfil._version import __version__

if TYPE_CHECKING:
    from torchfil import attacks, attribution, audit, bounds, clipping, fisher, glm, smoothness, viz
    from torchfil.attacks import BoundComparison, compare_with_bounds
    from torchfil.attribution import PLIS, exposure
    from torchfil.audit import Canaries
    from torchfil.clipping import available_clips, register_clip
    from torchfil.engine import Accounting, Execution, FILPrivacyEngine, check, equalise
    from torchfil.integrations.logger import LeakageLogger
    from torchfil.integrations.sklearn import PrivateClassifier, PrivateRegressor
    from torchfil.private import Private, superpixel
    from torchfil.smoothness import SmoothnessValidator

# training, what is private, what a run leaked; then attacks and inputs; then the folders
__all__ = [
    "Accounting",
    "Canaries",
    "Execution",
    "FILPrivacyEngine",
    "LeakageLogger",
    "Private",
    "check",
    "equalise",
]
__all__ += [
    "PrivateClassifier",
    "PrivateRegressor",
    "SmoothnessValidator",
    "available_clips",
    "register_clip",
]
__all__ += [
    "PLIS",
    "BoundComparison",
    "__version__",
    "compare_with_bounds",
    "exposure",
    "superpixel",
]
__all__ += [
    "attacks",
    "attribution",
    "audit",
    "bounds",
    "clipping",
    "fisher",
    "glm",
    "smoothness",
    "viz",
]

_FOLDERS = (
    "attacks",
    "attribution",
    "audit",
    "bounds",
    "clipping",
    "engine",
    "fisher",
    "glm",
    "smoothness",
    "viz",
)
_HOMES = {
    **dict.fromkeys(("BoundComparison", "compare_with_bounds"), "attacks"),
    **dict.fromkeys(("PLIS", "exposure"), "attribution"),
    "Canaries": "audit",
    **dict.fromkeys(("available_clips", "register_clip"), "clipping"),
    **dict.fromkeys(("Accounting", "Execution", "FILPrivacyEngine", "check", "equalise"), "engine"),
    "LeakageLogger": "integrations.logger",
    **dict.fromkeys(("PrivateClassifier", "PrivateRegressor"), "integrations.sklearn"),
    **dict.fromkeys(("Private", "superpixel"), "private"),
    "SmoothnessValidator": "smoothness",
}


def __getattr__(name: str) -> Any:
    """Everything is imported when asked for: a start takes no time, and the functional core stands
    without Opacus.
    """
    if name in _FOLDERS:
        return importlib.import_module(f"torchfil.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"torchfil.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'torchfil' has no attribute {name!r}")


def __dir__() -> list[str]:
    """For completion, what is imported when asked for, too."""
    return sorted({*globals(), *__all__, *_FOLDERS})
