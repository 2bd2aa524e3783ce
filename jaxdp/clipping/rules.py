"""Clipping rules: how far each example's gradient is shortened, and the bound that results."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxdp import _validate
from jaxdp.types import PyTree

# Norms are measured in float32, whose rounding can make a gradient look shorter than it is. Rules
# therefore aim this much below the stated bound; the tests attack it with a million equal entries.
ROUNDING_MARGIN = 1e-4


class Rule(Protocol):
    """A clipping rule. It sees squared norms only, so that an engine need not hold gradients."""

    @property
    def l2(self) -> float:
        """The largest Euclidean norm, over all leaves together, of one clipped contribution."""

    def factors(self, square_norms: PyTree) -> PyTree:
        """Per-leaf multipliers [m] from per-leaf squared gradient norms [m]."""


@dataclasses.dataclass(frozen=True)
class Clip:
    """Flat clipping, g · min(1, C / ‖g‖₂) (Abadi et al. 2016, arXiv:1607.00133v2, Algorithm 1).

    Formal guarantee: the contribution of one record has norm at most ``l2_clip_norm``, under every
    relation, also after rounding in float32.

    Attributes:
        l2_clip_norm: the bound C, a public constant in [1e-10, 1e10]: further out, squares in
            float32 underflow or overflow and the norm could not be trusted.
    """

    l2_clip_norm: float

    def __post_init__(self) -> None:
        norm = _validate.positive("l2_clip_norm", self.l2_clip_norm)
        if not 1e-10 <= norm <= 1e10:
            raise ValueError(f"l2_clip_norm must be in [1e-10, 1e10], got {self.l2_clip_norm!r}")

    @property
    def l2(self) -> float:
        """The bound C."""
        return float(self.l2_clip_norm)

    def factors(self, square_norms: PyTree) -> PyTree:
        """The same min(1, C / ‖g‖) [m] for every leaf, ‖g‖ taken over all leaves."""
        norm = jnp.sqrt(sum(jax.tree.leaves(square_norms)))
        bound = self.l2 * (1.0 - ROUNDING_MARGIN)
        factor = jnp.where(norm > bound, bound / jnp.maximum(norm, bound), 1.0)
        return jax.tree.map(lambda _: factor, square_norms)


def clip(l2_clip_norm: float) -> Clip:
    """Flat clipping to the norm ``l2_clip_norm``; see :class:`Clip`."""
    return Clip(l2_clip_norm)
