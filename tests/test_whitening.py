"""Private whitening: what it releases, with which noise and charge, and what runs make of it."""

import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdp
from jaxdp import accounting as acc
from jaxdp import features, preprocess, runs, whitening
from jaxdp._entries import SEEDED
from jaxdp.ledger import Ledger
from jaxdp.preprocess import dp_pca, second_moment
from jaxdp.runs import RunDirectory, assemble, loop, tuned
from jaxdp.runs.run import INTERRUPTED
from jaxdp.whitening import Whitening, dp_whitening, sums, whitened
from tests.laws import are_uncorrelated, is_gaussian
from tests.runs import small

SECRET = jaxdp.Secret.from_seed(4)
Z = 8.0
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


def test_nothing_but_noise_or_nothing_at_all_is_survived():
    assert np.isfinite(whitened(records(9), released(records(9), 1e6))).all()
    nothing = dp_whitening(np.zeros((3, 2)), 0.0, SECRET, size=3)
    np.testing.assert_array_equal(nothing.matrix, np.eye(2))


REFUSED = (  # shape of the records, noise multiplier, options
    ((3,), 1.0, {}, r"x must be an array \[n, ..., channels\]"),
    ((3, 0), 1.0, {}, r"x must be an array \[n, ..., channels\]"),
    ((3, 2), -1.0, {}, "noise_multiplier must be"),
    ((3, 2), 1.0, {"size": 0}, "size must be"),
    ((3, 2), 1.0, {"power": 0.6}, "power must be from 0 to 1/2"),
    ((3, 2), 1.0, {"row_norm": 0.0}, "row_norm must be"),
)


def test_bad_input():
    for shape, z, options, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            dp_whitening(np.zeros(shape), z, SECRET, **{"size": 3, **options})
    made = Whitening(np.zeros((6, 4), np.float32), np.eye(4, dtype=np.float32))
    with pytest.raises(ValueError, match="x must be records of 6 places and 4 channels"):
        whitened(np.zeros((3, 5, 4)), made)


def deviation(z, monkeypatch, rows, **options):
    """The factor that normals are multiplied by, from normals that are all 1."""

    class Ones:
        def normal(self, size):
            return np.ones(size)

    with monkeypatch.context() as patch:
        patch.setattr(jaxdp.Secret, "philox", lambda *_: Ones())
        made = dp_whitening(rows, z, SECRET, **{"size": 1, "row_norm": 1.0, **options})
    return float(made.mean.ravel()[0])


def test_a_number_of_few_digits_has_the_noise_that_is_charged(monkeypatch):
    """The deviation of float16(0.214) was rounded to 16 bits: 4.5e-4 below what was charged."""
    kinds = (np.float16, np.float32, np.float64, float)
    for z in (kind(z) for kind in kinds for z in (0.214, 0.3, 2.9)):
        ledger = jaxdp.Ledger()
        found = deviation(z, monkeypatch, np.zeros((1, 3, 1)), ledger=ledger)
        assert found >= 2**0.5 * float(z) * (1 - 2.0**-23)
        assert ledger.event == acc.Composed((acc.Repeated(acc.Gaussian(float(z)), 1),))


def test_the_noise_grows_with_what_rounding_may_move(monkeypatch):
    small_share, share = (whitening._rounded(size, 49) for size in (1, 60_000))
    assert 0 < small_share < share < 1e-6
    rows, size = np.zeros((1, 4096, 1)), 10**9
    more = deviation(1.0, monkeypatch, rows, size=size) * size
    assert more >= 2**0.5 * (1 + whitening._rounded(size, 4096)) * (1 - 2.0**-22)


