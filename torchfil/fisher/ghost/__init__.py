"""Per-example gradient norms, and their derivatives, from one batched pass, without per-example gradients."""

from torchfil.fisher.ghost.jacobian import GhostJacobian
from torchfil.fisher.ghost.norms import NormGradient, norm_gradient
from torchfil.fisher.ghost.recording import Call, Recording, UnsupportedCallError, record
from torchfil.fisher.ghost.rules import LayerRule, register_rule, rule_for
from torchfil.fisher.ghost.trial import Plan, plan

__all__ = [
    "Call",
    "GhostJacobian",
    "LayerRule",
    "NormGradient",
    "Plan",
    "Recording",
    "UnsupportedCallError",
    "norm_gradient",
    "plan",
    "record",
    "register_rule",
    "rule_for",
]
