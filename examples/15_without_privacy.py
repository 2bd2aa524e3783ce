"""Training without privacy by the same program: one flag, and exactly what optax would do."""

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import jaxdp

digits = load_digits()
x, y = digits.data / 16, digits.target
train, (valid_x, valid_y) = (x[:1437], y[:1437]), (x[1437:], y[1437:])
params, optimizer = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}, optax.sgd(0.5, momentum=0.9)


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"], y)


def fit(private):
    budget = {"epsilon": 3, "delta": 1e-4, "steps": 60, "l2_clip_norm": 1.0}
    privacy = budget if private else {"noise_multiplier": 0, "l2_clip_norm": 1e6}  # clips nothing
    mechanism = jaxdp.dp_sgd(sampling="full_batch", batch_size=1437, dataset_size=1437, **privacy)
    trainer = jaxdp.Trainer(loss_fn, mechanism, optimizer, train)
    state = trainer.init(params)
    for batch in trainer.batches(60):
        state, _ = trainer.step(state, batch)
    right = (valid_x @ state.params["w"] + state.params["b"]).argmax(-1) == valid_y
    print(f"accuracy {right.mean():.3f} at epsilon {trainer.epsilon(1e-4).upper:.2f}")
    return state.params


plain, plain_state = params, optimizer.init(params)
for _ in range(60):  # optax alone
    grads = jax.grad(lambda params: jax.vmap(loss_fn, (None, 0, 0))(params, *train).mean())(plain)
    updates, plain_state = optimizer.update(grads, plain_state)
    plain = optax.apply_updates(plain, updates)
apart = jax.tree.map(lambda a, b: abs(a - b).max(), fit(private=False), plain)
print(f"parameters within {max(jax.tree.leaves(apart)):.0e} of optax's")
fit(private=True)
