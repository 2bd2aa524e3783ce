"""A shuffled epoch: its lower and upper pair against all orders of few records."""

import itertools
import math

import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc

ONE, ZERO = acc.Relation.REPLACE_ONE, acc.Relation.REPLACE_SPECIAL


def epoch(z, steps):
    return acc.ShuffledEpoch(acc.Gaussian(z), steps)


def delta(pair, epsilon):
    p, q = pair.tails(np.asarray([epsilon]))
    return float(p[0] - math.exp(epsilon) * q[0])


def epsilon(pair, target):
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if delta(pair, middle) <= target else (middle, high)
    return high


def test_figures_of_ten_thousand_batches():
    """Noise multiplier 0.5, delta 1e-6: Poisson accounting would say 1.95322."""
    lower, upper = (epoch(0.5, 10_000).pairs(ZERO, up)[0] for up in (False, True))
    assert epsilon(lower, 1e-6) == pytest.approx(10.9948, abs=5e-5)
    assert epsilon(upper, 1e-6) == pytest.approx(10.99715, abs=5e-6)


@pytest.mark.parametrize("far", [1, 2])
def test_the_lower_pair_is_the_largest_sum_of_a_data_set(far):
    """All orders of four records in batches of 1 and 3: others -1, the record 1 or 1 - far."""
    z, eps = 0.8, 0.7
    thresholds = np.linspace(-3, 8, 2001)

    def beyond(own):
        orders = list(itertools.permutations((own, -1, -1, -1)))
        below = 0.0
        for order in orders:
            sums = order[0] + 1, sum(order[1:]) + 3  # less the least that a batch can hold
            below += math.prod(special.ndtr((thresholds - s) / z) for s in sums) / len(orders)
        return 1 - below

    one_threshold = (beyond(1) - math.exp(eps) * beyond(1 - far)).max()
    pair = epoch(z, 2).pairs(ZERO if far == 1 else ONE, False)[0]
    assert delta(pair, eps) == pytest.approx(one_threshold, rel=2e-4)
    assert pair.p.sum() == pytest.approx(1, abs=1e-12)
    assert pair.q.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("relation", [ZERO, ONE])
def test_no_data_set_exceeds_the_upper_pair(relation):
    """Two batches of one and of two records, all orders, both noisy sums on a grid."""
    z = 0.9
    x = np.linspace(-8, 8, 161)
    gauss = {s: np.exp(-0.5 * ((x - s) / z) ** 2) * (x[1] - x[0]) for s in range(-3, 4)}

    def law(records):
        orders = list(itertools.permutations(records))
        terms = (np.outer(gauss[r[0]], gauss[r[1] + r[2]]) for r in orders)
        return sum(terms) / (2 * math.pi * z * z * len(orders))

    upper, lower = (epoch(z, 2).pairs(relation, up)[0] for up in (True, False))
    changes = ((1, 0), (0, 1)) if relation is ZERO else ((1, -1), (-1, 1))
    for eps in (0.0, 0.5, 1.5):
        worst = max(
            np.maximum(law((a, *o)) - math.exp(eps) * law((b, *o)), 0).sum()
            for a, b in changes
            for o in itertools.product((-1, 0, 1), repeat=2)
        )
        assert delta(lower, eps) - 1e-4 <= worst <= delta(upper, eps) + 1e-4


def test_noise_too_small_or_another_relation():
    assert epoch(1e-3, 10).pairs(ZERO, False) == ()
    assert "replace_special" in epoch(0.5, 2).refuses(acc.Relation.ADD_OR_REMOVE_ONE)
    orders = np.asarray([2.0])
    assert epoch(0.5, 2).renyi(ONE, orders) == pytest.approx(4 * epoch(0.5, 2).renyi(ZERO, orders))
