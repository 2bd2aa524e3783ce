"""Whitening in a run: charged once, and its noise never used again, whenever the run is killed."""

import numpy as np
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp import features, runs
from jaxdp._entries import SEEDED
from jaxdp.ledger import Ledger
from jaxdp.runs import RunDirectory, assemble, loop, tuned
from jaxdp.runs.run import INTERRUPTED
from jaxdp.whitening import dp_whitening
from tests.runs import small

Z = 8.0


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
