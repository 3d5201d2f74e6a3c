"""The recorded pass: norms of per-example gradients and their derivatives, for a whole batch, without the gradients."""

from torchfil.fisher.recording.jacobian import RecordedJacobian
from torchfil.fisher.recording.norms import NormGradient, norm_gradient
from torchfil.fisher.recording.passes import RecordedForward, Recording, forward_pass, losses_of, record, run_alike
from torchfil.fisher.recording.released import ReleasedGradients
from torchfil.fisher.recording.trial import Plan, plan
from torchfil.fisher.rules.base import UnsupportedCallError

__all__ = [
    "NormGradient",
    "Plan",
    "RecordedForward",
    "RecordedJacobian",
    "Recording",
    "ReleasedGradients",
    "UnsupportedCallError",
    "forward_pass",
    "losses_of",
    "norm_gradient",
    "plan",
    "record",
    "run_alike",
]
