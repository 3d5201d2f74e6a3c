"""Audits: tests of the promise of a run."""

from torchfil.audit.bounds import Audit, TradeOff, audit_scores, p_value_dp, p_value_fdp
from torchfil.audit.labels import LabelAudit, audit_labels

__all__ = ["Audit", "LabelAudit", "TradeOff", "audit_labels", "audit_scores", "p_value_dp", "p_value_fdp"]
