"""torchfil: for every training example, how much a trained model leaks about it.

torchfil.fisher      Fisher information of a private step, per example, attribute or direction
torchfil.bounds      what it means for an attacker
torchfil.clipping    smooth gradient clipping
torchfil.smoothness  is the model smooth enough, and how to make it so
"""

from torchfil import bounds, clipping, fisher, smoothness, zoo
from torchfil._version import __version__
from torchfil.clipping import available_clips, register_clip
from torchfil.examples import Private, superpixel
from torchfil.smoothness import SmoothnessValidator

__all__ = [
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
