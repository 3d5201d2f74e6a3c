"""Attacks beside bounds: every attack says what it knew and gives, by example, what it achieved."""

from torchfil.attacks.base import AttackResult

__all__ = ["AttackResult"]
