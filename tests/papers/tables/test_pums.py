import numpy as np
import pytest
from scipy.stats import ttest_ind

from jaxdp.papers.tables import pums_groups, pums_plot


def group(errors, size=100):
    return [
        {"group": "g", "size": size, "errors": e, "unemployed": 40, "missed": 0} for e in errors
    ]


def test_the_shift_is_welchs():
    rng = np.random.default_rng(0)
    first, second = rng.integers(20, 60, 10).tolist(), rng.integers(30, 40, 8).tolist()
    mean, low, high = pums_groups.shift(group(first), group(second))
    welch = ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assert mean == pytest.approx(np.mean(first) - np.mean(second))
    assert (low, high) == pytest.approx((welch.low, welch.high))


def test_runs_that_agree_shift_nothing_and_warn_of_nothing():
    assert pums_groups.shift(group([30, 30]), group([30, 30])) == (0.0, 0.0, 0.0)


def test_the_interval_is_wider_for_fewer_people():
    few, many = (
        pums_groups.interval(group([5] * 3, 10)),
        pums_groups.interval(group([500] * 3, 1_000)),
    )
    # Wilson's interval of 5 in 10, worked out by hand: (5 + z²/2 ± z √(2.5 + z²/4)) / (10 + z²).
    z = 1.959964
    half = z * np.sqrt(2.5 + z**2 / 4) / (10 + z**2)
    assert few == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    assert many[1] - many[0] < 0.1


def test_the_mean_calibration_curve_weighs_bins_by_their_size():
    lines = [
        {
            "reliability": [
                {"size": 30, "predicted": 0.12, "found": 0.1},
                {"size": 5, "predicted": 0.9, "found": 0.0},
            ]
        },
        {"reliability": [{"size": 90, "predicted": 0.16, "found": 0.5}]},
    ]
    assert pums_plot.reliability_mean(lines) == [(pytest.approx(0.15), pytest.approx(0.4))]
