"""SA-DPSGD as published, whose claim counts accepted candidates alone.

Fu, Chen and Ling, "SA-DPSGD: Differentially Private Stochastic Gradient Descent based on Simulated
Annealing", Algorithm 2 and Theorem 1. The algorithm itself is ``jaxdp.optimizers.annealing``.
"""

import dataclasses
import functools
from typing import Any

import jax
import optax

from jaxdp.clipping.rules import Clip
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.optimizers.annealing import sa_dpsgd
from jaxdp.papers import claims
from jaxdp.papers.raw_gradient import RawGradient, ToTheLetter, flat_clip


def sa_dpsgd_as_published(
    mechanism: Mechanism,
    learning_rate: optax.ScalarOrSchedule,
    key: jax.Array,
    *,
    energy_on_private: bool = False,
    **settings: Any,
) -> Algorithm:
    """SA-DPSGD in which the optimizer's state survives a rejection, with the paper's claim.

    Formal guarantee: every candidate is charged, as in ``jaxdp.optimizers.sa_dpsgd``, while its
    energy is public. With ``energy_on_private`` there is none: each step is ``NonPrivate``, and has
    the paper's clip norm and noise with no margin for rounding.

    Args:
        mechanism: of the gradient.
        learning_rate: a number or an optax schedule.
        key: see ``jaxdp.optimizers.annealing.annealing``.
        energy_on_private: the energy of the later code, an **un-noised** loss on training records.
        **settings: ``momentum``, ``temperature`` and ``max_rejections`` of ``sa_dpsgd``.

    Raises:
        ValueError: ``energy_on_private`` with another rule than flat clipping.
    """
    gradient = None
    if energy_on_private:
        rule = mechanism.rule
        if not isinstance(rule, Clip):
            raise ValueError(f"mechanism must clip to a norm, as the paper does, got {rule}")
        mechanism = ToTheLetter.of(
            mechanism, "an un-noised loss on training records decided which steps were taken"
        )
        gradient = functools.partial(
            RawGradient,
            mechanism=mechanism,
            # Nothing but the energy leaks.
            contribution=lambda _: lambda grad: (flat_clip(grad, rule.l2_clip_norm), ()),
        )
    made = sa_dpsgd(mechanism, learning_rate, key, restore_inner=False, **settings)
    return dataclasses.replace(made, claim=claims.sa_dpsgd_theorem_1, gradient=gradient)
