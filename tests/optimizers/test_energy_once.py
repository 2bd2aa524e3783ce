"""Attacks on the noise of energies and counts: each noise judges or counts once.

Above a test: what the attack did until it was mended.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.optimizers.annealing import annealing
from jaxdp.optimizers.energy import PrivateEnergy, energy_mechanism
from jaxdp.optimizers.quantile import quantile_clip

N = 60
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
P = {"w": jnp.zeros(4)}


def loss_fn(params, x):
    return jnp.vdot(params["w"], x)


def private():
    mech = energy_mechanism(1.0, 1.0, 20, N)
    return PrivateEnergy(loss_fn, jnp.asarray(X), mech, mech.sampler(N))


# The gradient was NaN, but the second bound told the un-noised difference of the counts.
def test_a_key_that_is_used_twice_gives_no_second_count():
    mech, tx = quantile_clip(1.0, 20, N)
    state, grad_fn = tx.init(P), mech.clipped_grad(loss_fn)
    key = mech.simulated_key(jax.random.key(0))
    for scale in (1, 5):
        summed, _ = grad_fn(P, scale * X[:8], "all", bound=state.bound)
        _, state = tx.update(summed, state, P, key=key)
    assert np.isnan(state.bound)


# An energy that was prepared outside the loop judged every candidate by one noise.
def test_an_energy_that_was_opened_once_judges_once():
    energy = private().prepare().spent()
    tx = annealing(optax.sgd(0.1), jax.random.key(1))
    one = jax.jit(
        lambda n, state, energy: tx.update({"w": n * jnp.ones(4)}, state, P, energy=energy)
    )
    state, seen = tx.init(P), []
    for n in range(1, 4):
        _, state = one(n, state, energy)
        seen.append(float(state.energy))
    assert len(set(seen)) == 1  # of the first
    assert int(state.accepted) <= 1


# Both were judged by one noise, on the host and inside jit; the difference told the sum's.
@pytest.mark.parametrize("compiled", [False, True])
def test_an_energy_judges_one_candidate_of_a_step(compiled):
    def both(energy, candidate):
        rises = [energy.rise({"w": n * candidate}, P, 0.0)[0] for n in (1, 2)]
        return rises[1] - rises[0]

    opened = private().prepare().spent()
    with pytest.raises(ValueError, match="energy must judge one candidate"):
        (jax.jit(both) if compiled else both)(opened, jnp.ones(4))


# The second update was judged by the noise of the first, where another came between.
def test_an_energy_that_was_opened_goes_into_one_compiled_update():
    energies, main = private(), jaxdp.dp_sgd(1.0, 1.0, 20, N)
    tx = optax.chain(main.privatize(), annealing(optax.sgd(0.1), jax.random.key(1)))
    update, state, sampler = jaxdp.compile_update(tx), tx.init(P), main.sampler(N)
    grad_fn = main.clipped_grad(loss_fn)
    one, other = energies.prepare().spent(), energies.prepare().spent()

    def judged(energy):
        update(P, state, grad_fn.sum(P, X, sampler.draw())[0], energy=energy)

    judged(one)
    judged(other)
    with pytest.raises(ValueError, match="energy must judge one candidate"):
        judged(one)
