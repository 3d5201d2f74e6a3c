"""The recorded pass: norms of per-example gradients and their derivatives, for a whole batch,
without the gradients.
"""

from torchfil.fisher.recording.jacobian import RecordedJacobian
from torchfil.fisher.recording.plan import Plan, plan
from torchfil.fisher.recording.record import RecordedForward, forward_pass, losses_of
from torchfil.fisher.rules.base import UnsupportedCallError

__all__ = [
    "Plan",
    "RecordedForward",
    "RecordedJacobian",
    "UnsupportedCallError",
    "forward_pass",
    "losses_of",
    "plan",
]
