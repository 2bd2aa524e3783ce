"""SA-DPSGD as published, whose claim counts accepted candidates alone.

Fu, Chen and Ling, "SA-DPSGD: Differentially Private Stochastic Gradient Descent based on Simulated
Annealing", Algorithm 2 and Theorem 1. The algorithm itself is ``jaxdp.optimizers.annealing``.
"""

import dataclasses
from typing import Any

import jax
import optax

from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.optimizers.annealing import sa_dpsgd
from jaxdp.papers import claims


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
    energy is public. With ``energy_on_private`` there is none: each step is ``NonPrivate``.

    Args:
        mechanism: of the gradient.
        learning_rate: a number or an optax schedule.
        key: see ``jaxdp.optimizers.annealing.annealing``.
        energy_on_private: the energy of the later code, an **un-noised** loss on training records.
        **settings: ``momentum``, ``temperature`` and ``max_rejections`` of ``sa_dpsgd``.
    """
    if energy_on_private:
        mechanism = mechanism.with_leak(
            "an un-noised loss on training records decided which steps were taken"
        )
    made = sa_dpsgd(mechanism, learning_rate, key, restore_inner=False, **settings)
    return dataclasses.replace(made, claim=claims.sa_dpsgd_theorem_1)
