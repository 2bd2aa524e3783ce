"""Grids, users and correlated noise in two worlds: never above the proven, and faults are found."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import jaxdp
from benchmarks.auditing import iterate_score
from benchmarks.kinds_audit import Grid, OfUsers, UsersAsRecords, found
from benchmarks.kinds_correlated import Correlated
from jaxdp import accounting as acc
from jaxdp import audit, clipping
from jaxdp import optimizers as opt
from jaxdp.accounting import Relation
from jaxdp.audit import algorithms
from jaxdp.devices import processes
from jaxdp.noise.sensitivity import sensitivity
from jaxdp.optimizers import registry
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.sampling import CyclicAllocation, CyclicPoisson, FixedOrder, Poisson
from jaxdp.sampling.users import User
from tests.mechanisms import mf_of, sgd_of

SMALL = {"records": 20, "rows": 20, "threshold": 1.0}
CHOSEN = {**SMALL, "threshold": None}
ORDERED = {"relation": Relation.REPLACE_SPECIAL}
CYCLIC, PASSES = CyclicPoisson(0.4, 2, 6), FixedOrder(10, 6)
RIGHT = {
    "grid": Grid(Poisson(0.2), 0.5, 5, 0.01, 150, **SMALL),
    "users": OfUsers(Poisson(0.2), 0.5, 5, 0.01, 150, **SMALL),
    "cyclic": Correlated(CYCLIC, 0.6, 6, 0.01, 100, **SMALL),
    "cyclic allocation": Correlated(CyclicAllocation(2, 2, 8), 0.6, 8, 0.01, 100, **SMALL),
    "fixed order, on a grid": Correlated(PASSES, 0.6, 6, 0.01, 150, **SMALL, **ORDERED, law="grid"),
    "fixed order, made again": Correlated(
        PASSES, 0.6, 6, 0.01, 150, **SMALL, **ORDERED, strategy="lambda"
    ),
}
THIRTY = {**CHOSEN, "records": 30, "rows": 30}
FAULTS = {
    "grid": Grid(Poisson(0.5), 2.0, 8, 0.01, 150, **CHOSEN, share=0.25),
    "users": UsersAsRecords(Poisson(0.5), 2.0, 8, 0.01, 150, **THIRTY),
    "cyclic": Correlated(CYCLIC, 1.0, 6, 0.01, 150, **CHOSEN, share=0.25),
    "fixed order": Correlated(PASSES, 1.0, 6, 0.01, 150, **CHOSEN, **ORDERED, share=0.3),
}


@pytest.fixture(autouse=True)
def versions_are_read_once(monkeypatch):
    """Every run has a sampler of its own, and reading them takes half of its time."""
    monkeypatch.setattr(processes, "versions", functools.cache(processes.versions))


@pytest.mark.parametrize("name", RIGHT)
def test_no_audit_exceeds_what_is_proven(name):
    """Nor does it find nothing, which no guarantee could fail."""
    case = RIGHT[name]
    bound, p_value = found(case)
    assert 0.3 < bound <= case.mechanism().epsilon(case.steps, case.delta, case.relation).upper
    assert p_value > 1e-3


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    bound, p_value = found(FAULTS[name])
    assert p_value < 1e-6
    assert bound > 0.3
    if name != "grid":
        return
    # The fault is what it says: half of the noise alone, where nobody contributes.
    case = dataclasses.replace(RIGHT["grid"], threshold=None, runs=80)
    for share in (1.0, 0.5):
        sums = dataclasses.replace(case, share=share).sums(False)
        assert np.std(sums) == pytest.approx(share * case.noise, rel=0.1)


K, DELTA = 3, 1e-5


def user_scores(noise):
    """Sums along a user's gradient, of all steps: three records that all pull one way, far off."""
    records = jnp.zeros((4, K, 2)).at[-1, :, 0].set(100.0)
    user = User(records, jnp.ones((4, K), bool).at[0, 1:].set(False))
    mechanism = sgd_of(noise, 1.0, 4, 4, "full_batch", records_per_user=K)
    algorithm = opt.sgd(mechanism, 0.1)
    loss_fn = clipping.user_loss(lambda w, record: record @ w)
    worlds = audit.Worlds(loss_fn, jnp.zeros(2), user)
    score = lambda released: jnp.sum(released["noisy"][:, 0])[None]  # noqa: E731
    run = audit.training_run(algorithm, worlds, 4, score=score)
    return algorithm.total(4), *audit.two_worlds(run, 3_000, seed=4)


