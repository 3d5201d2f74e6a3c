"""Audits: what a run shows about its own promise.

A claimed ε comes from a formula. An audit tests it: canaries that take part at random and are
guessed afterwards (:mod:`torchfil.audit.canaries`, :mod:`torchfil.audit.bounds`), labels that are
guessed without canaries (:mod:`torchfil.audit.labels`), and a replay of the training without
somebody (:mod:`torchfil.testing`).
"""

from torchfil.audit.bounds import Audit, TradeOff, audit_scores, p_value_dp, p_value_fdp
from torchfil.audit.canaries import Canaries
from torchfil.audit.labels import LabelAudit, audit_labels

__all__ = [
    "Audit",
    "Canaries",
    "LabelAudit",
    "TradeOff",
    "audit_labels",
    "audit_scores",
    "p_value_dp",
    "p_value_fdp",
]
