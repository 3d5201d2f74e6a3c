"""Fisher accounting in an Opacus training loop; the only place that knows Opacus."""

from torchfil.engine.check import ModelCheck, check
from torchfil.engine.engine import FILPrivacyEngine
from torchfil.engine.loader import FILDataLoader
from torchfil.engine.losses import LossMismatchError
from torchfil.engine.optimizer import FILOptimizer
from torchfil.engine.options import Accounting, Execution
from torchfil.planning.equalising import Equalised, equalise

__all__ = [
    "Accounting",
    "Equalised",
    "Execution",
    "FILDataLoader",
    "FILOptimizer",
    "FILPrivacyEngine",
    "LossMismatchError",
    "ModelCheck",
    "check",
    "equalise",
]
