"""How to compute an example's gradient and its norm for each kind of layer, inside a recorded pass.

Each file holds one family of layers, with its rule and its substitute; importing it here registers both.
"""

from torchfil.fisher.rules import (
    activation,
    attention,
    convolution,
    embedding,
    generic,
    linear,
    normalisation,
    pooling,
    recurrent,
    softmax_attention,
)
from torchfil.fisher.rules.base import LayerRule, register_rule, rule_for
from torchfil.fisher.rules.call import Call, UnsupportedCallError

__all__ = [
    "Call",
    "LayerRule",
    "UnsupportedCallError",
    "activation",
    "attention",
    "convolution",
    "embedding",
    "generic",
    "linear",
    "normalisation",
    "pooling",
    "recurrent",
    "register_rule",
    "rule_for",
    "softmax_attention",
]
