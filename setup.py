"""Metadata and options live in setup.cfg; this file lets `pip install -e .` find them."""

from setuptools import setup

setup()
