"""Draws of a sampler: their laws, their order, and that none is made before it is charged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxdp import Ledger, Secret
from jaxdp import accounting as acc
from jaxdp.ledger.tickets import issuer_of
from jaxdp.sampling import (
    CyclicPoisson,
    EpochSampling,
    FixedOrder,
    FixedSize,
    FullBatch,
    Poisson,
    RandomAllocation,
    Sampler,
    Shuffled,
    StepSampling,
    TruncatedPoisson,
    by_name,
    pad,
)
from jaxdp.sampling.rules import RULES
from tests.laws import is_binomial, is_uniform
from tests.mechanisms import sgd_of
from tests.refusing import refused

SECRET = Secret.from_seed(3)


class Charging:
    """Stands for a mechanism that is charged as a plain Gaussian."""

    def stretch(self, step):
        return acc.Gaussian(1.0), {"gradient": 1.0}, 10**18

    def __repr__(self):
        return "Charging()"


def sampler(sampling, n=1_000, rows=64, step=0, secret=SECRET, ledger=None):
    return Sampler(sampling, n, rows, issuer_of(Charging(), ledger, secret, first_step=step))


def records(draw):
    return draw.indices[draw.mask]


@pytest.mark.parametrize(("n", "q"), [(500, 0.1), (500, 0.9), (2_000, 0.001), (10**8, 1e-7)])
def test_poisson_has_its_rate_and_no_other(n, q):
    draws, source = 2_000, sampler(Poisson(q), n)
    sizes = [source.draw().mask.sum() for _ in range(draws)]
    assert is_binomial(sum(sizes), draws * n, q)
    assert not is_binomial(sum(sizes), draws * n, min(1.5 * q, 1 - (1 - q) / 1.5))
    expected = n * q * (1 - q)  # the variance that jax.random.binomial missed by a third
    assert 0.85 * expected < np.var(sizes) < 1.15 * expected


def test_every_record_is_as_likely_and_pairs_are_independent():
    source, counts, both = sampler(Poisson(0.2), 40), np.zeros(40), 0
    for _ in range(8_000):
        chosen = records(source.draw())
        counts[chosen] += 1
        both += 3 in chosen and 17 in chosen
    assert all(is_binomial(count, 8_000, 0.2) for count in counts)
    assert is_binomial(both, 8_000, 0.04)
    assert not is_binomial(both, 8_000, 0.2)


def test_a_draw_larger_than_a_physical_batch_takes_more_passes_and_loses_nobody():
    source = sampler(Poisson(0.5), n=1_000, rows=8)
    for _ in range(20):
        draw = source.draw()
        chosen = records(draw)
        assert draw.indices.shape[1] == 8
        assert len(chosen) > 400
        assert len(np.unique(chosen)) == len(chosen)
        assert draw.mask[:-1].all()
    # An empty one is one masked pass.
    draw = sampler(Poisson(1e-9)).draw()
    assert draw.mask.shape == (1, 64)
    assert not draw.mask.any()
    assert records(sampler(Poisson(0.5), n=0).draw()).size == 0


def test_a_seed_gives_the_same_draws_again_and_every_step_another():
    one, two = sampler(Poisson(0.1)), sampler(Poisson(0.1))
    draws, again = ([source.draw() for _ in range(10)] for source in (one, two))
    for first, second in zip(draws, again, strict=True):
        assert second.step == first.step
        np.testing.assert_array_equal(second.indices, first.indices)
    assert len({records(draw).tobytes() for draw in draws}) == 10
    # What draws were charged for does not change.
    for name in ("sampling", "num_records", "issuer", "step", "physical_batch_size"):
        with pytest.raises(AttributeError):
            setattr(one, name, getattr(one, name))
    assert one.step == one.draw().step == 10


def test_two_samplers_of_one_ledger_and_secret_draw_apart_also_from_the_same_step():
    for secret in (SECRET, Secret.new()):
        ledger = Ledger()
        first = sampler(Poisson(0.1), secret=secret, ledger=ledger)
        one = [records(first.draw()) for _ in range(5)]
        two = sampler(Poisson(0.1), secret=secret, ledger=ledger, step=3).draw()
        assert two.step == 3
        assert not any(np.array_equal(records(two), drawn) for drawn in one)
        assert ledger.steps == 6
    one, two = (sampler(Poisson(0.5), ledger=ledger) for _ in range(2))
    pairs = [(records(one.draw()), records(two.draw())) for _ in range(20)]
    both = sum(len(np.intersect1d(*pair)) for pair in pairs)
    assert is_binomial(both, 20_000, 0.25)
    assert not is_binomial(both, 20_000, 0.5)


def test_fixed_size_and_full_batch():
    source, counts = sampler(FixedSize(100), 1_000), np.zeros(1_000)
    for _ in range(500):
        chosen = records(source.draw())
        assert len(np.unique(chosen)) == 100
        counts[chosen] += 1
    assert all(is_binomial(count, 500, 0.1) for count in counts)
    every = records(sampler(FullBatch(), 150).draw())
    np.testing.assert_array_equal(np.sort(every), np.arange(150))
    # The rounding of a sum depends on who stands beside whom: every order must be as likely.
    for rule in (Poisson(0.9), FixedSize(18), FullBatch()):
        source = sampler(rule, 20)
        first = np.bincount([records(source.draw())[0] for _ in range(2_000)], minlength=20)
        assert all(is_binomial(count, 2_000, 1 / 20) for count in first), rule


@given(st.integers(0, 300), st.integers(1, 70))
def test_padding_keeps_every_position(size, rows):
    chosen = np.arange(size) * 3
    draw = pad(chosen, rows, step=0, num_records=1000)
    np.testing.assert_array_equal(records(draw), chosen)
    assert draw.indices.dtype == np.int32
    assert len(draw.indices) == max(1, -(-size // rows))


def test_charging_comes_before_drawing_and_what_cannot_be_charged_is_not_drawn(tmp_path):
    order, ledger = [], Ledger(tmp_path / "ledger.jsonl")

    class Watched(Poisson):
        def choose(self, rng, num_records):
            order.append("drawn")
            return super().choose(rng, num_records)

    def reserving(entry):
        order.append(entry.first_step)
        reserve(entry)

    source = sampler(Watched(0.5), 10, 4, ledger=ledger)
    reserve, ledger._reserve = ledger._reserve, reserving
    source.draw()
    source.draw()
    assert order == [0, "drawn", 1, "drawn"]
    ledger.close()
    refused("ledger must be open", source.draw)
    assert order == [0, "drawn", 1, "drawn"]
    assert source.step == 2
    # A draw that was handed to somebody counts at once; what is reserved besides does not.
    source = sgd_of(1.0, 1.0, 5, 50).sampler(50, reserve=4)
    for taken in (1, 2):
        assert source.draw().ticket.usable
        assert (source.ledger.steps, source.step) == (taken, taken)
    source.close()
    assert [entry.end for entry in source.ledger.reserved] == [2]
    # One that cannot be made counts too: that it failed may depend on who was drawn.
    source.drawn = lambda step: exec("raise MemoryError")
    refused("", source.draw, error=MemoryError)
    assert source.ledger.steps == source.step == 3


N, Q, CAP, DRAWS = 40, 0.3, 14, 6_000


def chosen(rule, key):
    return rule.choose(np.random.Generator(np.random.Philox(key=[1, key])), N)


def test_size_is_a_truncated_binomial_and_the_part_kept_uniform():
    draws = [chosen(TruncatedPoisson(Q, CAP), key) for key in range(DRAWS)]
    sizes = np.array([len(draw) for draw in draws])
    assert sizes.max() == CAP
    for size in (8, 12):
        assert is_binomial(np.sum(sizes == size), DRAWS, stats.binom(N, Q).pmf(size))
    assert is_binomial(np.sum(sizes == CAP), DRAWS, stats.binom(N, Q).sf(CAP - 1))
    full = np.bincount(np.concatenate([d for d in draws if len(d) == CAP]), minlength=N)
    both = sum(3 in d and 17 in d for d in draws if len(d) == CAP)
    assert all(is_binomial(count, np.sum(sizes == CAP), CAP / N) for count in full)
    pair = CAP * (CAP - 1) / (N * (N - 1))
    assert is_binomial(both, np.sum(sizes == CAP), pair)
    first = np.bincount([d[0] for d in draws if len(d)], minlength=N)
    assert is_uniform(first)


def test_every_draw_of_a_truncated_rule_has_one_shape():
    mechanism = sgd_of(1.0, 1.0, 12, N, sampling=TruncatedPoisson(Q, CAP))
    for rows, passes in ((None, 1), (16, 1), (6, 3)):
        source = mechanism.sampler(N, secret=Secret.from_seed(1), physical_batch_size=rows)
        draws = [source.draw() for _ in range(100)]
        assert {draw.mask.shape for draw in draws} == {(passes, rows or CAP)}
        assert len({int(draw.mask.sum()) for draw in draws}) > 3
        assert max(int(draw.mask.sum()) for draw in draws) == CAP
    # The event says what is done.
    event = TruncatedPoisson(Q, CAP).event(acc.Gaussian(2.0), N)
    assert event == acc.TruncatedPoisson(acc.Gaussian(2.0), Q, CAP, N)
    assert by_name("truncated_poisson", 256, 1_437) == TruncatedPoisson(256 / 1_437, 384)
    assert by_name("truncated_poisson", 8, 20).cap == 20


class Fixed(StepSampling):
    """Draws the positions that it is given, charged as a draw of each with probability 1/10."""

    relations = (acc.Relation.REPLACE_ONE,)

    def __init__(self, *positions):
        self.positions = positions

    def choose(self, rng, num_records):
        return np.array(self.positions)

    def event(self, released, dataset_size):
        return acc.PoissonSampled(released, 0.1)


class Epochs(EpochSampling):
    """Epochs of ``block`` steps drawn as ``batches``, charged as one of four steps."""

    def __init__(self, block, batches):
        self.steps, self.batches = block, batches

    def block(self, dataset_size):
        return self.steps

    def epoch(self, rng, num_records):
        return np.split(rng.permutation(num_records), self.batches)

    def event(self, released, dataset_size):
        return acc.ShuffledEpoch(released, 4)


def owned(rule, **options):
    return sgd_of(1.0, 1.0, 4, 40, sampling=rule, **options)


# A record drawn twice added 10 clip norms to a sum that said one; four draws of all records were
# charged as one where an epoch had forgotten its block.
def test_a_rule_of_the_users_own_draws_each_record_once_and_is_charged_for_what_it_draws():
    source = owned(Fixed(3, 39, 0)).sampler(40)
    assert sorted(records(source.draw())) == [0, 3, 39]
    assert "the sampling rule Fixed is not one of jaxdp's" in str(source.ledger.unverified())
    draw = owned(Epochs(4, 4)).sampler(40).draw()
    assert len(records(draw)) == 10
    add = acc.Relation.ADD_OR_REMOVE_ONE
    for words, call in (
        ("at most once", owned(Fixed(3, 4, 3)).sampler(40).draw),
        ("from 0 on", owned(Fixed(-1, 39)).sampler(40).draw),
        ("from 0 on", owned(Fixed(40)).sampler(40).draw),
        ("integers", owned(Fixed(0.5, 1.5)).sampler(40).draw),
        ("must draw 4 batches", owned(Epochs(4, 2)).sampler(40).draw),
        ("an event of the 1 steps", lambda: owned(Epochs(1, 4))),
        (
            "relation must be one that this sampling covers, replace_one",
            lambda: owned(Fixed(1), relation=add),
        ),
        (
            "relation must be one that this sampling covers, replace_one",
            lambda: owned(Fixed(1)).epsilon(3, 1e-5, add),
        ),
    ):
        refused(words, call)
    # A rule of one name: another class is refused, the same one once more takes its place.
    first = type("Once", (StepSampling,), {}, name="once")
    again = type("Once", (StepSampling,), {}, name="once")
    assert first is not again
    assert RULES.pop("once") is again
    refused("name must be", lambda: type("Poisson", (StepSampling,), {}, name="poisson"))


def truncated(cap, batch, size=100, prob=0.1):
    return sgd_of(1.0, 1.0, batch, size, sampling=TruncatedPoisson(prob, cap))


# fmt: off
REFUSED = [  # the words, what is called, its arguments
    ("sampling_prob must be above 0", Poisson, 0.0), ("sampling_prob", Poisson, float("nan")),
    ("sampling_prob must be above 0 and at most 1, got 1.5", Poisson, 1.5),
    ("batch_size must be a whole number", FixedSize, 0),
    ("batch_size must be at most the 5 records", FixedSize(10).check, 5, 5),
    ("dataset_size must be the number of records", FixedSize(10).check, 50, 60),
    ("num_records must be at most", sampler, Poisson(0.1), 2**53 + 1),
    ("physical_batch_size", sampler, Poisson(0.1), 1_000, 0),
    ("step", sampler, Poisson(0.1), 1_000, 64, -1),
    ("sampling_prob must be above 0", TruncatedPoisson, 0.0, 3),
    ("cap must be a whole number of at least 1", TruncatedPoisson, 0.5, 0),
    ("number of records .9. under truncated", TruncatedPoisson(0.5, 3).check, 9, 10),
    ("cap must be at most 1044, got 2000", truncated, 2_000, 10),
    (r"batch_size must be sampling_prob \* dataset_size = 10", truncated, 20, 30),
    ("cap must be None but for truncated_poisson", by_name, "poisson", 5, 50, 1, 3),
    ("participations must be 1 but for allocation", by_name, "shuffle", 5, 50, 2),
    ("sampling must be one of poisson, fixed_size", by_name, "cyclic", 5, 50),
    ("steps_per_epoch must be a whole number of at least 1", RandomAllocation, 0),
    (r"participations must be at most steps_per_epoch \(3\)", RandomAllocation, 3, 4),
    ("participations must be a whole number", RandomAllocation, 3, 0), ("steps", FixedOrder, 5, -1),
    ("to a factor of 2", RandomAllocation(5).check, 20, 60), ("bands", CyclicPoisson, 0.5, 0, 20),
    ("batch_size must be a whole number", Shuffled, 0), ("steps", CyclicPoisson, 0.5, 3, 0),
    ("number of records .59. under shuffled sampling", Shuffled(5).check, 59, 60),
    ("sampling_prob", CyclicPoisson, 1.5, 3, 20), ("batch_size", FixedOrder, 0, 20),
    ("to a factor of 2", CyclicPoisson(0.3, 3, 20).check, 40, 100),
    ("dataset_size must be the number of records", FixedOrder(7, 40).check, 99, 100),
]
# fmt: on


def test_wrong_numbers_are_named():
    for words, call, *args in REFUSED:
        refused(words, call, *args)
    CyclicPoisson(0.3, 3, 20).check(90, 100)
