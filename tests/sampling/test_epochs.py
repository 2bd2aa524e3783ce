"""Laws of rules of whole epochs (allocation, shuffling) and of whole runs, for correlated noise."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import jaxdp
from jaxdp import Ledger, Secret
from jaxdp import accounting as acc
from jaxdp.sampling import CyclicAllocation, CyclicPoisson, FixedOrder, RandomAllocation, Shuffled
from jaxdp.sampling.rules import _uniform
from tests.laws import is_binomial, is_uniform
from tests.refusing import refused

N = 60


def rng(key):
    return np.random.Generator(np.random.Philox(key=[3, key]))


def sampler(sampling, n=N, rows=16, ledger=None, secret=None, **options):
    batch = round(sampling.rate(getattr(sampling, "batch_size", 1), n) * n)
    mechanism = jaxdp.Mechanism(jaxdp.clip(1.0), 1.0, sampling, batch, n)
    secret = secret or Secret.from_seed(7)
    return mechanism.sampler(n, ledger=ledger, secret=secret, physical_batch_size=rows, **options)


def records(draw):
    return draw.indices[draw.mask]


def test_a_record_is_in_exactly_k_uniform_steps_of_every_epoch_whoever_the_others_are():
    for t, k in ((1, 1), (5, 1), (7, 3), (4, 4)):
        slots = np.stack([RandomAllocation(t, k).slots(rng(e), N) for e in range(400)])
        assert all(len(set(row)) == k for row in slots.reshape(-1, k).tolist()), (t, k)
        assert slots.max() < t
        counts = np.bincount(slots.ravel().astype(int), minlength=t)
        assert np.all(counts == counts[0]) if k == t else is_uniform(counts), (t, k)
    # Sets of steps are equally likely, and two records and two epochs independent.
    slots = np.sort(RandomAllocation(5, 2).slots(rng(0), 40_000).astype(int), axis=1)
    pairs = np.bincount(slots[:, 0] * 5 + slots[:, 1], minlength=25)
    assert np.count_nonzero(pairs) == 10
    assert is_uniform(pairs[pairs > 0])
    slots = np.stack([RandomAllocation(4).slots(rng(e), 2)[:, 0] for e in range(8_000)]).astype(int)
    assert is_uniform(np.bincount(slots[:, 0] * 4 + slots[:, 1], minlength=16))
    assert is_uniform(np.bincount(slots[:-1:2, 0] * 4 + slots[1::2, 0], minlength=16))
    # A record's steps depend neither on the others nor on their number.
    for rule in (RandomAllocation(9, 1), RandomAllocation(9, 3), RandomAllocation(1_000, 2)):
        many = rule.slots(rng(0), 1_000)
        assert all(len(set(row)) == rule.participations for row in many.tolist()), rule
        for n in (1, 17, 999):
            np.testing.assert_array_equal(rule.slots(rng(0), n), many[:n], str(rule))


def test_rejected_words_are_drawn_again_by_the_record_alone():
    below = 2**63 + 2**61  # three of eight words are rejected
    many = _uniform(rng(0), 0, 20_000, below)
    assert many.max() < below
    eighths = (many // np.uint64(below // 8)).astype(int)
    assert is_uniform(np.bincount(np.minimum(eighths, 7), minlength=8))
    np.testing.assert_array_equal(_uniform(rng(0), 0, 50, below), many[:50])
    assert not np.array_equal(_uniform(rng(0), 1, 50, below), many[:50])


@pytest.mark.parametrize("rule", [RandomAllocation(4), RandomAllocation(4, 3), Shuffled(20)])
def test_batches_of_an_epoch_hold_every_record_as_often_in_random_order(rule):
    first = np.zeros(N)
    for e in range(1_500):
        batches = rule.epoch(rng(e), N)
        assert len(batches) == rule.block(N)
        assert all(len(set(b.tolist())) == len(b) for b in batches)
        often = np.bincount(np.concatenate(batches), minlength=N)
        assert np.all(often == getattr(rule, "participations", 1))
        first[batches[0][0]] += 1
    assert is_uniform(first)


def test_batches_of_an_allocation_are_independent_and_of_a_binomial_size():
    before = np.zeros((2, 2))
    for e in range(3_000):
        batches = [b.tolist() for b in RandomAllocation(2, 2).epoch(rng(e), 2)]
        before[batches[0][0], batches[1][0]] += 1
    assert is_uniform(before.ravel())
    sizes = [len(RandomAllocation(4).epoch(rng(e), N)[1]) for e in range(4_000)]
    assert is_binomial(sum(sizes), 4_000 * N, 1 / 4)
    assert 0.9 < np.var(sizes) / (N * 3 / 16) < 1.1


def test_all_orders_of_a_shuffle_are_equally_likely():
    orders = dict.fromkeys(permutations(range(4)), 0)
    for e in range(6_000):
        batches = Shuffled(3).epoch(rng(e), 4)
        assert [len(b) for b in batches] == [3, 1]
        orders[tuple(np.concatenate(batches))] += 1
    assert is_uniform(list(orders.values()))


@pytest.mark.parametrize("rule", [RandomAllocation(5, 2), Shuffled(12)])
def test_a_step_is_drawn_without_those_before_it_and_another_stream_has_its_own_epochs(rule):
    source = sampler(rule)
    whole = [records(source.draw()) for _ in range(12)]
    for step in (3, 7, 11):
        for rows in (16, 5):  # whatever the shapes
            alone = records(sampler(rule, first_step=step, rows=rows).draw())
            np.testing.assert_array_equal(alone, whole[step])
    assert not np.array_equal(whole[0], whole[5])  # the next epoch is another
    for secret in (Secret.from_seed(7), Secret.new()):
        ledger = Ledger()
        one, two = (sampler(rule, ledger=ledger, secret=secret) for _ in range(2))
        assert not np.array_equal(records(one.draw()), records(two.draw()))
        assert [repeated.count for repeated in ledger.event.events] == [2]


def test_the_event_is_that_of_the_epoch_or_of_the_whole_run():
    gaussian = acc.Gaussian(1.0)
    assert RandomAllocation(5, 2).event(gaussian, 60) == acc.RandomAllocation(gaussian, 5, 2)
    assert Shuffled(25).event(gaussian, 60) == acc.ShuffledEpoch(gaussian, 3)
    for rule, records, event, block in (
        (CyclicPoisson(0.3, 3, 20), 100, acc.CyclicPoisson(gaussian, 0.3, 3, 20), 20),
        (CyclicAllocation(4, 3, 20), 100, acc.CyclicAllocation(gaussian, 4, 3, 20), 20),
        (FixedOrder(7, 40), 30, acc.CorrelatedNoise(gaussian, 40), 40),
    ):
        assert (rule.event(gaussian, records), rule.block(records)) == (event, block)


# Rules for correlated noise: groups by identity, and a fixed order.


def seeded(seed=0):
    return np.random.default_rng(seed)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(0, 200), st.integers(0, 10**9))
def test_a_group_depends_on_key_and_identity_alone(bands, gone, seed):
    rule = CyclicPoisson(0.5, bands, 20)
    names = [f"record {i}" for i in range(201)]
    whole = rule.prepare(seeded(seed), 201, names)
    left = names[:gone] + names[gone + 1 :]
    fewer = rule.prepare(seeded(seed), 200, left)
    for group, other in zip(whole, fewer, strict=True):
        assert {names[i] for i in group} - {names[gone]} == {left[i] for i in other}
    assert sorted(np.concatenate(whole)) == list(range(201))


def test_groups_are_of_about_one_size_others_with_another_key_and_take_identities_of_many_kinds():
    rule, count = CyclicPoisson(0.5, 4, 20), 20_000
    one, two = (rule.prepare(seeded(seed), count, range(count)) for seed in (0, 1))
    assert stats.chisquare([len(group) for group in one]).pvalue > 1e-4
    for a in one:
        shared = [len(np.intersect1d(a, b)) for b in two]
        assert stats.chisquare(shared).pvalue > 1e-4
    for names in (np.asarray(list("abcdefghi")), [b"%d" % i for i in range(9)]):
        assert sum(map(len, rule.prepare(seeded(), 9, names))) == 9
    kinds = range(50), np.arange(50), np.arange(50, dtype=np.uint64)
    plain, *others = (np.concatenate(rule.prepare(seeded(), 50, names)) for names in kinds)
    for other in others:  # an identity is the same from NumPy and from Python
        np.testing.assert_array_equal(plain, other)
    for bad in ([1.0, 2.0], [None, "a"], [True, False], [(1,), (2,)]):
        words = "identities must be integers, strings or bytes"
        refused(words, CyclicPoisson(0.5, 2, 20).prepare, seeded(), 2, bad)


def test_each_record_of_the_steps_group_is_drawn_with_the_probability():
    rule, count = CyclicPoisson(0.3, 3, 3_000), 60
    arranged, taken = rule.prepare(seeded(), count, range(count)), np.zeros((3, count))
    generator = seeded(5)
    for step in range(3_000):
        chosen = rule.of_step(arranged, step, generator)
        assert len(set(chosen)) == len(chosen)
        taken[step % 3, chosen] += 1
    for group, members in enumerate(arranged):
        assert taken[group].sum() == taken[group, members].sum()
        assert stats.binomtest(int(taken[group].sum()), 1_000 * len(members), 0.3).pvalue > 1e-4


def test_each_record_is_once_an_epoch_in_a_random_step_of_its_group():
    rule, count, epochs = CyclicAllocation(4, 3, 12 * 500), 60, 500
    names = range(count)
    arranged, taken = rule.prepare(seeded(), count, names), np.full((epochs, count), -1)
    *groups, _ = arranged
    for group, other in zip(
        groups, CyclicPoisson(0.5, 3, 9).prepare(seeded(), count, names), strict=True
    ):
        np.testing.assert_array_equal(group, other)
    generator, first = seeded(5), []
    for step in range(12 * epochs):
        chosen = rule.of_step(arranged, step, generator)
        assert set(chosen) <= set(groups[step % 3])
        assert (taken[step // 12, chosen] == -1).all()
        taken[step // 12, chosen] = step % 12 // 3
        first += [chosen[0] < chosen[1]] if len(chosen) == 2 else []
    assert (taken >= 0).all()
    # Uniform for each record, independent between records (of any two groups) and epochs.
    counts = [np.bincount(taken[:, record], minlength=4) for record in range(count)]
    assert stats.chisquare(np.concatenate(counts)).pvalue > 1e-4
    together = [(taken[:, i] == taken[:, j]).sum() for i in range(count) for j in range(i)]
    assert max(together) < 125 + 6 * np.sqrt(500 * 3 / 16)
    again = (taken[1:] == taken[:-1]).sum()
    assert stats.binomtest(int(again), (epochs - 1) * count, 0.25).pvalue > 1e-4
    # In random order, and the same step once more, whatever was drawn between.
    assert stats.binomtest(int(np.sum(first)), len(first)).pvalue > 1e-4
    one, two = (rule.of_step(arranged, 7, seeded(3)) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    refused("slots", CyclicAllocation, 0, 3, 12)
    refused("identities must be given for cyclic allocation", rule.prepare, seeded(), 60, None)


def test_a_fixed_order_takes_every_record_once_a_pass_in_any_order_within_a_batch():
    rule = FixedOrder(7, 40)
    arranged, generator = rule.prepare(seeded(), 30), seeded(1)
    steps = [rule.of_step(arranged, step, generator) for step in range(10)]
    assert rule.separation(30) == 5
    assert sorted(np.concatenate(steps[:5])) == list(range(30))
    assert [len(s) for s in steps] == [7, 7, 7, 7, 2] * 2
    for first, again in zip(steps[:5], steps[5:], strict=True):
        assert set(first) == set(again)
    assert any(list(a) != list(b) for a, b in zip(steps[:5], steps[5:], strict=True))
