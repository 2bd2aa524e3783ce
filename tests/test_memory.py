import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import _memory as memory
from jaxdp.clipping import augmented

N, WIDTH = 400, 256
MECH = jaxdp.dp_sgd(1.0, 1.0, 64, N)
PARAMS = {"w": np.zeros((8, WIDTH), np.float32), "v": np.zeros((WIDTH, 8), np.float32)}


def loss_fn(params, x):
    for _ in range(4):
        x = jnp.tanh(x @ params["w"]) @ params["v"]
    return jnp.sum(x)


def trainer(rows="auto", loss_fn=loss_fn, **options):
    data = np.ones((N, 8), np.float32)
    return jaxdp.Trainer(loss_fn, MECH, optax.sgd(0.1), data, physical_batch_size=rows, **options)


def cost(grad_fn, rows):
    example = jax.ShapeDtypeStruct((8,), jnp.float32)
    return memory.bytes_of_pass(grad_fn, PARAMS, example, rows, N, {})


def limited(monkeypatch, limit):
    monkeypatch.setattr(memory, "budget", lambda: limit)


def test_a_whole_draw_is_one_pass_where_memory_allows():
    train = trainer()
    with pytest.raises(ValueError, match=r'got "auto": call trainer.init\(params\)'):
        train.batches(2)
    state = train.init(PARAMS)
    assert train.physical_batch_size == 64 + 6 * 8 + 6 + 2
    for batch in train.batches(2):
        assert batch.draw.indices.shape == (1, 120)
        state, _ = train.step(state, batch)


def test_less_memory_gives_fewer_rows_the_same_draws_and_the_same_sums(monkeypatch):
    found = {}
    for limit in (10**9, cost(MECH.clipped_grad(loss_fn), 20)):
        limited(monkeypatch, limit)
        train = trainer(secret=jaxdp.Secret.from_seed(1))
        state = train.init(PARAMS)
        for batch in train.batches(2):
            state, _ = train.step(state, batch)
        found[train.physical_batch_size] = state.params
    assert list(found) == [120, 16]
    for one, two in zip(*map(jax.tree.leaves, found.values()), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_where_not_one_row_fits_it_is_said_before_anything_is_charged(monkeypatch):
    limited(monkeypatch, 1_000)
    train = trainer()
    with pytest.raises(ValueError, match=r"a step of one row needs \S+ GB where the device has"):
        train.init(PARAMS)
    assert train.ledger.steps == 0


def test_a_sampler_alone_knows_no_model_and_other_words_are_refused():
    with pytest.raises(ValueError, match="must be a number for a sampler, which knows no model"):
        MECH.sampler(N, physical_batch_size="auto")
    with pytest.raises(ValueError, match="physical_batch_size must be a whole number"):
        trainer("all")


def test_memory_of_views_counts_and_rows_bound_it():
    """K views of a record cost like K records: fewer rows at a time bound them."""
    many = augmented(loss_fn, lambda x, key: x + jax.random.normal(key, x.shape), 16)
    plain, viewed = MECH.clipped_grad(loss_fn), MECH.clipped_grad(many)
    assert cost(viewed, 64) > 3 * cost(plain, 64)
    fixed = cost(viewed, 1)
    assert cost(viewed, 4) - fixed < (cost(viewed, 64) - fixed) / 8
    apart = dataclasses.replace(viewed, microbatch_size=4)
    assert cost(apart, 64) < cost(viewed, 64) / 4


def test_the_most_that_fits_is_a_power_of_two_or_a_whole_draw():
    for limit, most in ((99, 8), (100, 8), (130, 32), (10**6, 100)):
        asked = []
        assert (
            memory.most_rows(lambda rows, asked=asked: asked.append(rows) or 90 + rows, 100, limit)
            == most
        )
        assert len(asked) <= 3, limit


def test_a_cost_that_is_not_linear_is_asked_for_until_it_fits():
    assert memory.most_rows(lambda rows: 10 + (rows >= 8) * 100 + rows // 50, 100, 60) == 4


def test_a_run_goes_on_with_the_rows_it_began_with(tmp_path, monkeypatch):
    pytest.importorskip("orbax.checkpoint")

    def run():
        return jaxdp.Run(
            tmp_path / "run",
            loss_fn,
            MECH,
            optax.sgd(0.1),
            np.ones((N, 8), np.float32),
            params=PARAMS,
            every=1,
            progress=lambda *_: None,
            physical_batch_size="auto",
        )

    limited(monkeypatch, cost(MECH.clipped_grad(loss_fn), 20))
    first = run()
    first.fit(1)
    assert first.directory.load_state().physical_batch_size == 16
    limited(monkeypatch, 10**9)
    run().fit(2)
    assert first.directory.load_state().physical_batch_size == 16
