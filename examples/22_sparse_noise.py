"""A table of 300,000 items: noise in all rows, and in those that noisy counts choose."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp

RECORDS, ROWS, STEPS, rng = 100_000, 300_000, 60, np.random.default_rng(0)
taste = rng.normal(size=ROWS)


def records(count):  # four items each, few of them popular (Zipf); liked by a hidden taste
    items = np.minimum(rng.zipf(1.3, (count, 4)), ROWS).astype(np.int32) - 1
    return items, np.float32(rng.logistic(size=count) < 2 * taste[items].sum(1))


def loss_fn(params, items, liked):
    score = params["items"][items].sum(0) @ params["weights"]
    return optax.sigmoid_binary_cross_entropy(score, liked)


train, (items, liked) = records(RECORDS), records(10_000)
start = {"items": jnp.zeros((ROWS, 16)), "weights": jax.random.normal(jax.random.key(0), (16,)) / 2}
budget = {"epsilon": 3, "delta": 1e-6, "steps": STEPS, "l2_clip_norm": 0.5}
dense = jaxdp.dp_sgd(**budget, batch_size=2_000, dataset_size=RECORDS)
# A row is updated where the noisy number of records that have it, each of them ½, is 7 or more.
chosen = {"table": "items", "rows": lambda items, liked: items, "threshold": 7, "cap": 1_024}
chosen["count_noise_multiplier"] = 2 * dense.noise_multiplier
adagrad = optax.adagrad(1.0)  # it leaves a row without an update as it is
for program in ((dense, adagrad), (jaxdp.optimizers.dp_adafest(dense, adagrad, **chosen), None)):
    trainer = jaxdp.Trainer(loss_fn, *program, source=train, physical_batch_size=2_400)
    state = trainer.init(start)
    for batch in trainer.batches(STEPS):
        state, _ = trainer.step(state, batch)
    moved = int(np.any(np.asarray(state.params["items"]) != 0, axis=1).sum())
    order = np.argsort(np.argsort(state.params["items"][items].sum(1) @ state.params["weights"]))
    auc = (order[liked > 0].mean() - order[liked == 0].mean()) / len(items) + 0.5
    print(f"{moved:,} rows moved, AUC {auc:.3f} at epsilon {trainer.epsilon(1e-6).upper:.2f}")
