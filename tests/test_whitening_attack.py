"""Programs that tried to make private whitening release more than its charge; each is kept."""

import warnings

import numpy as np
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp import features, preprocess, runs, whitening
from jaxdp._entries import SEEDED
from jaxdp.ledger import Ledger
from jaxdp.preprocess import dp_pca, second_moment
from jaxdp.runs import RunDirectory, assemble, loop, tuned
from jaxdp.runs.run import INTERRUPTED
from jaxdp.whitening import dp_whitening, sums
from tests.runs import small

SECRET = jaxdp.Secret.from_seed(4)
Z = 8.0


class Killed(BaseException):
    """The process, from outside."""


def config(**changes):
    given = {"features": "scattering", "whiten_noise_multiplier": Z, "steps": 3, **changes}
    return small.config(**given)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Features that take no time: what is whitened is not the matter here."""

    def made(name, images):
        shape = features.shape_of(name, images.shape[1:])
        return np.resize(images.reshape(len(images), -1), (len(images), *shape))

    monkeypatch.setattr(features, "by_name", made)


def deviation(z, monkeypatch, rows, **options):
    """The factor that normals are multiplied by, from normals that are all 1."""

    class Ones:
        def normal(self, size):
            return np.ones(size)

    with monkeypatch.context() as patch:
        patch.setattr(jaxdp.Secret, "philox", lambda *_: Ones())
        made = dp_whitening(rows, z, SECRET, **{"size": 1, "row_norm": 1.0, **options})
    return float(made.mean.ravel()[0])


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, float])
def test_a_number_of_few_digits_has_the_noise_that_is_charged(kind, monkeypatch):
    """The deviation of float16(0.214) was rounded to 16 bits: 4.5e-4 below what was charged."""
    for z in (kind(0.214), kind(0.3), kind(2.9)):
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


@pytest.mark.parametrize("value", [1e300, -np.inf, np.nan, 1e-320, 1e160])
def test_no_warning_tells_of_a_record(value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for norm in (1e-100, 1.0, 1e100):
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
    tmp_path, monkeypatch, point, after, seed
):
    folder, noises, found, kills, result = tmp_path / "r", [], set(), 0, None
    file = folder / "components.npy"
    for life in range(3):
        with monkeypatch.context() as patch:
            spied(patch, noises, point if life < 2 else None, after)
            try:
                result = small.go(folder, config(), seed=seed)
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


def test_a_run_goes_on_with_its_own_noise_and_its_own_release(tmp_path):
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
    "given",
    [
        {"features": "scattering", "whiten_noise_multiplier": Z},
        {"pca_dimensions": 4, "pca_noise_multiplier": Z},
    ],
    ids=["whitening", "pca"],
)
def test_what_no_try_would_release_is_not_tuned(tmp_path, given):
    """Whitening was charged to the budget and left out; every try of a projection failed."""
    (name, *_) = (name for name in given if name != "features")
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
