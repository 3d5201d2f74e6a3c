"""Audits: tests of the promise of a run."""

from torchfil.audit.bounds import Audit, TradeOff, audit_scores, p_value_dp, p_value_fdp

__all__ = ["Audit", "TradeOff", "audit_scores", "p_value_dp", "p_value_fdp"]
