"""torchfil: for every training example, how much a trained model leaks about it.

    torchfil.FILPrivacyEngine  Opacus's engine, with every example's leakage beside ε
torchfil.fisher      Fisher information of a private step, per example, attribute or direction
torchfil.bounds      what it means for an attacker
torchfil.clipping    smooth gradient clipping
torchfil.smoothness  is the model smooth enough, and how to make it so
"""

from typing import TYPE_CHECKING, Any

from torchfil import bounds, clipping, fisher, smoothness, zoo
from torchfil._version import __version__
from torchfil.clipping import available_clips, register_clip
from torchfil.examples import Private, superpixel
from torchfil.smoothness import SmoothnessValidator

if TYPE_CHECKING:
    from torchfil.engine import FILPrivacyEngine

__all__ = [
    "FILPrivacyEngine",
    "Private",
    "SmoothnessValidator",
    "__version__",
    "available_clips",
    "bounds",
    "clipping",
    "fisher",
    "register_clip",
    "smoothness",
    "superpixel",
    "zoo",
]


def __getattr__(name: str) -> Any:
    """The engine is imported when asked for, so that the functional core stands without Opacus."""
    if name == "FILPrivacyEngine":
        from torchfil.engine import FILPrivacyEngine

        return FILPrivacyEngine
    raise AttributeError(f"module 'torchfil' has no attribute {name!r}")
