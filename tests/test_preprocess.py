import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdp
from jaxdp import accounting as acc
from jaxdp.preprocess import dp_pca, project, second_moment
from tests.laws import are_uncorrelated, is_gaussian

SECRET = jaxdp.Secret.from_seed(4)


def points(n=3000, noise=0.05, seed=0):
    rng = np.random.default_rng(seed)
    plane = np.linalg.qr(rng.normal(size=(6, 2)))[0]
    return rng.normal(size=(n, 2)) @ plane.T + noise * rng.normal(size=(n, 6)), plane


def test_the_plane_is_found_and_lost_under_noise():
    x, plane = points()
    quiet, loud = (dp_pca(x, 2, z, SECRET) for z in (1.0, 1e6))
    np.testing.assert_allclose(quiet.T @ quiet, np.eye(2), atol=1e-5)
    assert np.linalg.norm(plane.T @ quiet) == pytest.approx(np.sqrt(2), abs=1e-2)
    assert np.linalg.norm(plane.T @ loud) < 1.3
    assert project(x, quiet).shape == (3000, 2)


@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=4), st.floats(0.1, 10.0))
def test_no_record_moves_the_released_triangle_by_more_than_the_bound(row, norm):
    x = points(50)[0][:, :4]
    with_row = np.concatenate([x, [row]])
    moved = np.triu(second_moment(with_row, norm) - second_moment(x, norm))
    assert np.linalg.norm(moved) <= norm**2 * (1 + 1e-9)


def test_a_long_record_reaches_the_bound():
    row = np.array([[1e9, 0.0, 0.0]])
    assert np.linalg.norm(second_moment(row, 2.0)) == pytest.approx(4.0)


def noise_of(monkeypatch, noise_multiplier=3.0, **options):
    """The upper triangle of the released noise over z, of rows without a record."""
    seen, eigh = {}, np.linalg.eigh
    with monkeypatch.context() as patch:
        patch.setattr(np.linalg, "eigh", lambda m: seen.update(m=m) or eigh(m))
        dp_pca(np.zeros((5, 80)), 1, noise_multiplier, **options)
    np.testing.assert_array_equal(seen["m"], seen["m"].T)
    return seen["m"][np.triu_indices(80)] / noise_multiplier


def test_noise_has_its_scale_and_no_other(monkeypatch):
    noise = noise_of(monkeypatch, secret=SECRET, row_norm=2.0)
    assert is_gaussian(noise, 4.0)
    assert not is_gaussian(noise, 4.0 * 1.1)


def test_broken_records_add_nothing():
    x = points(20)[0]
    bad = np.concatenate([x, np.full((1, 6), np.nan), np.full((1, 6), 1e200)])
    np.testing.assert_allclose(second_moment(bad[:-1], 1.0), second_moment(x, 1.0))
    assert np.isfinite(second_moment(bad, 1.0)).all()


def test_a_second_release_is_charged_again_and_has_its_own_noise(monkeypatch):
    for secret in (SECRET, jaxdp.Secret.new()):
        ledger = jaxdp.Ledger()
        one, two = (noise_of(monkeypatch, secret=secret, ledger=ledger) for _ in range(2))
        assert ledger.event == acc.Composed((acc.Repeated(acc.Gaussian(3.0), 2),))
        assert are_uncorrelated(one, two)


def test_one_seed_gives_another_noise_to_another_release(monkeypatch):
    same = [noise_of(monkeypatch, secret=SECRET) for _ in range(2)]
    np.testing.assert_allclose(*same)  # a figure can be made again
    assert are_uncorrelated(same[0], noise_of(monkeypatch, 5.0, secret=SECRET))
    assert are_uncorrelated(same[0], noise_of(monkeypatch, secret=SECRET, row_norm=1.01))


def test_the_release_is_charged_once_and_a_chosen_seed_is_told():
    for secret, told in ((SECRET, [True]), (None, [])):
        ledger = jaxdp.Ledger()
        dp_pca(points(100)[0], 2, 8.0, secret, ledger=ledger)
        assert ledger.epsilon(1e-5).upper == acc.epsilon(acc.Gaussian(8.0), 1e-5).upper
        assert ledger.steps == 1
        assert ["seed that a person chose" in line for line in ledger.unverified()] == told


def test_bad_input():
    for arguments, message in (
        ((np.zeros(3), 1, 1.0), r"x must be an array \[n, ...\]"),
        ((np.zeros((3, 2)), 3, 1.0), "dimensions must be at most the 2"),
        ((np.zeros((3, 2)), 0, 1.0), "dimensions must be a whole number"),
        ((np.zeros((3, 2)), 1, -1.0), "noise_multiplier must be"),
    ):
        with pytest.raises(ValueError, match=message):
            dp_pca(*arguments, SECRET)
