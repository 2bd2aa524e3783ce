"""The adversarial search: no record adds more than the bound, by any engine or rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.clipping.ghost.parts import Part
from tests.clipping import search
from tests.clipping.judged import judged

PROGRAMS = search.programs()
CLIP, NORMALIZE = jaxdp.clip(1e-3), jaxdp.normalize(1e-3)
ROWS = 24


@functools.cache
def compiled(name, rule, engine="ghost"):
    """What a batch of ``ROWS`` records adds; compiled once for all tests."""
    loss_fn, params, _ = PROGRAMS[name]
    run = search.compiled(loss_fn, rule, engine)
    return lambda batch, bound=None: search.added(run, params, batch, bound=bound)


# What "ghost" adds of every program; gradients that are held multiplied out, of a few.
BY_AUTO = ("siamese-784", "over-time", "over-layers", "joined", "low-rank", "tied", "kernel")
BY_VMAP = ("siamese-784", "long-4096", "wide", "tied", "kernel")


def engines(name):
    """Those that differ in their plan."""
    loss_fn, params, make = PROGRAMS[name]
    batch, found = search.records(make, ROWS, seed=1), {}
    for engine, names in (("ghost", PROGRAMS), ("auto", BY_AUTO), ("vmap", BY_VMAP)):
        if name in names:
            plan = jaxdp.clipped_grad(loss_fn, CLIP, engine).plan(params, batch)
            found.setdefault(tuple(row.engine for row in plan), engine)
    return found.values()


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_constructed_record_adds_more_than_the_bound(name):
    batch = search.records(PROGRAMS[name][2], ROWS, seed=1)
    for engine in engines(name):
        assert 0.0 < np.max(compiled(name, CLIP, engine)(batch)) <= 1e-3, engine


@pytest.mark.parametrize("name", ["siamese-784", "tied", "lookups", "positions-40"])
def test_rules_without_a_threshold_keep_it_too(name):
    batch = search.records(PROGRAMS[name][2], ROWS, seed=2)
    for rule in (NORMALIZE, jaxdp.auto_s(1e-3)) if name == "tied" else (NORMALIZE,):
        assert np.max(compiled(name, rule)(batch)) <= 1e-3, rule


@pytest.mark.parametrize("name", ["siamese-784", "positions-40", "tied", "attention"])
def test_records_found_by_ascent_keep_the_bound(name):
    loss_fn, params, make = PROGRAMS[name]
    climb = search.ascent(loss_fn, params)
    for seed in range(2):
        start = jax.tree.map(lambda x: x[0], search.records(make, 1, seed))
        batch = climb(start, ROWS)
        for rule in (CLIP, NORMALIZE):
            assert np.max(compiled(name, rule)(batch)) <= 1e-3, (seed, rule)


@pytest.mark.parametrize("name", ["siamese-784", "positions-40", "tied-lookups"])
def test_the_ghost_engine_without_its_allowance_is_found_out(name, monkeypatch):
    # The search itself: with the rounding bound taken away it must find a record over the bound.
    monkeypatch.setattr("jaxdp.clipping.rounding.gamma", lambda operations: 0.0)
    monkeypatch.setattr("jaxdp.clipping.rounding.CANCELLED", 1e30)
    adds = compiled.__wrapped__(name, NORMALIZE)
    batches = [search.records(PROGRAMS[name][2], ROWS, seed) for seed in range(4)]
    assert max(np.max(adds(batch)) for batch in batches) > 1.05e-3


def test_scaled_gradients_that_cancel_keep_the_bound():
    loss_fn, params, make = PROGRAMS["positions-40"]
    batch = search.records(make, ROWS, seed=3)
    key = jax.random.key(0)
    scale = jax.tree.map(lambda p: 10.0 ** jax.random.uniform(key, p.shape, minval=-3), params)
    run, _ = search.compiled(loss_fn, CLIP, "ghost")
    _, log, _ = run(params, batch, scale)
    ((parts, weights),) = log
    rows = np.asarray(parts["rows"], np.float64).reshape(ROWS, -1)
    rows = rows * np.asarray(weights, np.float64)[:, None] / np.asarray(scale["w"]).reshape(-1)
    assert 0.0 < np.max(np.linalg.norm(rows, axis=1)) <= 1e-3


def test_a_bound_of_this_step_is_kept():
    batch = search.records(PROGRAMS["siamese-784"][2], ROWS, seed=4)
    found = compiled("siamese-784", jaxdp.clip(1.0))(batch, jnp.float32(3e-5))
    assert np.max(found) <= 3e-5


# Passes that cancel. -----------------------------------------------------------------------------


def over_layers_and_time(p, x):
    """Positions that cancel, of two loops in one another, both checkpointed."""

    def layer(total, w):
        step = lambda total, row: (total + jnp.sum(row[-1] * (row[:-1] @ w)), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(step), total, x)[0], None

    return jax.lax.scan(jax.checkpoint(layer), jnp.float32(0.0), p["w"])[0]


def in_and_after_a_loop(p, x):
    step = lambda total, row: (total + jnp.sum(row[-1] * (row[:-1] @ p["w"])), None)  # noqa: E731
    total = jax.lax.scan(step, jnp.float32(0.0), x[:5])[0]
    return total + jnp.sum(x[5:, -1:] * (x[5:, :-1] @ p["w"]))


def gates_in_bfloat16(p, x):
    both = jnp.concatenate([p["w"], p["v"], p["w"]], axis=1).astype(jnp.bfloat16)

    def step(total, row):
        gates = row[:-1].astype(jnp.bfloat16) @ both
        return total + jnp.sum(row[-1] * gates.astype(jnp.float32)), None

    return jax.lax.scan(step, jnp.float32(0.0), x, reverse=True)[0]


WEIGHTS = {"w": search._dense(20, 4)["w"], "v": search._dense(20, 3, 1)["w"]}
CANCELLING = {
    "layers and time": (over_layers_and_time, {"w": jnp.stack([WEIGHTS["w"]] * 2)}),
    "in and after": (in_and_after_a_loop, {"w": WEIGHTS["w"]}),
    "gates": (gates_in_bfloat16, WEIGHTS),
}


@pytest.mark.parametrize(
    ("name", "rows_at_once"), [*((name, True) for name in CANCELLING), ("gates", False)]
)
def test_no_record_whose_passes_cancel_adds_more_than_the_bound(name, rows_at_once, monkeypatch):
    if rows_at_once:  # a prime number of rows: one at a time
        monkeypatch.setattr("jaxdp.clipping.ghost.leaves._CHUNK_BYTES", 1)
    loss_fn, params = CANCELLING[name]
    batch = search.records(search._cancelling(9, 20), 13, seed=1)
    found = search.contributed(loss_fn, params, batch, NORMALIZE, "ghost")
    assert 0.0 < np.max(found) <= 1e-3


# Random programs, of which `python -m benchmarks.random_programs` judges thousands. --------------


@pytest.mark.parametrize("seed", [3043, 3766])
def test_random_programs_are_clipped_as_by_float64(seed):
    """Layers, repeats and a cell over time, joined gates, a tied table; partly in bfloat16."""
    text, wrong, counts = judged(seed)
    assert not wrong, text
    assert counts["ghost"] > 0


def test_a_wrong_share_of_joined_weights_is_noticed(monkeypatch):
    def first(part, whole):
        return jax.lax.slice_in_dim(whole, 0, part.size, axis=part.axis + 1)

    monkeypatch.setattr(Part, "_share", first)
    text, wrong, _ = judged(5001)
    assert "joined" in text
    assert any("the norm of record" in words for words in wrong)
