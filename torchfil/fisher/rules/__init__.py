"""How to compute an example's gradient and its norm for each kind of layer, inside a recorded pass.

Each file holds one family of layers, with its rule and its substitute; importing it here registers
both.
"""
# ruff: noqa: F401

from torchfil.fisher.rules import (
    activation,
    attention,
    convolution,
    linear,
    normalisation,
    parameters,
    recurrent,
)
from torchfil.fisher.rules.base import (
    Call,
    LayerRule,
    UnsupportedCallError,
    register_rule,
    rule_for,
)

__all__ = ["Call", "LayerRule", "UnsupportedCallError", "register_rule", "rule_for"]
