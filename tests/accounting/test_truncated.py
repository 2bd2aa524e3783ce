"""Truncated Poisson batches: no data set exceeds the pair; the binomial tails are right."""

import itertools

import mpmath as mp
import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp.accounting import truncated
from tests.accounting.test_fixed_size import profile, worst

ZERO = acc.Relation.REPLACE_SPECIAL


def step(z, q, cap, n):
    return acc.TruncatedPoisson(acc.Gaussian(z), q, cap, n)


def kept(n, q, cap):
    """The law of the kept records, draw by draw."""
    law = {}
    for drawn in itertools.product((False, True), repeat=n):
        records = [i for i in range(n) if drawn[i]]
        subsets = list(itertools.combinations(records, min(cap, len(records))))
        for subset in subsets:
            weight = q ** len(records) * (1 - q) ** (n - len(records)) / len(subsets)
            law[subset] = law.get(subset, 0.0) + weight
    return law


@pytest.mark.parametrize(
    ("n", "cap", "q", "z"),
    [(3, 1, 0.3, 1.0), (4, 2, 0.5, 0.7), (4, 1, 0.9, 0.6), (4, 3, 0.7, 0.8), (4, 2, 1.0, 0.8)],
)
def test_no_data_set_exceeds_the_pair(n, cap, q, z):
    law = kept(n, q, cap)
    truth = worst(law, n, z, ((1, 0), (0, 1)))
    upper = profile(step(z, q, cap, n).pairs(ZERO, True))
    assert (truth <= upper + 4e-6).all()
    assert (upper[2] - truth[2]) < 0.02 * truth[2]  # nearly attained at epsilon 0
    assert (profile(step(z, q, cap, n).pairs(ZERO, False)) <= truth + 4e-6).all()
    free, full, given = truncated.branches(q, cap, n)
    assert free * q + full * given == pytest.approx(sum(w for b, w in law.items() if 0 in b))


@pytest.mark.parametrize(("n", "q", "cap"), [(60_000, 512 / 60_000, 576), (10**8, 1e-5, 1100)])
def test_binomial_tails(n, q, cap):
    def tail(records, least):
        with mp.workdps(30):
            rate = mp.mpf(q)
            term = mp.binomial(records, least) * rate**least * (1 - rate) ** (records - least)
            total, j = mp.mpf(0), least
            while term > total * mp.mpf(10) ** -20:
                total, term = total + term, term * (records - j) / (j + 1) * rate / (1 - rate)
                j += 1
            return total

    free, full, given = truncated.branches(q, cap, n)
    truth = tail(n - 1, cap)
    assert full == pytest.approx(float(truth), rel=1e-11)
    assert free == pytest.approx(float(1 - truth), rel=1e-11)
    exact = float(cap * tail(n, cap + 1) / n / truth)
    assert exact <= given <= exact * (1 + 1e-9)


def test_a_cap_that_is_never_reached_is_no_cap():
    plain = [truncated.Mixture(0.01, 1.0, d) for d in ((1, 0, 1), (0, 1, 1))]
    for cap, n in ((100, 100), (1000, 1001)):
        found = profile(step(1.0, 0.01, cap, n).pairs(ZERO, True))
        np.testing.assert_allclose(found, profile(plain), rtol=1e-8)


def test_renyi_grows_as_the_cap_falls():
    orders = np.asarray([1.5, 2.0, 8.0, 20.0])
    curves = [step(1.23, 0.0085, cap, 60_000).renyi(ZERO, orders) for cap in (700, 576, 512)]
    assert (curves[0] < curves[1]).all()
    assert (curves[1] < curves[2]).all()
    assert (curves[2] <= 0.5 * orders / 1.23**2).all()
    assert not step(1.0, 0.0, 5, 10).renyi(ZERO, orders).any()


def test_other_relations_are_refused():
    event = acc.TruncatedPoisson(acc.Gaussian(1.0), 0.1, 5, 20)
    for relation in (acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE):
        assert "replace_special" in event.refuses(relation)
    assert not event.refuses(ZERO)
