"""An Equinox model: its arrays are trained, its functions stay where they are."""

import equinox as eqx
import jax
import optax
from sklearn.datasets import load_digits

import jaxdp

digits = load_digits()
x, y = digits.data / 16, digits.target
train, (valid_x, valid_y) = (x[:1437], y[:1437]), (x[1437:], y[1437:])
model = eqx.nn.MLP(64, 10, width_size=32, depth=1, key=jax.random.key(0))
params, static = eqx.partition(model, eqx.is_inexact_array)


def loss_fn(params, x, y):
    model = eqx.combine(params, static)
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y)


mechanism = jaxdp.dp_sgd(
    epsilon=3, delta=1e-4, steps=60, batch_size=256, dataset_size=1437, l2_clip_norm=0.5
)
trainer = jaxdp.Trainer(loss_fn, mechanism, optax.adam(1e-2), train)
state = trainer.init(params)
for batch in trainer.batches():
    state, _ = trainer.step(state, batch)
model = eqx.combine(state.params, static)
right = jax.vmap(model)(valid_x).argmax(-1) == valid_y
print(f"accuracy {right.mean():.3f} at epsilon {trainer.epsilon().upper:.2f}")
