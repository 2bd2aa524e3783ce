"""Two worlds through the real links: nothing is shared between runs, and the bounds fit the truth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp import auditing
from jaxdp import optimizers as opt
from jaxdp.auditing import adversaries, audit
from jaxdp.auditing.adversaries import tiny_network
from jaxdp.optimizers import registry


def full_batch(noise):
    return opt.sgd(jaxdp.dp_sgd(noise, 1.0, 4, 4, "full_batch"), 0.1)


def sampled(noise):
    return opt.sgd(jaxdp.dp_sgd(noise, 1.0, 1, 4), 0.1)


def test_audits_of_full_batches_and_of_sampled_iterates_are_tight_and_below_the_truth():
    found = audit.audit_algorithm(full_batch(2.0), 4, 1e-5, runs=2500, seed=0)
    assert 0.75 * found.proven < found.profile.epsilon < found.proven
    assert found.audited.epsilon < found.proven
    assert not found.broken
    assert "Nothing contradicts" in found.in_words()
    # Sampled, with released iterates.
    algorithm, steps = sampled(0.8), 4
    canary, worlds = audit.tiny_worlds(algorithm)
    score = adversaries.iterate_score(algorithm, canary, worlds.params, 0.1)
    run = auditing.training_run(algorithm, worlds, steps, release="iterates", score=score)

    def family(z):
        return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), 0.25), steps)

    found = auditing.events.family_bound(*auditing.two_worlds(run, 2500, seed=1), family, 0.8, 1e-5)
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


def test_the_worst_record_is_found_and_random_canaries_have_one_coordinate():
    """Of a record that moves the loss and one that is nothing, the former."""
    algorithm = full_batch(0.5)
    loss_fn, params, records = tiny_network()
    last = {"x": jnp.array([[0.0, 3, -3, 3]]), "y": jnp.array([1])}
    empty = {"x": jnp.zeros((1, 4)), "y": jnp.array([0])}
    of = lambda row: jax.tree.map(lambda a, b: jnp.concatenate([a, b]), records, row)  # noqa: E731
    worlds = [auditing.Worlds(loss_fn, params, of(row)) for row in (empty, last)]
    best, apart = adversaries.worst_record(algorithm, worlds, 2, count=200)
    assert best == 1
    assert apart[1] > apart[0]
    _, params, _ = tiny_network()
    for seed in range(5):
        canary = adversaries.random_dirac(params, seed)
        values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(canary.direction)])
        assert np.sum(values != 0) == 1
        assert np.sum(values) == 1


def test_sampling_that_changes_who_else_is_drawn_is_refused():
    for name in ("fixed_size", "shuffle", "truncated_poisson"):
        algorithm = opt.sgd(jaxdp.dp_sgd(1.0, 1.0, 2, 4, name), 0.1)
        with pytest.raises(ValueError, match="algorithm must sample by Poisson"):
            auditing.training_run(algorithm, audit.tiny_worlds(algorithm)[1], 1)


@pytest.mark.parametrize("k", [1, 2])
def test_worlds_allocate_every_record_k_steps_of_an_epoch(k):
    rule = jaxdp.sampling.RandomAllocation(4, k)
    algorithm = opt.sgd(jaxdp.dp_sgd(1.0, 1.0, k, 4, rule), 0.1)
    _, worlds = audit.tiny_worlds(algorithm)
    score = lambda shown: shown["mask"].ravel()  # noqa: E731
    run = auditing.training_run(algorithm, worlds, 8, release="trusted", score=score)
    _, found = auditing.two_worlds(run, 400, seed=0)  # the last record is in none of them
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

    rows = np.concatenate(auditing.two_worlds(halves, 50, seed=0, chunk=20))
    assert len(np.unique(rows, axis=0)) == 100
    # Nor noise, which another call with the seed has again.
    _, worlds = audit.tiny_worlds(full_batch(1.0))
    run = auditing.training_run(full_batch(1.0), worlds, 1, release="last")
    (inside, outside), (again, _) = (
        auditing.two_worlds(run, 300, seed=0, chunk=100) for _ in range(2)
    )
    assert inside.shape == (300, 23)
    assert len(np.unique(np.r_[inside, outside], axis=0)) == 600
    np.testing.assert_array_equal(inside, again)