def test_a_user_as_the_unit_is_audited_close_to_what_is_proven():
    event, inside, outside = user_scores(2.0)
    proven = acc.epsilon(event, DELTA).upper
    found = audit.audit_scores(inside, outside, DELTA, kind="gaussian").epsilon
    assert 0.85 * proven < found <= proven
    assert 0.4 * proven < audit.audit_scores(inside, outside, DELTA).epsilon <= proven
    assert not audit.audit_event(inside, outside, event).refuted
    # Clipped one by one: three records against the noise for one, or a third of the noise.
    _, inside, outside = user_scores(2.0 / K)
    assert audit.audit_event(inside, outside, event).refuted
    assert audit.audit_scores(inside, outside, DELTA).epsilon > proven


# Correlated noise, audited as an algorithm is.
STEPS = 12


def amplified(noise=1.0):
    return mf_of(noise, 0.5, 2, 16, steps=STEPS, bands=3)


def in_order(noise=3.0):
    return mf_of(noise, 0.5, 4, 16, "fixed_order", steps=STEPS, strategy="square_root")


def made_again(noise=3.0):
    return mf_of(noise, 0.5, 4, 16, "fixed_order", steps=STEPS, strategy="lambda")


def audited_algorithm(mechanism, runs=800, **options):
    algorithm = Algorithm(mechanism, optax.sgd(0.1))
    return audit.audit_algorithm(algorithm, STEPS, 1e-3, runs=runs, seed=1, **options)


@pytest.mark.parametrize(("make", "runs"), [(amplified, 500), (in_order, 1500), (made_again, 1500)])
def test_what_is_right_is_not_accused_and_is_nearly_reached(make, runs):
    made = audited_algorithm(make(), runs)
    assert not made.broken
    assert not made.noise.refuted
    assert made.profile.epsilon > 0.5 * made.proven


@pytest.mark.parametrize("make", [amplified, in_order, made_again])
def test_a_sensitivity_that_is_too_low_is_caught(make, monkeypatch):
    def halved(strategy, participation):
        return sensitivity(strategy, participation) / 2

    monkeypatch.setattr(jaxdp.mechanism, "sensitivity", halved)
    made = audited_algorithm(make(), residuals=False)
    assert made.p_value < 1e-3


def drawn_twice(tx):
    """Step 7 has the normals of step 3."""

    def init(params):
        return tx.init(params), jnp.zeros((1, 2), jnp.uint32)

    def update(updates, state, params=None, *, key, **extra):
        inner, kept = state
        kept = jnp.where(key.step == 3, key.words, kept)
        words = jnp.where(key.step == 7, kept, key.words)
        again = dataclasses.replace(key, words=words)
        noisy, inner = tx.update(updates, inner, params, key=again)
        return noisy, (inner, kept)

    return init, update


def not_taken_back(tx):
    """The noise of a step without what the steps before owe it."""

    def update(updates, state, params=None, *, key, **extra):
        forgotten = jax.tree.map(jnp.zeros_like, state.buffers)
        return tx.update(updates, state._replace(buffers=forgotten), params, key=key)

    return tx.init, update


@pytest.mark.parametrize("broken", [drawn_twice, not_taken_back])
def test_broken_noise_is_caught(broken):
    algorithm = Algorithm(in_order(), optax.sgd(0.1))
    link = optax.GradientTransformationExtraArgs(*broken(in_order().privatize()))
    object.__setattr__(algorithm, "noise", link)
    assert audit.audit_algorithm(algorithm, STEPS, 1e-3, runs=300, seed=1).noise.refuted


# Two worlds through the real links: nothing is shared between runs, and bounds fit the truth.
def full_batch(noise):
    return opt.sgd(sgd_of(noise, 1.0, 4, 4, "full_batch"), 0.1)


def sampled(noise):
    return opt.sgd(sgd_of(noise, 1.0, 1, 4), 0.1)


