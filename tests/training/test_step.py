"""The private step: what is refused spends nothing, and what fails later is released once at most."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.clipping import engine
from jaxdp.training.step import PrivateStep
from tests.ledger.small import trained
from tests.refusing import refused

DATA = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
MECH = jaxdp.dp_sgd(1.0, 1.0, 20, 60)
PARAMS = jnp.zeros(3)


class Broken(Exception):
    """What a part of a step raises while ``BREAKS`` names it."""


BREAKS = set()


def breaking(name):
    if name in BREAKS:
        raise Broken(name)


def loss_fn(w, example):
    breaking("loss")
    return jnp.vdot(w, example)


def update(updates, state, params=None, **extra):
    breaking("optimizer")
    if "late" in extra:
        jax.debug.callback(breaking, "late")
    return jax.tree.map(lambda leaf: -0.1 * leaf, updates), state


OPTIMIZER = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def trainer(rows=None, **options):
    given = {"secret": jaxdp.Secret.from_seed(3), "physical_batch_size": rows, **options}
    fresh = lambda w, example: loss_fn(w, example)  # noqa: E731, compiled for this trainer
    return jaxdp.Trainer(fresh, MECH, OPTIMIZER, DATA, **given)


def second_batch(monkeypatch):
    """The second physical batch of the draw fails."""
    whole, count = engine.add_physical_batch, []

    def failing(*args):
        count.append(1)
        if len(count) == 2:
            raise Broken("second batch")
        return whole(*args)

    monkeypatch.setattr(engine, "add_physical_batch", failing)


TRACED = [("loss", None), ("loss", 8), ("optimizer", None), ("optimizer", 8), ("second batch", 8)]


@pytest.mark.parametrize(("name", "rows"), TRACED, ids=[f"{n}, {r}" for n, r in TRACED])
def test_a_step_that_is_refused_halfway_spends_nothing_and_can_be_taken_again(
    name, rows, monkeypatch
):
    """It then releases what it would have released at first, and once."""
    expected = trainer(rows)
    wanted = expected.step(expected.init(PARAMS), next(expected.batches(1)))[0].params
    one = trainer(rows)
    state, batch = one.init(PARAMS), next(one.batches(1))
    with monkeypatch.context() as patch:
        if name == "second batch":
            second_batch(patch)
        BREAKS.add(name)
        try:
            refused(name, one.step, state, batch, error=Broken)
        finally:
            BREAKS.clear()
    assert not batch.draw.ticket.spent
    assert not state.params.is_deleted()
    moved, _ = one.step(state, batch)
    np.testing.assert_array_equal(moved.params, wanted)
    refused("that a step used before", one.step, moved, batch)
    assert one.ledger.steps == 1


def test_what_another_draw_summed_is_no_sum_of_the_step():
    """A gradient of one's own that returns the sum of a draw that it has kept."""
    grad_fn, sampler = MECH.clipped_grad(loss_fn), MECH.sampler(60)
    kept = grad_fn(PARAMS, jnp.asarray(DATA), sampler.draw())

    @dataclasses.dataclass(frozen=True)
    class Elsewhere:
        def trained(self, params):
            return params

        def sum_draw(self, *args, **options):
            return kept, []

    algorithm = jaxdp.Algorithm(MECH, OPTIMIZER, gradient=lambda loss_fn: Elsewhere())
    one = jaxdp.Trainer(loss_fn, algorithm, source=DATA)
    state, batch = one.init(PARAMS), next(one.batches(1))
    refused("gradient must return the sum of the draw", one.step, state, batch)
    assert not kept.ticket.spent
    assert not batch.draw.ticket.spent


def test_an_update_reuses_memory_unless_it_is_told_not_to_and_names_the_remedy():
    tx, sampler = optax.chain(MECH.privatize(), optax.sgd(0.1, momentum=0.9)), MECH.sampler(60)
    grad_fn, data = MECH.clipped_grad(loss_fn), jnp.asarray(DATA)
    params = jnp.zeros(3)
    opt_state, reusing = tx.init(params), jaxdp.compile_update(tx)
    keeping = jaxdp.compile_update(tx, donate=False)
    keeping(params, opt_state, grad_fn(params, data, sampler.draw()))
    assert not params.is_deleted()
    draw = sampler.draw()
    summed = grad_fn(params, data, draw)
    # Of one array that is also the sum XLA could not reuse the memory.
    own = jaxdp.Summed(params, 1.0)
    shared = r"not share an array.*compile_update\(tx, donate=False\)"
    key = MECH.simulated_key(jax.random.key(0))
    refused(shared, lambda: reusing(params, opt_state, own, key=key))
    moved, state, _ = reusing(params, opt_state, summed)
    assert params.is_deleted()
    summed = grad_fn(moved, data, sampler.draw())
    remedy = r"copy them first, .* or take jaxdp.compile_update\(tx, donate=False\)"
    refused(remedy, reusing, params, state, summed)
    assert not summed.ticket.spent
    reusing(moved, state, summed)
    assert sampler.ledger.unverified() == []


def test_several_physical_batches_are_the_step_of_one():
    """Of one ticket: the same noise, and the same sum to rounding."""
    moved = []
    for rows in (None, 8):
        moved.append(trained(trainer(rows), 3, params=jnp.ones(3)).params)
    np.testing.assert_allclose(*moved, rtol=1e-5)
    step = PrivateStep.of(jaxdp.Algorithm(MECH, OPTIMIZER), loss_fn)
    assert step.context is None
