"""Audits: tests of what a private run promises."""
