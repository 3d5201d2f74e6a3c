"""torchfil: for every training example, how much a trained model leaks about it.

torchfil.FILPrivacyEngine  Opacus's engine, with every example's leakage besides ε
torchfil.check       before training: what a model's batches would do, and what to change
torchfil.equalise    rounds of training that spare the few who are exposed most
torchfil.fisher      Fisher information of a private step, per example, attribute or direction
torchfil.bounds      what it means for an attacker
torchfil.clipping    smooth gradient clipping
torchfil.attribution  PLIS (which pixels or columns drive an example's loss of privacy), exposure, layers
torchfil.viz         pictures of it
torchfil.glm         generalised linear models with output perturbation, in closed form
torchfil.attacks     what attackers achieve; torchfil.compare_with_bounds compares it with the bounds
torchfil.smoothness  is the model smooth enough, and how to make it so
"""

from typing import TYPE_CHECKING, Any

from torchfil import attacks, attribution, bounds, clipping, fisher, smoothness, viz
from torchfil._version import __version__
from torchfil.attacks import BoundComparison, compare_with_bounds
from torchfil.attribution import PLIS, exposure
from torchfil.clipping import available_clips, register_clip
from torchfil.private import Private, superpixel
from torchfil.smoothness import SmoothnessValidator

if TYPE_CHECKING:
    from torchfil.engine import Accounting, Execution, FILPrivacyEngine, check, equalise

__all__ = [
    "PLIS",
    "Accounting",
    "BoundComparison",
    "Execution",
    "FILPrivacyEngine",
    "Private",
    "SmoothnessValidator",
    "__version__",
    "attacks",
    "attribution",
    "available_clips",
    "bounds",
    "check",
    "clipping",
    "compare_with_bounds",
    "equalise",
    "exposure",
    "fisher",
    "register_clip",
    "smoothness",
    "superpixel",
    "viz",
]


def __getattr__(name: str) -> Any:
    """The engine is imported when asked for, so that the functional core stands without Opacus."""
    if name in ("Accounting", "Execution", "FILPrivacyEngine", "check", "equalise"):
        from torchfil import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'torchfil' has no attribute {name!r}")
