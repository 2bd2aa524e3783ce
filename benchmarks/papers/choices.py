"""A private choice among losses, in whole numbers: permute-and-flip, drawn exactly."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

# The most by which one record changes a total.
UNITS = 2**20


def permute_and_flip(totals: Sequence[int], epsilon: Fraction, rng: np.random.Generator) -> int:
    """The place of one of the smaller totals.

    McKenna and Sheldon 2020 (arXiv:2010.12603v1), Algorithm 1, which is report-noisy-max with
    exponential noise (Ding, Kifer, Steinke et al. 2021, arXiv:2105.07260).

    Formal guarantee: where a record adds a whole number from 0 to D to every total, the choice is
    (epsilon D)-differentially private, one record added or removed: with the noises E_j of the
    others held fixed, place i is chosen with probability exp(-epsilon max(0, M)), where M is the
    largest of E_j - total_j, plus total_i (E_j of rate epsilon); a record moves M by at most D.
    It is drawn in whole numbers, so that nothing is rounded.

    Args:
        totals: [k] sums over records.
        epsilon: for each unit, > 0.
        rng: secret randomness.
    """
    least = min(totals)
    for place in rng.permutation(len(totals)).tolist():
        if happens(epsilon * (totals[place] - least), rng):
            return int(place)
    raise AssertionError("the least total is always taken")


def happens(x: Fraction, rng: np.random.Generator) -> bool:
    """True with probability e^-x, exactly.

    Canonne, Kamath and Steinke 2020 (arXiv:2004.00010v5), Algorithm 1.

    Args:
        x: >= 0; its denominator, times the number of coins, must stay below 2**63.
        rng: secret randomness.
    """
    while x > 1:
        if not happens(Fraction(1), rng):
            return False
        x -= 1
    coins = 1
    while rng.integers(x.denominator * coins) < x.numerator:
        coins += 1
    return coins % 2 == 1
