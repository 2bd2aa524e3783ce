"""Figures that take longer than a test, each a module: ``python -m benchmarks.NAME``."""
