"""Fine-tuning: the last layer only, and LoRA. What is frozen is public and gets no noise."""

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import jaxdp

digits = load_digits()
train = (digits.data / 16, digits.target)
first, second = jax.random.normal(jax.random.key(0), (2, 64, 128)) / 10
base = {"hidden": first, "last": jnp.zeros((128, 10))}  # yours: pretrained on public data
lora = {"a": second[:, :4], "b": jnp.zeros((4, 128))}


def loss_fn(params, x, y):
    hidden = x @ params["hidden"]
    if "a" in params:  # not x @ (hidden + a @ b): a gradient of that size for every example
        hidden += x @ params["a"] @ params["b"]
    logits = jax.nn.relu(hidden) @ params["last"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def lora_loss(params, x, y):
    return loss_fn(params["base"] | params["lora"], x, y)


mechanism = jaxdp.dp_sgd(
    epsilon=3, delta=1e-4, steps=40, batch_size=256, dataset_size=1797, l2_clip_norm=1.0
)
for loss, params, trainable in (
    (loss_fn, base, lambda path: "last" in path),  # a function of the path
    (lora_loss, {"base": base, "lora": lora}, {"base": False, "lora": True}),  # or a prefix
):
    trainer = jaxdp.Trainer(loss, mechanism, optax.adam(1e-2), train, trainable=trainable)
    state = trainer.init(params)
    for batch in trainer.batches():
        state, _ = trainer.step(state, batch)
    print(f"epsilon {trainer.epsilon().upper:.2f};", "; ".join(trainer.unverified()))
