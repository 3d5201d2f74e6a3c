"""Per-example gradient norms, and their derivatives, from one batched pass, without per-example gradients."""

from torchfil.fisher.recording.jacobian import RecordedJacobian
from torchfil.fisher.recording.norms import NormGradient, norm_gradient
from torchfil.fisher.recording.passes import (
    Call,
    RecordedForward,
    Recording,
    UnsupportedCallError,
    forward_pass,
    record,
)
from torchfil.fisher.recording.trial import Plan, plan
from torchfil.fisher.rules.base import LayerRule, register_rule, rule_for

__all__ = [
    "Call",
    "LayerRule",
    "NormGradient",
    "Plan",
    "RecordedJacobian",
    "Recording",
    "UnsupportedCallError",
    "norm_gradient",
    "plan",
    "record",
    "register_rule",
    "rule_for",
]
