"""Your own Flax CNN on NumPy arrays at epsilon 3, validated and checkpointed with orbax."""

import tempfile

import flax.linen as nn
import jax
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import jaxdp

digits, folder = load_digits(), tempfile.mkdtemp()
x, y = digits.images[..., None] / 16, digits.target
valid_x, valid_y = x[1437:], y[1437:]  # public


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.avg_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(*x.shape[:-3], -1))


def loss_fn(params, x, y):  # of one example, without a batch axis
    return optax.softmax_cross_entropy_with_integer_labels(CNN().apply(params, x), y)


mechanism = jaxdp.dp_sgd(
    epsilon=3, delta=1e-4, steps=60, batch_size=256, dataset_size=1437, l2_clip_norm=0.5
)
trainer = jaxdp.Trainer(loss_fn, mechanism, optax.adam(1e-2), (x[:1437], y[:1437]))
state = trainer.init(CNN().init(jax.random.key(0), x[0]))
with ocp.StandardCheckpointer() as checkpointer:
    for batch in trainer.batches():
        state, _ = trainer.step(state, batch)
        if state.step % 20 == 0:
            right = CNN().apply(state.params, valid_x).argmax(-1) == valid_y
            print(f"{state.step}: {right.mean():.3f}, epsilon {trainer.epsilon().upper:.2f}")
            checkpointer.save(f"{folder}/{state.step}", state)
