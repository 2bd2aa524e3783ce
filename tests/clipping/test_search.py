"""The adversarial search: no record adds more than the bound, by any engine or rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from tests.clipping import search

PROGRAMS = search.programs()
RULES = {"auto_s": jaxdp.auto_s(1.0), "normalize": jaxdp.normalize(1.0)}


@pytest.mark.parametrize("engine", ["auto", "ghost", "vmap"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_constructed_record_adds_more_than_the_bound(name, engine):
    loss_fn, params, make = PROGRAMS[name]
    batch = search.records(make, 24, seed=1)
    found = search.contributed(loss_fn, params, batch, jaxdp.clip(1e-3), engine)
    assert np.max(found) <= 1e-3
    assert np.max(found) > 0.0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["siamese-784", "tied", "lookups", "positions-40"])
def test_rules_without_a_threshold_keep_it_too(name, rule):
    loss_fn, params, make = PROGRAMS[name]
    batch = search.records(make, 24, seed=2)
    assert np.max(search.contributed(loss_fn, params, batch, RULES[rule], "ghost")) <= 1.0


@pytest.mark.parametrize("name", ["siamese-784", "positions-40", "tied", "attention"])
def test_records_found_by_ascent_keep_the_bound(name):
    loss_fn, params, make = PROGRAMS[name]
    for seed in range(2):
        start = jax.tree.map(lambda x: x[0], search.records(make, 1, seed))
        batch = search.ascend(loss_fn, params, start)
        for rule in (jaxdp.clip(1e-3), jaxdp.normalize(1e-3)):
            assert np.max(search.contributed(loss_fn, params, batch, rule, "ghost")) <= 1e-3


@pytest.mark.parametrize("name", ["siamese-784", "positions-40", "tied-lookups"])
def test_the_ghost_engine_without_its_allowance_is_found_out(name, monkeypatch):
    # The search itself: with the rounding bound taken away it must find a record over the bound.
    monkeypatch.setattr("jaxdp.clipping.rounding.gamma", lambda operations: 0.0)
    monkeypatch.setattr("jaxdp.clipping.rounding.CANCELLED", 1e30)
    loss_fn, params, make = PROGRAMS[name]
    worst = 0.0
    for seed in range(4):
        batch = search.records(make, 24, seed)
        found = search.contributed(loss_fn, params, batch, jaxdp.normalize(1e-3), "ghost")
        worst = max(worst, np.max(found))
    assert worst > 1.05e-3


def test_scaled_gradients_that_cancel_keep_the_bound():
    loss_fn, params, make = PROGRAMS["positions-40"]
    batch = search.records(make, 24, seed=3)
    keys = jax.random.split(jax.random.key(0), 4)
    scale = jax.tree.map(lambda p: 10.0 ** jax.random.uniform(keys[0], p.shape, minval=-3), params)
    run, _ = search.compiled(loss_fn, jaxdp.clip(1e-3), "ghost")
    _, log, _ = run(params, batch, scale)
    ((parts, weights),) = log
    rows = np.asarray(parts["rows"], np.float64).reshape(24, -1)
    rows = rows * np.asarray(weights, np.float64)[:, None] / np.asarray(scale["w"]).reshape(-1)
    assert 0.0 < np.max(np.linalg.norm(rows, axis=1)) <= 1e-3


def test_a_bound_of_this_step_is_kept():
    loss_fn, params, make = PROGRAMS["siamese-784"]
    batch = search.records(make, 24, seed=4)
    bound = jnp.float32(3e-5)
    found = search.contributed(loss_fn, params, batch, jaxdp.clip(1.0), "ghost", bound=bound)
    assert np.max(found) <= 3e-5