def test_audits_of_full_batches_and_of_sampled_iterates_are_tight_and_below_the_truth():
    found = audit.audit_algorithm(full_batch(2.0), 4, 1e-5, runs=2500, seed=0)
    assert 0.75 * found.proven < found.profile.epsilon < found.proven
    assert found.audited.epsilon < found.proven
    assert not found.broken
    assert "Nothing contradicts" in found.in_words()
    # Sampled, with released iterates.
    algorithm, steps = sampled(0.8), 4
    canary, worlds = algorithms.tiny_worlds(algorithm)
    score = iterate_score(algorithm, canary, worlds.params, 0.1)
    run = audit.training_run(algorithm, worlds, steps, score=score)

    def family(z):
        return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), 0.25), steps)

    found = audit.scores.family_bound(*audit.two_worlds(run, 2500, seed=1), family, 0.8, 1e-5)
    truth = algorithm.epsilon(steps, 1e-5).upper
    assert 0.5 * truth < found.epsilon < truth


@pytest.mark.parametrize("name", ["adadp", "sa-dpsgd-private"])
def test_algorithms_by_name_are_not_accused(name):
    numbers = registry.Numbers(2.0, 1.0, 2, 4, 0.1, key=jax.random.key(1))
    algorithm = registry.build(name, numbers)
    kind = registry.ALGORITHMS[name].energy
    options = {"runs": 500, "confidence": 0.999, "residuals": False}
    found = audit.audit_algorithm(algorithm, 3, 1e-5, energy=kind, seed=2, **options)
    assert not found.broken
    assert found.noise is None
    assert found.audited.epsilon <= found.proven


def test_adadp_as_published_gives_the_record_away():
    numbers = registry.Numbers(4.0, 1.0, 4, 4, 0.1, "full_batch")
    algorithm = registry.build("adadp-as-published", numbers)
    found = audit.audit_algorithm(algorithm, 4, 1e-5, runs=800, seed=0)
    assert found.proven == float("inf")
    assert found.claim_refuted
    assert "refuted" in found.in_words()


def test_sampling_that_changes_who_else_is_drawn_is_refused():
    for name in ("fixed_size", "shuffle", "truncated_poisson"):
        algorithm = opt.sgd(sgd_of(1.0, 1.0, 2, 4, name), 0.1)
        with pytest.raises(ValueError, match="algorithm must sample by Poisson"):
            audit.training_run(algorithm, algorithms.tiny_worlds(algorithm)[1], 1)


@pytest.mark.parametrize("k", [1, 2])
def test_worlds_allocate_every_record_k_steps_of_an_epoch(k):
    rule = jaxdp.sampling.RandomAllocation(4, k)
    algorithm = opt.sgd(sgd_of(1.0, 1.0, k, 4, rule), 0.1)
    _, worlds = algorithms.tiny_worlds(algorithm)
    score = lambda shown: shown["mask"].ravel()  # noqa: E731
    run = audit.training_run(algorithm, worlds, 8, score=score, trusted=True)
    _, found = audit.two_worlds(run, 400, seed=0)  # the last record is in none of them
    masks = found.reshape(-1, 2, 4, worlds.count)
    assert (masks.sum(axis=2)[..., :-1] == k).all()
    assert not masks[..., -1].any()
    ones = masks[..., :-1].sum(axis=(0, 1, 3))
    assert all(abs(ones - ones.mean()) < 6 * np.sqrt(ones.mean()))
    first, second = masks[:, 0, 0, 0], masks[:, 1, 0, 0]
    assert 0 < np.mean(first == second) < 1  # another epoch, another draw


def test_no_two_runs_of_either_world_share_a_key():
    def halves(words, member):
        return jnp.concatenate([words >> np.uint32(16), words & np.uint32(0xFFFF)]).astype(
            jnp.float32
        )

    rows = np.concatenate(audit.two_worlds(halves, 50, seed=0, chunk=20))
    assert len(np.unique(rows, axis=0)) == 100
    # Nor noise, which another call with the seed has again.
    _, worlds = algorithms.tiny_worlds(full_batch(1.0))
    last = lambda released: ravel_pytree(released["params"])[0]  # noqa: E731
    run = audit.training_run(full_batch(1.0), worlds, 1, score=last)
    (inside, outside), (again, _) = (
        audit.two_worlds(run, 300, seed=0, chunk=100) for _ in range(2)
    )
    assert inside.shape == (300, 23)
    assert len(np.unique(np.r_[inside, outside], axis=0)) == 600
    np.testing.assert_array_equal(inside, again)
