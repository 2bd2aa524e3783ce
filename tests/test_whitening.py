import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdp
from jaxdp import accounting as acc
from jaxdp.whitening import Whitening, dp_whitening, sums, whitened
from tests.laws import are_uncorrelated, is_gaussian

SECRET = jaxdp.Secret.from_seed(4)
PLACES, CHANNELS = 6, 4


def records(n=4000, seed=0):
    """Records of 2 × 3 places and 4 channels with a mean, and channels of unequal variances."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(n, 2, 3, CHANNELS)) * [4.0, 1.0, 0.3, 0.1]
    turn = np.linalg.qr(rng.normal(size=(CHANNELS, CHANNELS)))[0]
    return (mixed @ turn + np.arange(CHANNELS)).astype(np.float32)


def released(x, z=1e-6, **options):
    return dp_whitening(x, z, SECRET, size=len(x), row_norm=100.0, **options)


def test_channels_are_centred_and_have_a_mean_square_of_one():
    x = records()
    made = whitened(x, released(x)).reshape(-1, PLACES, CHANNELS)
    np.testing.assert_allclose(made.mean(0), 0, atol=1e-4)
    assert np.mean(made**2) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("power", [0.0, 0.25, 0.5])
def test_the_power_evens_out_the_variances(power):
    x = records().astype(np.float64)
    made = whitened(x, released(x, power=power)).reshape(-1, CHANNELS)
    centred = (x - x.mean(0)).reshape(-1, CHANNELS)
    values = np.linalg.eigvalsh(centred.T @ centred / len(centred))
    expected = values / (values + values.mean()) ** (2 * power)
    found = np.linalg.eigvalsh(made.T @ made / len(made))
    np.testing.assert_allclose(found, expected / expected.mean(), rtol=1e-3)


def joint(x, norm):
    first, second = sums(x.reshape(len(x), -1, x.shape[-1]), norm)
    return np.concatenate([first.ravel(), second[np.triu_indices(len(second))]])


@given(
    st.lists(st.floats(-1e200, 1e200), min_size=24, max_size=24),
    st.floats(1e-3, 1e3),
)
def test_no_record_moves_the_sums_by_more_than_the_bound(row, norm):
    x = records(30)
    row = np.asarray(row).reshape(1, 2, 3, CHANNELS)
    moved = joint(np.concatenate([x, row]), norm) - joint(x, norm)
    assert np.linalg.norm(moved) <= np.sqrt(2) * (1 + 1e-9)


def test_a_long_record_reaches_the_bound():
    row = np.zeros((1, 2, 3, CHANNELS))
    row[0, 0, 0, 0] = 1e9
    assert np.linalg.norm(joint(row, 2.0)) == pytest.approx(np.sqrt(2))


def test_broken_records_add_nothing():
    x = records(20).astype(np.float64)
    bad = np.full((3, 2, 3, CHANNELS), 1.0)
    bad[0, 0, 0, 0], bad[1, 1, 2, 3], bad[2] = np.nan, np.inf, 1e300
    np.testing.assert_allclose(joint(np.concatenate([x, bad[:2]]), 2.0), joint(x, 2.0))
    assert np.isfinite(joint(bad, 2.0)).all()


def noise_of(monkeypatch, z=3.0, channels=30, **options):
    """The released noise of mean and triangle, of records that are zero, over √2 z."""
    seen, eigh, x = {}, np.linalg.eigh, np.zeros((5, 40, channels))
    with monkeypatch.context() as patch:
        patch.setattr(np.linalg, "eigh", lambda m: seen.update(m=m) or eigh(m))
        made = dp_whitening(x, z, **{"secret": SECRET, "size": 1, "row_norm": 1.0, **options})
    mean = made.mean.astype(np.float64)
    second = (seen["m"] + mean.T @ mean / 40) * 40
    return [a / (np.sqrt(2) * z) for a in (mean.ravel(), second[np.triu_indices(channels)])]


def test_noise_has_its_scale_and_no_other(monkeypatch):
    mean, triangle = noise_of(monkeypatch)
    for noise in (mean, triangle):
        assert is_gaussian(noise, 1.0)
        assert not is_gaussian(noise, 1.2)
    assert are_uncorrelated(mean[:465], triangle)


def test_the_release_is_charged_once_and_again_the_second_time(monkeypatch):
    ledger = jaxdp.Ledger()
    one, two = (noise_of(monkeypatch, secret=SECRET, ledger=ledger)[0] for _ in range(2))
    assert ledger.event == acc.Composed((acc.Repeated(acc.Gaussian(3.0), 2),))
    assert are_uncorrelated(one, two)


def test_another_release_of_one_seed_has_another_noise(monkeypatch):
    one, same = (noise_of(monkeypatch)[0] for _ in range(2))
    np.testing.assert_allclose(one, same)  # a figure can be made again
    assert are_uncorrelated(one, noise_of(monkeypatch, 5.0)[0])
    assert are_uncorrelated(one, noise_of(monkeypatch, row_norm=1.01)[0])


def test_a_record_is_whitened_to_the_same_digits_whoever_else_is_there():
    x = records(700)
    made = released(x)
    np.testing.assert_array_equal(whitened(x, made)[333:640], whitened(x[333:640], made))


def test_nothing_but_noise_or_nothing_at_all_is_survived():
    assert np.isfinite(whitened(records(9), released(records(9), 1e6))).all()
    nothing = dp_whitening(np.zeros((3, 2)), 0.0, SECRET, size=3)
    np.testing.assert_array_equal(nothing.matrix, np.eye(2))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((np.zeros(3), 1.0), {"size": 3}, r"x must be an array \[n, ..., channels\]"),
        ((np.zeros((3, 0)), 1.0), {"size": 3}, r"x must be an array \[n, ..., channels\]"),
        ((np.zeros((3, 2)), -1.0), {"size": 3}, "noise_multiplier must be"),
        ((np.zeros((3, 2)), 1.0), {"size": 0}, "size must be"),
        ((np.zeros((3, 2)), 1.0), {"size": 3, "power": 0.6}, "power must be from 0 to 1/2"),
        ((np.zeros((3, 2)), 1.0), {"size": 3, "row_norm": 0.0}, "row_norm must be"),
    ],
)
def test_bad_input(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        dp_whitening(*arguments, SECRET, **options)


def test_records_of_another_shape_are_refused():
    made = Whitening(np.zeros((6, 4), np.float32), np.eye(4, dtype=np.float32))
    with pytest.raises(ValueError, match="x must be records of 6 places and 4 channels"):
        whitened(np.zeros((3, 5, 4)), made)
