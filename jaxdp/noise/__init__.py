"""Noise: independent Gaussian noise for every step, as the first link of an optax chain."""

from jaxdp.noise.gaussian import LEAKED, PrivatizeState, if_alike, opened, privatize

__all__ = ["LEAKED", "PrivatizeState", "if_alike", "opened", "privatize"]
