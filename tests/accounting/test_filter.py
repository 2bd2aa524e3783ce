"""Adaptive runs stop before the budget is passed; sampling without replacement is bounded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp import accounting as acc

REPLACE = acc.Relation.REPLACE_ONE


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0.5, 5.0), min_size=1, max_size=40), st.floats(0.2, 4.0))
def test_what_was_admitted_fits_the_budget_in_hindsight(noise_multipliers, epsilon):
    filter_ = acc.RenyiFilter(epsilon, 1e-5)
    charged = []
    for z in noise_multipliers:
        event = acc.PoissonSampled(acc.Gaussian(z), 0.1)
        if filter_.admits(event):
            filter_.charge(event)
            charged.append(event)
        else:
            with pytest.raises(acc.BudgetExceededError, match="event="):
                filter_.charge(event)
    assert filter_.spent() <= epsilon * (1 + 1e-12)
    assert acc.epsilon(acc.Composed(charged), 1e-5).upper <= epsilon


def test_a_fixed_order_wastes_less():
    event = acc.PoissonSampled(acc.Gaussian(1.23), 512 / 60_000)
    many, one = acc.RenyiFilter(3.0, 1e-5), acc.RenyiFilter(3.0, 1e-5, orders=(8.0,))
    for filter_, least in ((many, 4500), (one, 5500)):
        filter_.charge(acc.Repeated(event, least))
        assert filter_.admits(event)
        assert not filter_.admits(acc.Repeated(event, 7245 - least))


def test_no_noise_is_never_admitted():
    assert not acc.RenyiFilter(1e6, 1e-5).admits(acc.NonPrivate("it peeked"))
    with pytest.raises(ValueError, match="orders="):
        acc.RenyiFilter(1.0, 1e-5, orders=(1.0,))


def test_fixed_size_batches_under_replace_one():
    event = acc.Repeated(acc.FixedSizeSampled(acc.Gaussian(5.0), 60_000, 600), 1000)
    bound = acc.epsilon(event, 1e-5, REPLACE)
    poisson = acc.epsilon(
        acc.Repeated(acc.PoissonSampled(acc.Gaussian(5.0), 0.01), 1000), 1e-5, REPLACE
    )
    assert poisson.upper < bound.upper < 10 * poisson.upper
    full = acc.epsilon(acc.Repeated(acc.Gaussian(5.0), 1000), 1e-5, REPLACE)
    assert bound.upper < full.upper


def test_anisotropic_noise_is_one_gaussian():
    event = acc.events.anisotropic_gaussian([0.5, 2.0, 0.0], [1.0, 8.0, 0.0])
    assert event.noise_multiplier == pytest.approx((0.25 + 0.0625) ** -0.5)
    with pytest.raises(ValueError, match="noise_stds"):
        acc.events.anisotropic_gaussian([1.0], [1.0, 2.0])
    assert acc.events.anisotropic_gaussian([1.0, 1.0], [1.0, 0.0]) == acc.Gaussian(0.0)
