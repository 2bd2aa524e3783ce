"""Laws of random allocation and shuffling: draws of whole epochs."""

from itertools import permutations

import numpy as np
import pytest
from scipy import stats

import jaxdp
from jaxdp import Ledger, Secret
from jaxdp import accounting as acc
from jaxdp.sampling import RandomAllocation, Shuffled
from jaxdp.sampling.epochs import _uniform
from tests.laws import LEVEL, is_binomial

N = 60


def rng(key):
    return np.random.Generator(np.random.Philox(key=[3, key]))


def uniform(counts):
    """Could these counts be of equally likely cells?"""
    return stats.chisquare(counts).pvalue > LEVEL


def sampler(sampling, n=N, rows=16, ledger=None, secret=None, **options):
    batch = round(jaxdp.sampling.named.rate(sampling, getattr(sampling, "batch_size", 1), n) * n)
    mechanism = jaxdp.Mechanism(jaxdp.clip(1.0), 1.0, sampling, batch, n)
    secret = secret or Secret.from_seed(7)
    return mechanism.sampler(n, ledger=ledger, secret=secret, physical_batch_size=rows, **options)


def records(draw):
    return draw.indices[draw.mask]


@pytest.mark.parametrize(("t", "k"), [(1, 1), (5, 1), (7, 3), (4, 4)])
def test_a_record_is_in_exactly_k_uniform_steps_of_every_epoch(t, k):
    slots = np.stack([RandomAllocation(t, k).slots(rng(e), N) for e in range(400)])
    assert all(len(set(row)) == k for row in slots.reshape(-1, k).tolist())
    assert slots.max() < t
    counts = np.bincount(slots.ravel().astype(int), minlength=t)
    assert np.all(counts == counts[0]) if k == t else uniform(counts)


def test_sets_of_steps_are_equally_likely():
    slots = np.sort(RandomAllocation(5, 2).slots(rng(0), 40_000).astype(int), axis=1)
    pairs = np.bincount(slots[:, 0] * 5 + slots[:, 1], minlength=25)
    assert np.count_nonzero(pairs) == 10
    assert uniform(pairs[pairs > 0])


def test_two_records_and_two_epochs_are_independent():
    slots = np.stack([RandomAllocation(4).slots(rng(e), 2)[:, 0] for e in range(8_000)]).astype(int)
    assert uniform(np.bincount(slots[:, 0] * 4 + slots[:, 1], minlength=16))
    assert uniform(np.bincount(slots[:-1:2, 0] * 4 + slots[1::2, 0], minlength=16))


@pytest.mark.parametrize("k", [1, 3])
def test_a_record_s_steps_depend_neither_on_the_others_nor_on_their_number(k):
    rule = RandomAllocation(9, k)
    many = rule.slots(rng(0), 1_000)
    for n in (1, 17, 999):
        np.testing.assert_array_equal(rule.slots(rng(0), n), many[:n])


def test_rejected_words_are_drawn_again_by_the_record_alone():
    below = 2**63 + 2**61  # three of eight words are rejected
    many = _uniform(rng(0), 0, 20_000, below)
    assert many.max() < below
    eighths = (many // np.uint64(below // 8)).astype(int)
    assert uniform(np.bincount(np.minimum(eighths, 7), minlength=8))
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

    assert uniform(first)


def test_places_in_two_batches_of_an_epoch_are_independent():
    before = np.zeros((2, 2))
    for e in range(3_000):
        batches = [b.tolist() for b in RandomAllocation(2, 2).epoch(rng(e), 2)]
        before[batches[0][0], batches[1][0]] += 1
    assert uniform(before.ravel())


def test_a_batch_of_an_allocation_has_a_binomial_size():
    sizes = [len(RandomAllocation(4).epoch(rng(e), N)[1]) for e in range(4_000)]
    assert is_binomial(sum(sizes), 4_000 * N, 1 / 4)
    assert 0.9 < np.var(sizes) / (N * 3 / 16) < 1.1


def test_all_orders_of_a_shuffle_are_equally_likely():
    orders = dict.fromkeys(permutations(range(4)), 0)
    for e in range(6_000):
        batches = Shuffled(3).epoch(rng(e), 4)
        assert [len(b) for b in batches] == [3, 1]
        orders[tuple(np.concatenate(batches))] += 1
    assert uniform(list(orders.values()))


@pytest.mark.parametrize("rule", [RandomAllocation(5, 2), Shuffled(12)])
def test_a_step_is_drawn_without_those_before_it(rule):
    source = sampler(rule)
    whole = [records(source.draw()) for _ in range(12)]
    for step in (3, 7, 11):
        np.testing.assert_array_equal(records(sampler(rule, first_step=step).draw()), whole[step])
        np.testing.assert_array_equal(  # whatever the shapes
            records(sampler(rule, first_step=step, rows=5).draw()), whole[step]
        )
    assert not np.array_equal(whole[0], whole[5])  # the next epoch is another


@pytest.mark.parametrize("rule", [RandomAllocation(5), Shuffled(12)])
def test_another_stream_has_epochs_of_its_own(rule):
    for secret in (Secret.from_seed(7), Secret.new()):
        ledger = Ledger()
        one, two = (sampler(rule, ledger=ledger, secret=secret) for _ in range(2))
        assert not np.array_equal(records(one.draw()), records(two.draw()))
        assert [repeated.count for repeated in ledger.event.events] == [2]


def test_the_event_is_that_of_the_epoch():
    gaussian = acc.Gaussian(1.0)
    assert RandomAllocation(5, 2).event(gaussian, 60) == acc.RandomAllocation(gaussian, 5, 2)
    assert Shuffled(25).event(gaussian, 60) == acc.ShuffledEpoch(gaussian, 3)


@pytest.mark.parametrize(("steps", "participations"), [(7, 1), (7, 3), (1000, 2)])
def test_the_slots_of_a_record_do_not_depend_on_the_others(steps, participations):
    rule = RandomAllocation(steps, participations)
    few, more = (rule.slots(rng(3), n).tolist() for n in (100, 101))
    assert few == more[:100]
    assert all(len(set(row)) == participations for row in more)
