"""FedAvg: a client trains on her own records, and what changed is clipped, summed and noised."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp

CLIENTS, RECORDS, rng = 2_000, 12, np.random.default_rng(0)
centres = 0.7 * rng.normal(size=(10, 20))
y = (rng.integers(0, 10, (CLIENTS, 1)) + rng.integers(0, 2, (CLIENTS, RECORDS))) % 10
records = centres[y] + rng.normal(size=(*y.shape, 20)), y  # a client has two of ten classes
data, owners = [a.reshape(-1, *a.shape[2:]) for a in records], np.repeat(range(CLIENTS), RECORDS)
clients = jaxdp.sampling.users(tuple(data), owners, records_per_user=RECORDS)
valid_y = np.arange(1_000) % 10
valid_x = centres[valid_y] + rng.normal(size=(1_000, 20))  # public


def change(params, client):  # its gradient is what five steps of the client take off the parameters
    def loss_fn(params):
        x, y = client.records
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ params, y)
        return jnp.mean(losses, where=client.present)

    own = jax.lax.fori_loop(0, 5, lambda _, p: p - 0.2 * jax.grad(loss_fn)(p), params)
    return jnp.vdot(params, jax.lax.stop_gradient(params - own))


budget = {"epsilon": 3, "delta": 1e-5, "steps": 30, "l2_clip_norm": 0.3}  # below most changes
for noise in ({"noise_multiplier": 0, "l2_clip_norm": 1e6}, budget):  # without and with privacy
    mechanism = jaxdp.dp_sgd(**noise, batch_size=200, dataset_size=CLIENTS, records_per_user=12)
    sampler, grad_fn = mechanism.sampler(CLIENTS), mechanism.clipped_grad(change)
    tx = optax.chain(mechanism.privatize(), optax.sgd(1.0, momentum=0.9))  # of the server
    params, update = jnp.zeros((20, 10)), jaxdp.compile_update(tx)
    state = tx.init(params)
    for _ in range(30):
        params, state, _ = update(params, state, grad_fn(params, clients, sampler.draw()))
    right = (valid_x @ params).argmax(-1) == valid_y
    print(f"accuracy {right.mean():.3f} at epsilon {sampler.ledger.epsilon(1e-5).upper:.2f}")
