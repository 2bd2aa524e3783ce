"""Rules for correlated noise: groups by identity, a fixed order, and the events of a whole run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jaxdp import accounting as acc
from jaxdp.sampling import CyclicPoisson, FixedOrder


def rng(seed=0):
    return np.random.default_rng(seed)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(0, 200), st.integers(0, 10**9))
def test_a_group_depends_on_key_and_identity_alone(bands, gone, seed):
    rule = CyclicPoisson(0.5, bands, 20)
    names = [f"record {i}" for i in range(201)]
    whole = rule.arrange(rng(seed), 201, names)
    left = names[:gone] + names[gone + 1 :]
    fewer = rule.arrange(rng(seed), 200, left)
    for group, other in zip(whole, fewer, strict=True):
        assert {names[i] for i in group} - {names[gone]} == {left[i] for i in other}
    assert sorted(np.concatenate(whole)) == list(range(201))


def test_groups_are_of_about_one_size_and_others_with_another_key():
    rule, count = CyclicPoisson(0.5, 4, 20), 20_000
    one, two = (rule.arrange(rng(seed), count, range(count)) for seed in (0, 1))
    sizes = [len(group) for group in one]
    assert stats.chisquare(sizes).pvalue > 1e-4
    for a in one:
        shared = [len(np.intersect1d(a, b)) for b in two]
        assert stats.chisquare(shared).pvalue > 1e-4


def test_identities_of_many_kinds_are_taken_and_others_refused(subtests):
    rule = CyclicPoisson(0.5, 3, 20)
    for names in (np.asarray(list("abcdefghi")), [b"%d" % i for i in range(9)]):
        assert sum(map(len, rule.arrange(rng(), 9, names))) == 9
    plain, *others = (
        np.concatenate(rule.arrange(rng(), 50, names))
        for names in (range(50), np.arange(50), np.arange(50, dtype=np.uint64))
    )
    for other in others:  # an identity is the same from NumPy and from Python
        np.testing.assert_array_equal(plain, other)
    for bad in ([1.0, 2.0], [None, "a"], [True, False], [(1,), (2,)]):
        words = "identities must be integers, strings or bytes"
        with subtests.test(bad=bad), pytest.raises(ValueError, match=words):
            CyclicPoisson(0.5, 2, 20).arrange(rng(), 2, bad)


def test_each_record_of_the_steps_group_is_drawn_with_the_probability():
    rule, count = CyclicPoisson(0.3, 3, 3_000), 60
    arranged, taken = rule.arrange(rng(), count, range(count)), np.zeros((3, count))
    generator = rng(5)
    for step in range(3_000):
        chosen = rule.of_step(arranged, step, generator)
        assert len(set(chosen)) == len(chosen)
        taken[step % 3, chosen] += 1
    for group, members in enumerate(arranged):
        assert taken[group].sum() == taken[group, members].sum()
        assert stats.binomtest(int(taken[group].sum()), 1_000 * len(members), 0.3).pvalue > 1e-4


def test_a_fixed_order_takes_every_record_once_a_pass_in_any_order_within_a_batch():
    rule = FixedOrder(7, 40)
    arranged, generator = rule.arrange(rng(), 30), rng(1)
    steps = [rule.of_step(arranged, step, generator) for step in range(10)]
    assert rule.separation(30) == 5
    assert sorted(np.concatenate(steps[:5])) == list(range(30))
    assert [len(s) for s in steps] == [7, 7, 7, 7, 2] * 2
    for first, again in zip(steps[:5], steps[5:], strict=True):
        assert set(first) == set(again)
    assert any(list(a) != list(b) for a, b in zip(steps[:5], steps[5:], strict=True))


def test_events_are_of_the_whole_run():
    gaussian = acc.Gaussian(2.0)
    assert CyclicPoisson(0.3, 3, 20).event(gaussian, 100) == acc.CyclicPoisson(gaussian, 0.3, 3, 20)
    assert FixedOrder(7, 40).event(gaussian, 30) == acc.CorrelatedNoise(gaussian, 40)
    assert CyclicPoisson(0.3, 3, 20).block(100) == 20
    assert FixedOrder(7, 40).block(30) == 40
