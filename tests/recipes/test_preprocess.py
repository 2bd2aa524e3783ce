"""DP-PCA and private whitening: what one record moves, which noise is added, and what is charged.

In a run, whitening is charged once, and its noise never used again, whenever the run is killed.
"""

import functools
import itertools
import types
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdp
from jaxdp import accounting as acc
from jaxdp import runs
from jaxdp.ledger import Ledger
from jaxdp.ledger.entries import SEEDED
from jaxdp.recipes import features, preprocess
from jaxdp.recipes.preprocess import (
    Whitening,
    dp_pca,
    dp_whitening,
    project,
    sums,
    whitened,
)
from jaxdp.runs import RunDirectory, assemble, tuned
from jaxdp.runs.starts import INTERRUPTED
from tests.laws import are_uncorrelated, is_gaussian
from tests.refusing import refused
from tests.runs import small
from tests.runs.small import Killed

SECRET = jaxdp.Secret.from_seed(4)
PLACES, CHANNELS = 6, 4
EACH = pytest.mark.parametrize("kind", ["pca", "whitening"])


def records(n=4000, seed=0):
    """Records of 2 × 3 places and 4 channels with a mean, and channels of unequal variances."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(n, 2, 3, CHANNELS)) * [4.0, 1.0, 0.3, 0.1]
    turn = np.linalg.qr(rng.normal(size=(CHANNELS, CHANNELS)))[0]
    return (mixed @ turn + np.arange(CHANNELS)).astype(np.float32)


def released(kind, x, z, secret=SECRET, **options):
    """Of either kind, with rows of norm 1 and, for whitening, of one record."""
    if kind == "pca":
        return dp_pca(x, 1, z, secret, **options)
    return dp_whitening(x, z, secret, **{"size": 1, "row_norm": 1.0, **options})


def unnoised(kind, x, norm):
    """What noise is added to, over the largest norm that one record may have in it."""
    if kind == "pca":
        return np.triu(sums(x.reshape(len(x), 1, -1), norm)[1]).ravel()
    first, second = sums(x.reshape(len(x), -1, x.shape[-1]), norm)
    joint = np.concatenate([first.ravel(), second[np.triu_indices(len(second))]])
    return joint / np.sqrt(2)


def noise_of(kind, z=3.0, channels=40, **options):
    """The noise of a release of zeros over its standard deviation: the means', the triangle's."""
    seen, eigh, x = {}, np.linalg.eigh, np.zeros((5, channels))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.linalg, "eigh", lambda m: seen.update(m=m) or eigh(m))
        made = released(kind, x if kind == "pca" else x[:, None] + np.zeros((40, 1)), z, **options)
    matrix = seen["m"]
    np.testing.assert_allclose(matrix, matrix.T, rtol=1e-12)
    if kind == "pca":
        return np.empty(0), matrix[np.triu_indices(channels)] / z
    mean = made.mean.astype(np.float64)
    second = (matrix + mean.T @ mean / 40) * 40
    return mean.ravel() / (np.sqrt(2) * z), second[np.triu_indices(channels)] / (np.sqrt(2) * z)


def test_channels_are_centred_with_a_mean_square_of_one_and_the_power_evens_them_out():
    def nearly_exact(x, z=1e-6):
        return whitened(x, dp_whitening(x, z, SECRET, size=len(x), row_norm=100.0))

    made = nearly_exact(records()).reshape(-1, PLACES, CHANNELS)
    np.testing.assert_allclose(made.mean(0), 0, atol=1e-4)
    assert np.mean(made**2) == pytest.approx(1.0, rel=1e-3)
    assert np.isfinite(nearly_exact(records()[:9], 1e6)).all()
    nothing = dp_whitening(np.zeros((3, 2)), 0.0, SECRET, size=3)
    np.testing.assert_array_equal(nothing.matrix, np.eye(2))
    x = records().astype(np.float64)
    centred = (x - x.mean(0)).reshape(-1, CHANNELS)
    values = np.linalg.eigvalsh(centred.T @ centred / len(centred))
    made = nearly_exact(x).reshape(-1, CHANNELS)
    expected = values / (values + values.mean()) ** 0.5
    found = np.linalg.eigvalsh(made.T @ made / len(made))
    np.testing.assert_allclose(found, expected / expected.mean(), rtol=1e-3)
    # The plane of DP-PCA is found, and lost under noise.
    rng = np.random.default_rng(0)
    plane = np.linalg.qr(rng.normal(size=(6, 2)))[0]
    x = rng.normal(size=(3000, 2)) @ plane.T + 0.05 * rng.normal(size=(3000, 6))
    quiet, loud = (dp_pca(x, 2, z, SECRET) for z in (1.0, 1e6))
    np.testing.assert_allclose(quiet.T @ quiet, np.eye(2), atol=1e-5)
    assert np.linalg.norm(plane.T @ quiet) == pytest.approx(np.sqrt(2), abs=1e-2)
    assert np.linalg.norm(plane.T @ loud) < 1.3
    assert project(x, quiet).shape == (3000, 2)


@EACH
@given(st.lists(st.floats(-1e200, 1e200), min_size=24, max_size=24), st.floats(1e-3, 1e3))
def test_no_record_moves_what_is_released_by_more_than_the_bound(kind, row, norm):
    x, row = records(30), np.asarray(row).reshape(1, 2, 3, CHANNELS)
    for scale in (1.0, 1e-200):  # floats of every size, and those that are not cut
        moved = unnoised(kind, np.concatenate([x, row * scale]), norm) - unnoised(kind, x, norm)
        assert np.linalg.norm(moved) <= 1 + 1e-9


@EACH
def test_a_long_record_reaches_the_bound_and_a_broken_one_adds_nothing(kind):
    row = np.zeros((1, 2, 3, CHANNELS))
    row[0, 0, 0, 0] = 1e9
    assert np.linalg.norm(unnoised(kind, row, 2.0)) == pytest.approx(1.0)
    x, bad = records(20).astype(np.float64), np.full((3, 2, 3, CHANNELS), 1.0)
    bad[0, 0, 0, 0], bad[1, 1, 2, 3], bad[2] = np.nan, np.inf, 1e300
    with_bad = unnoised(kind, np.concatenate([x, bad[:2]]), 2.0)
    np.testing.assert_allclose(with_bad, unnoised(kind, x, 2.0))
    assert np.isfinite(unnoised(kind, bad, 2.0)).all()


@EACH
def test_noise_has_its_scale_and_no_other(kind):
    means, triangle = noise_of(kind)
    for noise in [means, triangle] if kind == "whitening" else [triangle]:
        assert is_gaussian(noise, 1.0)
        assert not is_gaussian(noise, 1.2)
    if kind == "whitening":
        assert are_uncorrelated(means[:820], triangle)
        return
    assert is_gaussian(noise_of(kind, row_norm=2.0)[1], 1.0)  # in units of the norm's square
    assert not is_gaussian(noise_of(kind, row_norm=2.0, channels=80)[1], 1.1)


@EACH
def test_a_second_release_is_charged_again_and_has_its_own_noise(kind):
    for secret in (SECRET, jaxdp.Secret.new()):
        ledger = jaxdp.Ledger()
        one, two = (noise_of(kind, secret=secret, ledger=ledger) for _ in range(2))
        assert ledger.event == acc.Composed((acc.Repeated(acc.Gaussian(3.0), 2),))
        assert ledger.steps == 2
        for a, b in zip(one, two, strict=True):
            assert a.size == 0 or are_uncorrelated(a, b)
    same = [noise_of(kind)[1] for _ in range(2)]
    np.testing.assert_allclose(*same)  # of one seed, a figure can be made again
    assert are_uncorrelated(same[0], noise_of(kind, 5.0)[1])
    assert are_uncorrelated(same[0], noise_of(kind, row_norm=1.01)[1])
    # A chosen seed is told.
    for secret, told in ((SECRET, [True]), (None, [])):
        ledger = jaxdp.Ledger()
        released(kind, records(100), 8.0, secret, ledger=ledger)
        assert ledger.epsilon(1e-5).upper == acc.epsilon(acc.Gaussian(8.0), 1e-5).upper
        assert ["seed that a person chose" in line for line in ledger.unverified()] == told


def deviation(z, rows, **options):
    """The factor that normals are multiplied by, from normals that are all 1."""

    with pytest.MonkeyPatch.context() as patch:
        ones = types.SimpleNamespace(normal=lambda size: np.ones(size))
        patch.setattr(jaxdp.Secret, "philox", lambda *_: ones)
        made = released("whitening", rows, z, **options)
    return float(made.mean.ravel()[0])


def test_the_noise_grows_with_what_rounding_or_a_mask_may_move():
    """The record that comes first moves all others to other blocks, and other roundings."""
    small_share, share = (preprocess._rounded(size, 49) for size in (1, 60_000))
    assert 0 < small_share < share < 1e-6
    more = deviation(1.0, np.zeros((1, 4096, 1)), size=10**9) * 10**9
    assert more >= 2**0.5 * (1 + preprocess._rounded(10**9, 4096)) * (1 - 2.0**-22)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 3, 4))
    x *= 10 ** rng.uniform(-3, 3, size=(3000, 1, 1))
    more = np.concatenate([rng.normal(size=(1, 3, 4)) * 9, x])
    moved = unnoised("whitening", more, 1.0) - unnoised("whitening", x, 1.0)
    assert np.linalg.norm(moved) <= 1 + preprocess._rounded(1500, 3)
    # A mask does not take a record out of its own norm, which left out the masked numbers.
    x = np.ma.masked_array(np.full((1, 2, 2), 1e9), mask=[[[False, True], [True, True]]])
    assert abs(deviation(1e-6, x)) <= 1.0 + 1e-5
    seen = released("whitening", x, 1e-9).mean
    np.testing.assert_allclose(seen, 0.5, atol=1e-6)
    assert dp_pca(x, 1, 1.0, SECRET).shape == (4, 1)
    # A number of few digits has the noise that is charged: the deviation of float16(0.214) was
    # rounded to 16 bits, 4.5e-4 below.
    kinds = (np.float16, np.float32, np.float64, float)
    for z in (kind(z) for kind in kinds for z in (0.214, 0.3, 2.9)):
        ledger = jaxdp.Ledger()
        found = deviation(z, np.zeros((1, 3, 1)), ledger=ledger)
        assert found >= 2**0.5 * float(z) * (1 - 2.0**-23), repr(z)
        assert ledger.event == acc.Composed((acc.Repeated(acc.Gaussian(float(z)), 1),)), repr(z)


def test_neither_a_warning_nor_an_error_tells_of_a_record():
    values = (1e300, -np.inf, np.nan, 1e-320, 1e160)
    for value, norm in itertools.product(values, (1e-60, 1.0, 1e60)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for part in sums(np.full((1, 2, 2), value), norm):
                assert np.linalg.norm(part) <= 1 + 1e-12, (value, norm)
    numbers = np.full((1, 2, 2), np.float32(3e38))
    assert np.linalg.norm(sums(numbers, 1.0)[0]) == pytest.approx(1)
    # No records are a data set too: its release failed, and that of one record did not.
    made = dp_whitening(np.zeros((0, 2, 3)), 1.0, SECRET, size=3)
    assert (made.mean.shape, made.matrix.shape) == ((2, 3), (3, 3))
    assert dp_pca(np.zeros((0, 4)), 2, 1.0, SECRET).shape == (4, 2)


@EACH
def test_a_norm_whose_square_has_no_digits_is_refused_before_the_charge(kind):
    """DP-PCA charged Gaussian(0.4) and released the matrix itself: 0.4 R² is 0 in float64."""
    ledger = jaxdp.Ledger()
    for norm in (2e-162, 1e-320, 1e200):
        given = {"row_norm": norm, "ledger": ledger}
        words = "row_norm must be from 1e-60 to 1e+60"
        refused(words, released, kind, np.full((3, 2), norm), 0.4, **given)
    assert ledger.entries == ()
    for norm in (1e-60, 1e60):
        assert sums(np.full((1, 1, 1), norm), norm)[1] == pytest.approx(1)


def test_bad_input():
    two, row, white = np.zeros((3, 2)), np.zeros(3), functools.partial(dp_whitening, size=3)
    refused("x must be an array [n, ...]", dp_pca, row, 1, 1.0)
    refused("dimensions must be at most the 2", dp_pca, two, 3, 1.0)
    refused("dimensions must be a whole number", dp_pca, two, 0, 1.0)
    refused("noise_multiplier must be", dp_pca, two, 1, -1.0)
    refused("x must be an array [n, ..., channels]", white, row, 1.0)
    refused("x must be an array [n, ..., channels]", white, np.zeros((3, 0)), 1.0)
    refused("noise_multiplier must be", white, two, -1.0)
    refused("size must be", dp_whitening, two, 1.0, size=0)
    refused("row_norm must be", white, two, 1.0, row_norm=0.0)
    other = Whitening(np.zeros((6, 4), np.float32), np.eye(4, dtype=np.float32))
    refused("records of 6 places and 4 channels", whitened, np.zeros((3, 5, 4)), other)


# Whitening in a run.
Z = 8.0


@pytest.fixture
def quick(monkeypatch):
    """Features that take no time: what is whitened is not the matter here."""

    def made(name, images):
        shape = features.shape_of(name, images.shape[1:])
        return np.resize(images.reshape(len(images), -1), (len(images), *shape))

    monkeypatch.setattr(features, "by_name", made)


def config(**changes):
    given = {"features": "scattering", "whiten_noise_multiplier": Z, "steps": 3, **changes}
    return small.config(**given)


POINTS = ("charge", "release", "keep", "show", "publish")


def spied(monkeypatch, noises, at=None, after=False):
    """Writes down all noise of whitening; kills the process before (or after) one of its writes."""

    def stopping(point, real, of_whitening=lambda *args, **options: True):
        def call(*args, **options):
            stops = at == point and of_whitening(*args, **options)
            if stops and not after:
                raise Killed
            made = real(*args, **options)
            if stops:
                raise Killed
            return made

        return call

    def drawing(self, name, counter):
        if name == "whitening":
            noises.append(philox(self, name, counter).normal(size=400))
        return philox(self, name, counter)

    def saved(path, *args, **options):
        return (kept if path.parent.name == "secret" else published)(path, *args, **options)

    philox, named = jaxdp.Secret.philox, lambda stream: str(stream).endswith("/whitening")
    charge = stopping("charge", Ledger.charge, lambda *_, stream=None, **options: named(stream))
    show = stopping("show", Ledger.show, lambda ledger, stream, *_: named(stream))
    kept, published = (stopping(point, assemble.save_array) for point in ("keep", "publish"))
    monkeypatch.setattr(jaxdp.Secret, "philox", drawing)
    monkeypatch.setattr(Ledger, "charge", charge)
    monkeypatch.setattr(Ledger, "show", show)
    monkeypatch.setattr(assemble, "dp_whitening", stopping("release", dp_whitening))
    monkeypatch.setattr(assemble, "save_array", saved)


# Of a seed at each point, and of the operating system's randomness after each.
KILLS = [*itertools.product(POINTS, (False, True), (5,)), *((at, True, None) for at in POINTS)]


@pytest.mark.parametrize(("point", "after", "seed"), KILLS)
def test_killed_at_any_point_it_is_charged_once_and_its_noise_never_used_again(
    tmp_path, monkeypatch, quick, point, after, seed
):
    folder, noises, found, kills = tmp_path / "r", [], set(), 0
    file = folder / "components.npy"
    for life in range(3):
        with monkeypatch.context() as patch:
            spied(patch, noises, point if life < 2 else None, after)
            try:
                small.planned(folder, config(), seed=seed)
            except Killed:
                kills += 1
        found |= {file.read_bytes()} if file.exists() else set()
    assert kills >= 1
    ledger = Ledger(RunDirectory(folder).ledger)
    charged = [e for e in ledger.entries if str(e.stream).endswith("/whitening")]
    told = [(entry.event, entry.steps, entry.note) for entry in charged]
    assert told == [(acc.Gaussian(Z), 1, SEEDED if seed else "")]
    # Each life that draws has noise of its own, and one release alone is ever seen.
    alike = np.abs(np.corrcoef(np.stack(noises))).reshape(len(noises), -1) - np.eye(len(noises))
    assert alike.max() < 0.3
    assert len(found) == 1
    once = {("charge", False), ("show", True), ("publish", False), ("publish", True)}
    assert (INTERRUPTED in ledger.unverified()) == ((point, after) not in once)
    assert file.read_bytes() == (folder / "secret" / file.name).read_bytes()


def test_the_release_costs_its_gaussian_under_every_relation(tmp_path):
    replaced, special = acc.Relation.REPLACE_ONE, acc.Relation.REPLACE_SPECIAL
    given = {special: {"sampling": "fixed_order", "strategy": "identity"}}
    given[replaced] = {"sampling": "fixed_size"}
    for relation in acc.Relation:
        options = given.get(relation, {})
        made = config(relation=relation.value, noise_multiplier=300.0, **options)
        told = acc.epsilon(made.total(3), made.delta, relation).lower
        doubled = acc.Gaussian(Z * (0.5 if relation is replaced else 1.0))
        alone = acc.epsilon(doubled, made.delta, acc.Relation.ADD_OR_REMOVE_ONE)
        assert told >= alone.lower * (1 - 1e-6), relation
    # What no try would release is not tuned. Whitening was charged to the budget and left out, and
    # every try of a projection failed.
    law, space = acc.Geometric(0.5), {"learning_rate": [0.1, 0.2]}
    for name, given in (
        ("whiten_noise_multiplier", {"features": "scattering", "whiten_noise_multiplier": Z}),
        ("pca_dimensions", {"pca_dimensions": 4, "pca_noise_multiplier": Z}),
    ):
        given |= {"steps": 3, "batch_size": 40, "model": "logistic"}
        given |= {"noise_multiplier": 2.0, "dataset_size": 200}
        words = f"{name} must be None to be tuned, got"
        refused(words, tuned.configured, "digits", law, epsilon=None, **given)
        whole = runs.resolve(runs.recipe("digits", **given))
        refused(words, tuned.tuned, tmp_path / "t", whole, small.dataset(), space, law)
    assert not (tmp_path / "t").exists()


def test_a_run_goes_on_with_its_own_noise_and_its_own_release(tmp_path, quick):
    folder = tmp_path / "r"
    small.planned(folder, config())
    words = "changed: whiten_noise_multiplier .8.0 then, 9.0 now"
    refused(words, small.go, folder, config(whiten_noise_multiplier=9.0))
    file = folder / "components.npy"
    before, kept = file.read_bytes(), folder / "secret" / file.name
    for lost in (file, kept):
        lost.unlink()
        small.planned(folder, config())
        assert lost.read_bytes() == before
    kept.unlink()
    file.unlink()
    words = "components that were shown .* others are another release"
    refused(words, small.go, folder, config())
