"""DPO on pairs: a language model learns what people prefer; a record is one choice of two texts."""

import jax
import jax.numpy as jnp
import optax

import jaxdp

first, second = jax.random.normal(jax.random.key(0), (2, 50, 16))
reference = {"in": first, "out": second.T / 4}  # yours: a public model, here of 50 words
liking = jax.random.normal(jax.random.key(1), (50,))  # for each word, of those who choose
texts = [jnp.zeros((22_000, 2), int)]
for key in jax.random.split(jax.random.key(2), 12):  # the reference writes them, two by two
    texts.append(jax.random.categorical(key, reference["in"][texts[-1]] @ reference["out"]))
a, b = jnp.stack(texts).T
better = jax.nn.sigmoid((liking[a] - liking[b]).sum(1, keepdims=True))
better = jax.random.bernoulli(jax.random.key(3), better)
pairs = [jnp.where(better, a, b), jnp.where(better, b, a)]  # people are not always of one mind
train, public = zip(*[jnp.split(texts, [20_000]) for texts in pairs], strict=True)


def log_prob(params, text):
    log_probs = jax.nn.log_softmax(params["in"][text[:-1]] @ params["out"])
    return jnp.take_along_axis(log_probs, text[1:, None], axis=1).sum()


def loss_fn(params, chosen, rejected):  # of one pair
    gains = [log_prob(params, text) - log_prob(reference, text) for text in (chosen, rejected)]
    return jax.nn.softplus(0.1 * (gains[1] - gains[0]))


budget = {"epsilon": 3, "delta": 1e-5, "steps": 100, "l2_clip_norm": 0.3}  # few steps, a high rate
for privacy in ({"noise_multiplier": 0, "l2_clip_norm": 1e6}, budget):  # without privacy, and with
    mechanism = jaxdp.dp_sgd(batch_size=1024, dataset_size=20_000, **privacy)
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.adam(0.03), train)
    state = trainer.init(reference)
    for batch in trainer.batches(100):
        state, _ = trainer.step(state, batch)
    right = jax.vmap(loss_fn, (None, 0, 0))(state.params, *public) < jnp.log(2)
    print(f"accuracy {right.mean():.3f} at epsilon {trainer.epsilon(1e-5).upper:.2f}")
