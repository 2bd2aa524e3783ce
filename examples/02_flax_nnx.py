"""A Flax nnx model: split into a graph and parameters, merged inside the loss."""

import jax
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxdp

digits = load_digits()
x, y = digits.data / 16, digits.target
train, (valid_x, valid_y) = (x[:1437], y[:1437]), (x[1437:], y[1437:])


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


graph, params, rest = nnx.split(MLP(nnx.Rngs(0)), nnx.Param, ...)


def loss_fn(params, x, y):
    model = nnx.merge(graph, params, rest, copy=True)
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y)


mechanism = jaxdp.dp_sgd(
    epsilon=3, delta=1e-4, steps=60, batch_size=256, dataset_size=1437, l2_clip_norm=0.5
)
trainer = jaxdp.Trainer(loss_fn, mechanism, optax.adam(1e-2), train)
state = trainer.init(params)
for batch in trainer.batches():
    state, _ = trainer.step(state, batch)
right = jax.vmap(nnx.merge(graph, state.params, rest))(valid_x).argmax(-1) == valid_y
print(f"accuracy {right.mean():.3f} at epsilon {trainer.epsilon().upper:.2f}")
