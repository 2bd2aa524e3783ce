import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdp import Ledger, Secret, dp_sgd
from jaxdp import accounting as acc
from jaxdp._issuer import issuer_of
from jaxdp.sampling import FixedSize, FullBatch, Poisson, Sampler, pad
from tests.laws import is_binomial

SECRET = Secret.from_seed(3)


class Charging:
    """Stands for a mechanism that is charged as a plain Gaussian."""

    def events(self, first, steps):
        return [(acc.Gaussian(1.0), first, steps)]

    def multipliers(self, step):
        return {"gradient": 1.0}

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
    for _ in range(20_000):
        chosen = records(source.draw())
        counts[chosen] += 1
        both += 3 in chosen and 17 in chosen
    assert all(is_binomial(count, 20_000, 0.2) for count in counts)
    assert is_binomial(both, 20_000, 0.04)
    assert not is_binomial(both, 20_000, 0.2)


def test_a_draw_larger_than_a_physical_batch_takes_more_passes_and_loses_nobody():
    source = sampler(Poisson(0.5), n=1_000, rows=8)
    for _ in range(20):
        draw = source.draw()
        chosen = records(draw)
        assert draw.indices.shape[1] == 8
        assert len(chosen) > 400
        assert len(np.unique(chosen)) == len(chosen)
        assert draw.mask[:-1].all()


def test_an_empty_draw_is_one_masked_pass():
    draw = sampler(Poisson(1e-9)).draw()
    assert draw.mask.shape == (1, 64)
    assert not draw.mask.any()
    assert records(sampler(Poisson(0.5), n=0).draw()).size == 0


def test_a_seed_gives_the_same_draws_again_and_every_step_another():
    one, two = sampler(Poisson(0.1)), sampler(Poisson(0.1))
    draws = [one.draw() for _ in range(10)]
    for draw in draws:
        again = two.draw()
        assert again.step == draw.step
        np.testing.assert_array_equal(again.indices, draw.indices)
    assert len({records(draw).tobytes() for draw in draws}) == 10


def test_a_second_sampler_draws_anew_also_from_the_same_step_and_secret():
    for secret in (SECRET, Secret.new()):
        ledger = Ledger()
        first = sampler(Poisson(0.1), secret=secret, ledger=ledger)
        one = [records(first.draw()) for _ in range(5)]
        two = sampler(Poisson(0.1), secret=secret, ledger=ledger, step=3).draw()
        assert two.step == 3
        assert not any(np.array_equal(records(two), drawn) for drawn in one)
        assert ledger.steps == 6


def test_draws_of_two_samplers_of_one_secret_are_independent():
    ledger = Ledger()
    one, two = (sampler(Poisson(0.5), ledger=ledger) for _ in range(2))
    both = 0
    for _ in range(20):
        both += len(np.intersect1d(records(one.draw()), records(two.draw())))
    assert is_binomial(both, 20_000, 0.25)
    assert not is_binomial(both, 20_000, 0.5)


def test_what_draws_were_charged_for_does_not_change():
    source = sampler(Poisson(0.1), step=3)
    source.draw()
    for name, value in [
        ("sampling", Poisson(0.2)),
        ("num_records", 5),
        ("issuer", None),
        ("step", 3),
        ("physical_batch_size", 1),
    ]:
        with pytest.raises(AttributeError):
            setattr(source, name, value)
    assert source.step == source.draw().step == 4


def test_other_secrets_draw_otherwise():
    one = records(sampler(Poisson(0.1)).draw())
    other = records(sampler(Poisson(0.1), secret=Secret.new()).draw())
    assert not np.array_equal(one, other)


def test_fixed_size_and_full_batch():
    source = sampler(FixedSize(100), 1_000)
    counts = np.zeros(1_000)
    for _ in range(500):
        chosen = records(source.draw())
        assert len(np.unique(chosen)) == 100
        counts[chosen] += 1
    assert all(is_binomial(count, 500, 0.1) for count in counts)
    every = records(sampler(FullBatch(), 150).draw())
    np.testing.assert_array_equal(np.sort(every), np.arange(150))


@pytest.mark.parametrize("rule", [Poisson(0.9), FixedSize(18), FullBatch()])
def test_draws_stand_in_random_order(rule):
    # The rounding of a sum depends on who stands beside whom: every order must be as likely.
    source = sampler(rule, 20)
    first = np.zeros(20)
    for _ in range(2_000):
        chosen = records(source.draw())
        first[chosen[0]] += 1
    assert all(is_binomial(count, 2_000, 1 / 20) for count in first)


@given(st.integers(0, 300), st.integers(1, 70))
def test_padding_keeps_every_position(size, rows):
    chosen = np.arange(size) * 3
    draw = pad(chosen, rows, step=0, num_records=1000)
    np.testing.assert_array_equal(records(draw), chosen)
    assert draw.indices.dtype == np.int32
    assert len(draw.indices) == max(1, -(-size // rows))


def test_charging_comes_before_drawing(monkeypatch):
    order = []

    class Watched(Poisson):
        def choose(self, rng, num_records):
            order.append("drawn")
            return super().choose(rng, num_records)

    source = sampler(Watched(0.5), 10, 4)
    charge = source.ledger.charge
    monkeypatch.setattr(
        source.ledger,
        "charge",
        lambda *args, **kwargs: (order.append(kwargs["first_step"]), charge(*args, **kwargs)),
    )
    source.draw()
    source.draw()
    assert order == [0, "drawn", 1, "drawn"]


def test_what_cannot_be_charged_is_not_drawn(tmp_path):
    class Watched(Poisson):
        def choose(self, rng, num_records):
            raise AssertionError

    ledger = Ledger(tmp_path / "ledger.jsonl")
    source = sampler(Watched(0.5), ledger=ledger)
    ledger.close()
    with pytest.raises(ValueError, match="ledger must be open to charge"):
        source.draw()
    assert source.step == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0.0), "sampling_prob must be above 0"),
        (lambda: Poisson(1.5), "sampling_prob must be above 0 and at most 1, got 1.5"),
        (lambda: Poisson(float("nan")), "sampling_prob"),
        (lambda: FixedSize(0), "batch_size must be a whole number"),
        (lambda: sampler(Poisson(0.1), n=2**53 + 1), "num_records must be at most"),
        (lambda: sampler(Poisson(0.1), rows=0), "physical_batch_size"),
        (lambda: sampler(Poisson(0.1), step=-1), "step"),
        (lambda: FixedSize(10).check(5, 5), "batch_size must be at most the 5 records"),
        (lambda: FixedSize(10).check(50, 60), "dataset_size must be the number of records"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_draw_that_was_handed_to_somebody_counts_at_once():
    sampler = dp_sgd(1.0, 1.0, 5, 50).sampler(50, reserve=4)
    for taken in (1, 2):
        draw = sampler.draw()
        assert sampler.issuer.ahead() == (sampler.issuer.stream, taken)
        assert draw.ticket.usable
    draw.ticket.key()
    assert not draw.ticket.withdraw()