def test_sums_of_neighbours_round_no_further_apart_than_is_said():
    """The record that comes first moves all others to other blocks, and other roundings."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 3, 4))
    x *= 10 ** rng.uniform(-3, 3, size=(3000, 1, 1))
    row = rng.normal(size=(1, 3, 4)) * 9
    (one, two), (more, most) = sums(x, 1.0), sums(np.concatenate([row, x]), 1.0)
    moved = np.concatenate([(more - one).ravel(), (most - two)[np.triu_indices(4)]])
    assert np.linalg.norm(moved) <= np.sqrt(2) * (1 + whitening._rounded(1500, 3))


def test_a_mask_does_not_take_a_record_out_of_its_own_norm():
    """The norm left out the masked numbers, which the products had."""
    x = np.ma.masked_array(np.full((1, 2, 2), 1e9), mask=[[[False, True], [True, True]]])
    first = deviation(1e-6, pytest.MonkeyPatch(), x, row_norm=1.0)
    assert abs(first) <= 1.0 + 1e-5
    seen = dp_whitening(x, 1e-9, SECRET, size=1, row_norm=1.0).mean
    np.testing.assert_allclose(seen, 0.5, atol=1e-6)
    assert dp_pca(x, 1, 1.0, SECRET).shape == (4, 1)


def test_no_warning_tells_of_a_record():
    for value, norm in itertools.product(
        (1e300, -np.inf, np.nan, 1e-320, 1e160), (1e-100, 1.0, 1e100)
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            first, second = sums(np.full((1, 2, 2), value), norm)
            assert np.linalg.norm(first) <= 1 + 1e-12
            assert np.linalg.norm(second) <= 1 + 1e-12
    numbers = np.full((1, 2, 2), np.float32(3e38))
    assert np.linalg.norm(sums(numbers, 1.0)[0]) == pytest.approx(1)


def test_no_records_are_a_data_set_too():
    """Its release failed, and that of one record did not."""
    made = dp_whitening(np.zeros((0, 2, 3)), 1.0, SECRET, size=3)
    assert (made.mean.shape, made.matrix.shape) == ((2, 3), (3, 3))
    assert dp_pca(np.zeros((0, 4)), 2, 1.0, SECRET).shape == (4, 2)


@pytest.mark.parametrize("norm", [2e-162, 1e-320, 1e200])
def test_a_norm_whose_square_has_no_digits_is_refused_before_the_charge(norm):
    """DP-PCA charged Gaussian(0.4) and released the matrix itself: 0.4 R² is 0 in float64."""
    ledger = jaxdp.Ledger()
    for release in (
        lambda: dp_pca(np.full((3, 2), norm), 1, 0.4, SECRET, row_norm=norm, ledger=ledger),
        lambda: dp_whitening(
            np.full((3, 2), norm), 0.4, SECRET, size=3, row_norm=norm, ledger=ledger
        ),
    ):
        with pytest.raises(ValueError, match="row_norm must be from 1e-100 to 1e100"):
            release()
    assert ledger.entries == ()
    least, largest = preprocess._NORMS
    assert second_moment(np.full((1, 1), least), least) == pytest.approx(least**2)
    assert np.isfinite(largest**2)


class Killed(BaseException):
    """The process, from outside."""


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

    def stopping(point, real):
        def call(*args, **options):
            mine = point != "charge" or str(options.get("stream", "")).endswith("/whitening")
            mine = mine and (point != "show" or str(args[1]).endswith("/whitening"))
            if at == point and mine and not after:
                raise Killed
            made = real(*args, **options)
            if at == point and mine and after:
                raise Killed
            return made

        return call

    def saved(path, *args, **options):
        point = "keep" if path.parent.name == "secret" else "publish"
        return stopping(point, save)(path, *args, **options)

    save, philox = loop.save_array, jaxdp.Secret.philox

    def drawing(self, name, counter):
        if name == "whitening":
            noises.append(philox(self, name, counter).normal(size=400))
        return philox(self, name, counter)

    monkeypatch.setattr(jaxdp.Secret, "philox", drawing)
    monkeypatch.setattr(Ledger, "charge", stopping("charge", Ledger.charge))
    monkeypatch.setattr(Ledger, "show", stopping("show", Ledger.show))
    monkeypatch.setattr(assemble, "dp_whitening", stopping("release", dp_whitening))
    monkeypatch.setattr(loop, "save_array", saved)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("seed", [5, None], ids=["seed", "new"])
def test_killed_at_any_point_it_is_charged_once_and_its_noise_never_used_again(
    tmp_path, monkeypatch, quick, point, after, seed
):
    folder, noises, found, kills, result = tmp_path / "r", [], set(), 0, None
    file = folder / "components.npy"
    for life in range(3):
        with monkeypatch.context() as patch:
            spied(patch, noises, point if life < 2 else None, after)
            try:
                result = small.go(folder, config(steps=1), seed=seed)
            except Killed:
                kills += 1
        found |= {file.read_bytes()} if file.exists() else set()
    assert kills >= 1
    ledger = Ledger(RunDirectory(folder).ledger)
    charged = [e for e in ledger.entries if str(e.stream).endswith("/whitening")]
    assert [(e.event, e.steps, e.note) for e in charged] == [
        (acc.Gaussian(Z), 1, SEEDED if seed else "")
    ]
    # Each life that draws has noise of its own, and one release alone is ever seen.
    alike = np.abs(np.corrcoef(np.stack(noises))).reshape(len(noises), -1) - np.eye(len(noises))
    assert alike.max() < 0.3
    assert len(found) == 1
    made_anew = (point, after) in (
        ("charge", True), ("release", False), ("release", True), ("keep", False),
    )  # fmt: skip
    assert (INTERRUPTED in result.ledger.unverified()) == made_anew
    assert file.read_bytes() == (folder / "secret" / file.name).read_bytes()


@pytest.mark.parametrize("relation", list(acc.Relation))
def test_the_release_costs_its_gaussian_under_every_relation(relation):
    given = {"sampling": "fixed_order", "strategy": "identity"}
    given = given if relation is acc.Relation.REPLACE_SPECIAL else {}
    if relation is acc.Relation.REPLACE_ONE:
        given = {"sampling": "fixed_size"}
    made = config(relation=relation.value, noise_multiplier=300.0, **given)
    told = acc.epsilon(made.total(3), made.delta, relation).lower
    doubled = 0.5 if relation is acc.Relation.REPLACE_ONE else 1.0
    alone = acc.epsilon(acc.Gaussian(Z * doubled), made.delta, acc.Relation.ADD_OR_REMOVE_ONE)
    assert told >= alone.lower * (1 - 1e-6)


def test_a_run_goes_on_with_its_own_noise_and_its_own_release(tmp_path, quick):
    folder = tmp_path / "r"
    small.go(folder, config())
    with pytest.raises(ValueError, match=r"changed: whiten_noise_multiplier .8.0 then, 9.0 now"):
        small.go(folder, config(whiten_noise_multiplier=9.0))
    file = folder / "components.npy"
    before = file.read_bytes()
    file.unlink()
    small.go(folder, config())
    assert file.read_bytes() == before
    (folder / "secret" / file.name).unlink()
    small.go(folder, config())
    assert (folder / "secret" / file.name).read_bytes() == before
    (folder / "secret" / file.name).unlink()
    file.unlink()
    with pytest.raises(ValueError, match="components were shown, and others are another release"):
        small.go(folder, config())


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("whiten_noise_multiplier", {"features": "scattering", "whiten_noise_multiplier": Z}),
        ("pca_dimensions", {"pca_dimensions": 4, "pca_noise_multiplier": Z}),
    ],
)
def test_what_no_try_would_release_is_not_tuned(tmp_path, name, given):
    """Whitening was charged to the budget and left out; every try of a projection failed."""
    law, changes = acc.Geometric(0.5), {"steps": 3, "batch_size": 40, "model": "logistic"}
    numbers = {"epsilon": None, "noise_multiplier": 2.0, "dataset_size": 200}
    with pytest.raises(ValueError, match=f"{name} must be None to be tuned, got"):
        tuned.configured("digits", law, **numbers, **changes, **given)
    whole = runs.resolve(
        runs.recipe("digits", noise_multiplier=2.0, dataset_size=200, **changes, **given)
    )
    space = {"learning_rate": [0.1, 0.2]}
    with pytest.raises(ValueError, match=f"{name} must be None to be tuned, got"):
        tuned.tuned(tmp_path / "t", whole, small.dataset(), space, law)
    assert not (tmp_path / "t").exists()
