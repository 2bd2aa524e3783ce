"""Class imbalance, 5 % positives: weights and a threshold, no copies (docs/howto/persons.md)."""

import functools

import jax.numpy as jnp
import numpy as np
import optax

import jaxdp

N, rng, ledger = 20_000, np.random.default_rng(0), jaxdp.Ledger()


def records(n):
    y = rng.random(n) < 0.05
    return np.c_[rng.normal(size=(n, 10)) / 2 + 0.4 * y[:, None], np.ones(n)], y


def loss_fn(params, x, y, weight):  # the weight is public: not read off the records
    return jnp.where(y, weight, 1) * optax.sigmoid_binary_cross_entropy(x @ params, y)


train, (valid_x, valid_y) = records(N), records(4_000)
budget = {"epsilon": 3, "delta": 1e-5, "steps": 60, "models": 3}  # of the three together
for weight, clip in ((10, 1e6), (10, 0.1), (10, 10), (1, 1)):  # the first without privacy
    private = clip <= 10
    noise = budget if private else {"noise_multiplier": 0}
    mechanism = jaxdp.dp_sgd(**noise, l2_clip_norm=clip, batch_size=512, dataset_size=N)
    loss, optimizer = functools.partial(loss_fn, weight=weight), optax.sgd(0.3 / min(clip, 10), 0.9)
    options = {"ledger": ledger, "another": True} if private else {}
    trainer = jaxdp.Trainer(loss, mechanism, optimizer, train, **options)
    state = trainer.init(jnp.zeros(11))
    for batch in trainer.batches(60):
        state, _ = trainer.step(state, batch)
    scores = valid_x @ state.params  # that the top tenth are called positive is public, too
    half, top = ((scores > least)[valid_y].mean() for least in (0, np.quantile(scores, 0.9)))
    print(f"weight {weight}, clip norm {clip:g}: recall {half:.2f}, of the top tenth {top:.2f}")
print(f"epsilon {ledger.epsilon(1e-5).upper:.2f} together")
