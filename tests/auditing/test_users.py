"""Two worlds that differ in one user: her records make one gradient, which is clipped once."""

import jax.numpy as jnp

import jaxdp
from jaxdp import accounting as acc
from jaxdp import auditing, clipping
from jaxdp import optimizers as opt
from jaxdp.auditing import Worlds, audit_scores, training_run, two_worlds
from jaxdp.sources.users import User

K, STEPS, RUNS, DELTA = 3, 4, 4_000, 1e-5


def loss_of_a_record(w, record):
    return record @ w


def worlds(loss_fn):
    """Four users; the last one's three records all pull one way, far beyond the clipping norm."""
    records = jnp.zeros((4, K, 2)).at[-1, :, 0].set(100.0)
    present = jnp.ones((4, K), bool).at[0, 1:].set(False)
    return Worlds(loss_fn, jnp.zeros(2), User(records, present))


def scores(noise):
    """Sums along her gradient, of all steps, in both worlds."""
    mechanism = jaxdp.dp_sgd(noise, 1.0, 4, 4, "full_batch", records_per_user=K)
    algorithm = opt.sgd(mechanism, 0.1)
    run = training_run(
        algorithm,
        worlds(clipping.user_loss(loss_of_a_record)),
        STEPS,
        score=lambda released: jnp.sum(released["noisy"][:, 0])[None],
    )
    return algorithm, *two_worlds(run, RUNS, seed=4)


def test_a_user_as_the_unit_is_audited_close_to_what_is_proven():
    algorithm, inside, outside = scores(2.0)
    event = algorithm.total(STEPS)
    proven = acc.epsilon(event, DELTA).upper
    found = audit_scores(inside, outside, DELTA, kind="gaussian").epsilon
    assert 0.85 * proven < found <= proven
    assert 0.4 * proven < auditing.audit_ranks(inside, outside, DELTA).epsilon <= proven
    assert not auditing.audit_event(inside, outside, event).refuted


def test_a_user_whose_records_are_clipped_one_by_one_is_found():
    """Three clipped records against the noise for one: what one has with a third of the noise."""
    charged = jaxdp.dp_sgd(2.0, 1.0, 4, 4, "full_batch", records_per_user=K).total(STEPS)
    _, inside, outside = scores(2.0 / K)
    assert auditing.audit_event(inside, outside, charged).refuted
    assert auditing.audit_ranks(inside, outside, DELTA).epsilon > acc.epsilon(charged, DELTA).upper
