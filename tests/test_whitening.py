"""Whitening in a run: charged once, and its noise never used again, whenever the run is killed."""

import itertools

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
from tests.refusing import refused
from tests.runs import small
from tests.runs.small import Killed

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
    kept, published = (stopping(point, loop.save_array) for point in ("keep", "publish"))
    monkeypatch.setattr(jaxdp.Secret, "philox", drawing)
    monkeypatch.setattr(Ledger, "charge", charge)
    monkeypatch.setattr(Ledger, "show", show)
    monkeypatch.setattr(assemble, "dp_whitening", stopping("release", dp_whitening))
    monkeypatch.setattr(loop, "save_array", saved)


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
    made_anew = (point, after) in (
        ("charge", True), ("release", False), ("release", True), ("keep", False),
    )  # fmt: skip
    assert (INTERRUPTED in ledger.unverified()) == made_anew
    assert file.read_bytes() == (folder / "secret" / file.name).read_bytes()


def test_the_release_costs_its_gaussian_under_every_relation():
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


def test_a_run_goes_on_with_its_own_noise_and_its_own_release(tmp_path, quick):
    folder = tmp_path / "r"
    small.go(folder, config(steps=3))
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
    words = "components were shown, and others are another release"
    refused(words, small.go, folder, config())


def test_what_no_try_would_release_is_not_tuned(tmp_path):
    """Whitening was charged to the budget and left out; every try of a projection failed."""
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
