"""Per-example gradient norms, and their derivatives, from one batched pass, without per-example gradients."""

from torchfil.ghost.norms import NormGradient, norm_gradient
from torchfil.ghost.recording import Call, Recording, UnsupportedCallError, record
from torchfil.ghost.rules import LayerRule, register_rule, rule_for

__all__ = [
    "Call",
    "LayerRule",
    "NormGradient",
    "Recording",
    "UnsupportedCallError",
    "norm_gradient",
    "record",
    "register_rule",
    "rule_for",
]
