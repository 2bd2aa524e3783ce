"""Batches of fixed size: no data set exceeds the pair, and some attain it."""

import itertools
import math

import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting import fixed_size
from jaxdp.accounting.rdp import DEFAULT_ORDERS, rdp_to_epsilon
from jaxdp.papers.wbk import _log_b

EPSILONS = np.asarray([-1.0, -0.1, 0.0, 0.02, 0.3, 1.0, 2.0])
X = np.linspace(-12, 12, 4001)
ONE, ZERO = acc.Relation.REPLACE_ONE, acc.Relation.REPLACE_SPECIAL


def profile(pairs):
    tails = [pair.tails(EPSILONS) for pair in pairs]
    return np.max([p - np.exp(EPSILONS) * q for p, q in tails], axis=0)


def density(law, records, z):
    """Density of the noisy sum on X: ``law`` maps batches to probabilities."""
    sums = ((sum(records[i] for i in batch), weight) for batch, weight in law.items())
    terms = (w * np.exp(-0.5 * ((X - s) / z) ** 2) for s, w in sums)
    return sum(terms) / (z * math.sqrt(2 * math.pi))


def worst(law, n, z, changes):
    """The largest profile over what all others contribute, -1, 0 or 1, and changes of record 0."""
    best = np.zeros(EPSILONS.size)
    for others in itertools.product((-1, 0, 1), repeat=n - 1):
        for a, b in changes:
            p, q = density(law, (a, *others), z), density(law, (b, *others), z)
            excess = np.maximum(p - np.exp(EPSILONS)[:, None] * q, 0)
            best = np.maximum(best, excess.sum(axis=1) * (X[1] - X[0]))
    return best


@pytest.mark.parametrize("relation", [ONE, ZERO])
@pytest.mark.parametrize(("n", "b", "z"), [(3, 1, 1.0), (4, 2, 0.7), (4, 3, 1.0)])
def test_the_pair_is_attained_and_never_exceeded(n, b, z, relation):
    batches = list(itertools.combinations(range(n), b))
    law = dict.fromkeys(batches, 1 / len(batches))
    changes = ((1, -1), (-1, 1)) if relation is ONE else ((1, 0), (0, 1))
    truth = worst(law, n, z, changes)
    np.testing.assert_allclose(
        truth, profile(fixed_size.pairs(z, b / n, relation, True)), atol=4e-6
    )
    assert (profile(fixed_size.pairs(z, b / n, relation, False)) <= truth + 4e-6).all()


def two_forms(q, z, order):
    """Wang et al.: in every term the smaller of the two forms, z relative to a replacement."""
    j = np.arange(2, order + 1)
    log_binomial = (
        special.gammaln(order + 1) - special.gammaln(j + 1) - special.gammaln(order - j + 1)
    )
    ternary = math.log(4) + 0.5 * np.asarray(
        [_log_b(2 * ((k + 1) // 2), z) + _log_b(2 * (k // 2), z) for k in j.tolist()]
    )
    terms = np.minimum(ternary, math.log(2) + j * (j - 1) / 2 / z**2)
    total = special.logsumexp(np.append(terms + j * math.log(q) + log_binomial, 0.0))
    return total / (order - 1)


def test_renyi_is_below_the_theorem_with_both_forms():
    orders = tuple(float(a) for a in range(2, 40))
    for q, z in ((0.016, 1.0), (256 / 50_000, 1.0), (0.2, 5.0), (0.5, 0.5)):
        found = fixed_size.renyi(2 * z, q, ONE, np.asarray(orders))
        assert (found <= [two_forms(q, z, int(a)) for a in orders]).all()


def test_figures():
    """256 of 50,000, noise equal to what a replacement moves, 2,000 steps: both forms say 2.4533."""
    renyi = fixed_size.renyi(2.0, 256 / 50_000, ONE, np.asarray(DEFAULT_ORDERS))
    assert rdp_to_epsilon(2000 * renyi, 1e-5)[0] == pytest.approx(1.7379, abs=5e-4)
    event = acc.Repeated(acc.FixedSizeSampled(acc.Gaussian(2.0), 50_000, 256), 2000)
    assert acc.epsilon(event, 1e-5, ONE, accountant="rdp").upper < 1.7385


def test_another_number_of_records_is_refused():
    event = acc.FixedSizeSampled(acc.Gaussian(1.0), 100, 10)
    with pytest.raises(acc.UnsupportedEventError, match="neighbours of equal size"):
        acc.epsilon(event, 1e-5, acc.Relation.ADD_OR_REMOVE_ONE)
