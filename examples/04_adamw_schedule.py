"""AdamW with warm-up, cosine decay and weight decay: what follows the noise is free."""

import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import jaxdp

digits = load_digits()
x, y = digits.data / 16, digits.target
train, (valid_x, valid_y) = (x[:1437], y[:1437]), (x[1437:], y[1437:])
params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"], y)


STEPS = 60
mechanism = jaxdp.dp_sgd(
    epsilon=3, delta=1e-4, steps=STEPS, batch_size=256, dataset_size=1437, l2_clip_norm=1.0
)
rate = optax.warmup_cosine_decay_schedule(0.0, 0.03, warmup_steps=6, decay_steps=STEPS)
decayed = {"w": True, "b": False}
optimizer = optax.adamw(rate, weight_decay=1e-2, mask=decayed)
trainer = jaxdp.Trainer(loss_fn, mechanism, optimizer, train)
state = trainer.init(params)
for batch in trainer.batches():
    state, info = trainer.step(state, batch)
    if state.step % 20 == 0:
        print(f"{state.step}: rate {rate(state.step):.4f}, step of length {info.update_norm:.4f}")
right = (valid_x @ state.params["w"] + state.params["b"]).argmax(-1) == valid_y
print(f"accuracy {right.mean():.3f} at epsilon {trainer.epsilon().upper:.2f}")
