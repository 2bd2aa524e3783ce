"""Shown numbers are never better than the proven ones."""

import math

from hypothesis import given
from hypothesis import strategies as st

from jaxdp.report.words import show_audited, show_delta, show_epsilon, show_factor, show_rate


@given(st.floats(1e-12, 0.9))
def test_a_shown_delta_is_never_below_the_proven_one(delta):
    assert delta <= float(show_delta(delta)) <= delta * (1 + 1.1e-5)


@given(st.floats(0.0, 1e6))
def test_a_shown_epsilon_is_never_below_the_proven_one(epsilon):
    # Up to the rounding of epsilon * 1000 itself.
    assert float(show_epsilon(epsilon)) >= epsilon * (1 - 1e-15)


@given(st.floats(0.0, 1e6))
def test_a_shown_lower_bound_is_never_above_the_one_found(epsilon):
    assert float(show_audited(epsilon)) <= epsilon * (1 + 1e-15)


@given(st.floats(0.0, 15.9))
def test_a_shown_factor_is_never_below_the_proven_one(epsilon):
    assert float(show_factor(epsilon).replace(",", "")) >= math.exp(epsilon) * (1 - 1e-15)


@given(st.floats(0.0, 1.0))
def test_a_shown_rate_is_never_below_the_proven_one(rate):
    assert float(show_rate(rate).removesuffix("%")) >= 100 * rate * (1 - 1e-15)


def test_a_very_large_factor_is_a_power_of_ten():
    assert (show_factor(3.0), show_factor(50.0), show_factor(1e4)) == ("21", "10²²", "10⁴³⁴³")


def test_round_deltas_stay_as_they_are():
    for delta, shown in ((1e-5, "1e-5"), (0.1, "0.1"), (1.2345644e-5, "1.23457e-5")):
        assert show_delta(delta) == shown
    assert show_delta(1e-12) == "1e-12"
