"""DP-SBCD's hidden-state loop under audit: the last iterate alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.auditing_hidden import ALGORITHMS, as_gaussian, first_weights, worlds
from jaxdp import accounting as acc
from jaxdp.auditing import audit_event, two_worlds
from jaxdp.papers import block_coordinate as bc
from jaxdp.papers.block_coordinate import hidden
from jaxdp.papers.block_coordinate.audit import hidden_run
from jaxdp.seeds import Secret

FIXED = "R3, two batches in a fixed order, weight decay"


def scores(name, count=1500, seed=1):
    algorithm = ALGORITHMS[name]
    run = hidden_run(
        algorithm, *worlds(algorithm), partition="fixed" not in name, score=first_weights
    )
    return two_worlds(run, count, seed=seed)


def test_a_right_loop_stays_below_what_is_proven_and_above_what_is_published():
    inside, outside = scores(FIXED)
    algorithm = ALGORITHMS[FIXED]
    verdict = audit_event(inside, outside, algorithm.event(), relation=acc.Relation.REPLACE_ONE)
    assert not verdict.refuted
    row = as_gaussian(inside, outside, algorithm.chain(0))
    assert row["published_s"] < row["audited_s"] < row["proven_s"]


def test_half_the_noise_is_caught(monkeypatch):
    added = hidden.noised
    monkeypatch.setattr(hidden, "noised", lambda tree, std, words: added(tree, std / 2, words))
    hidden._inner_loop.clear_cache()
    try:
        inside, outside = scores(FIXED)
    finally:
        hidden._inner_loop.clear_cache()
    event = ALGORITHMS[FIXED].event()
    assert audit_event(inside, outside, event, relation=acc.Relation.REPLACE_ONE).refuted


def test_a_run_is_that_of_training():
    """With the same start and next to no noise, the audited loop ends where training ends."""
    quiet = bc.HiddenBlocks(bc.Network((2, 1), 1.0), 1e-5, 1.0, 1.0, 4, 4, 5, direct=True)
    data, other = worlds(quiet)
    mine = hidden_run(quiet, data, other)(jax.random.key_data(jax.random.key(0)), jnp.asarray(True))
    (trained,) = bc.train_hidden(quiet, data, secret=Secret.from_seed(1))
    np.testing.assert_allclose(mine, np.ravel(trained), atol=1e-4)
    gone = hidden_run(quiet, data, other)(
        jax.random.key_data(jax.random.key(0)), jnp.asarray(False)
    )
    assert float(mine[0]) > 1
    assert float(gone[0]) == pytest.approx(-float(mine[0]), abs=1e-4)


def test_bad_input():
    algorithm = ALGORITHMS[FIXED]
    data, other = worlds(algorithm)
    with pytest.raises(ValueError, match="data must hold the declared 4 records"):
        hidden_run(algorithm, (data[0][:3], data[1][:3]), other)
    averaged = ALGORITHMS["R3, two batches in a secret order, averaged"]
    with pytest.raises(ValueError, match="partition must be True"):
        hidden_run(averaged, data, other, partition=False)
