import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.train import Trainer


def trainer(loss_fn, secret, noise=1.0, batch=20, n=60, rng=None):
    mech = jaxdp.dp_sgd(noise, 1.0, batch, n)
    tx = optax.chain(mech.privatize(secret.jax_key("noise")), optax.sgd(0.1, momentum=0.9))
    grad_fn = mech.clipped_grad(loss_fn)
    return Trainer(grad_fn, tx, mech.sampler(n, secret=secret, physical_batch_size=8), rng)


def steps(train, params, data, count):
    state, norms = train.init(params), []
    for _ in range(count):
        state, info, _ = train.step(state, data)
        norms.append(float(info.update_norm))
    return state, norms


def test_a_run_is_a_function_of_its_secret(linear):
    params, batch, loss_fn = linear
    runs = [
        steps(trainer(loss_fn, jaxdp.Secret.from_seed(s)), params, batch(60), 5)[0].params
        for s in (1, 1, 2)
    ]
    jax.tree.map(np.testing.assert_array_equal, runs[0], runs[1])
    assert not np.array_equal(runs[0]["w"], runs[2]["w"])


def test_a_step_is_the_sum_of_its_parts(linear):
    params, batch, loss_fn = linear
    secret, data = jaxdp.Secret.from_seed(4), batch(60)
    state, norms = steps(trainer(loss_fn, secret), params, data, 1)
    parts = trainer(loss_fn, secret)
    draw = parts.sampler.draw()
    rows = draw.indices[draw.mask]
    total = jax.tree.map(lambda p: np.zeros(p.shape), params)
    for row in rows:
        grad = jax.tree.map(lambda x, row=row: np.asarray(x[row]), data)
        norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(grad)))
        total = jax.tree.map(lambda t, g, n=norm: t + g * min(1, 1 / n), total, grad)
    summed = jaxdp.Summed(jax.tree.map(lambda t: jnp.asarray(t, jnp.float32), total), 1.0)
    update, _ = parts.tx.update(summed, parts.tx.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state.params, update)
    assert norms[0] == pytest.approx(float(optax.tree.norm(update)), rel=1e-3)


def test_an_empty_draw_is_a_step_with_full_noise(linear):
    params, batch, loss_fn = linear
    train = trainer(loss_fn, jaxdp.Secret.new())
    object.__setattr__(train.sampler, "sampling", jaxdp.Poisson(1e-12))
    state, norms = steps(train, params, batch(60), 3)
    assert state.step == 3
    assert min(norms) > 0.001


def test_nothing_recompiles(linear):
    params, batch, loss_fn = linear
    train = trainer(loss_fn, jaxdp.Secret.new())
    traced = []
    tx = optax.chain(
        train.tx, optax.stateless(lambda updates, _: traced.append(1) or updates)
    )
    train = Trainer(train.grad_fn, tx, train.sampler)
    steps(train, params, batch(60), 8)
    assert len(traced) == 1


def test_randomness_of_the_loss_differs_between_steps():
    def loss_fn(params, example, rng):
        return jnp.vdot(params["w"], jax.random.normal(rng, (3,))) + 0.0 * example

    secret = jaxdp.Secret.from_seed(1)
    train = trainer(loss_fn, secret, noise=0.0, rng=jax.random.key(0))
    _, norms = steps(train, {"w": jnp.zeros(3)}, jnp.zeros(60), 4)
    assert len(set(norms)) == 4


def test_the_users_parameters_survive_donation(linear):
    params, batch, loss_fn = linear
    steps(trainer(loss_fn, jaxdp.Secret.new()), params, batch(60), 2)
    assert not params["w"].any()


def test_noise_is_not_used_twice_from_an_old_state_or_a_second_start(linear):
    """The two releases would share their noise and differ by what is un-noised."""
    params, batch, loss_fn = linear
    train, data = trainer(loss_fn, jaxdp.Secret.new()), batch(60)
    old = train.init(params)
    kept = jax.tree.map(jnp.array, old)._replace(step=0)
    train.step(old, data)
    for stale in (kept, train.init(params)):
        with pytest.raises(ValueError, match="state must be that of step 1"):
            train.step(stale, data)
    assert train.sampler.step == 1  # refused before a draw
    train.seek(0)
    assert train.step(kept, data)[0].step == 1


def test_what_leaks_is_never_charged_as_private(linear):
    _, _, loss_fn = linear
    mech = jaxdp.dp_sgd(1.0, 1.0, 20, 60)
    method = jaxdp.optimizers.pigdo_as_published(mech, 0.1)
    ledger, tx = jaxdp.Ledger(), method.chain(jax.random.key(0))
    with pytest.raises(ValueError, match="which names its leak"):
        Trainer(method.clipped_grad(loss_fn), tx, mech.sampler(60, ledger=ledger))
    Trainer(method.clipped_grad(loss_fn), tx, method.mechanism.sampler(60, ledger=ledger))


def test_only_a_sum_passes(linear):
    params, _, _ = linear
    tx = jaxdp.privatize(1.0, 1.0, jax.random.key(0))
    with pytest.raises(TypeError, match="summed must be a Summed"):
        jaxdp.compile_update(tx)(params, tx.init(params), params)
