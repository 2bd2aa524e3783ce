"""A table of 300,000 rows: noise in the rows that a private choice names (DP-AdaFEST), and in all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp

RECORDS, ROWS, WIDTH, STEPS, rng = 100_000, 300_000, 16, 60, np.random.default_rng(0)
taste = rng.normal(size=ROWS)


def records(count):  # four items each, few of them popular (Zipf); liked by a hidden taste
    items = np.minimum(rng.zipf(1.3, (count, 4)), ROWS).astype(np.int32) - 1
    liked = rng.random(count) < 1 / (1 + np.exp(-2 * taste[items].sum(1)))
    return items, liked.astype(np.float32)


def score(params, items):
    return params["items"][items].sum(-2) @ params["weights"]


def loss_fn(params, items, liked):
    return optax.sigmoid_binary_cross_entropy(score(params, items), liked)


def auc(params, items, liked):  # how often a liked record is above another one
    order = np.argsort(np.argsort(score(params, items)))
    return (order[liked > 0].mean() - order[liked == 0].mean()) / len(items) + 0.5


train, valid = records(RECORDS), records(10_000)
start = {"items": jnp.zeros((ROWS, WIDTH)), "weights": 0.5 * jax.random.normal(jax.random.key(0), WIDTH)}
mechanism = jaxdp.dp_sgd(
    epsilon=3, delta=1e-6, steps=STEPS, l2_clip_norm=0.5, batch_size=2_000, dataset_size=RECORDS
)
sparse = jaxdp.optimizers.dp_adafest(
    mechanism,
    optax.adagrad(0.3),
    table="items",
    rows=lambda items, liked: items,
    threshold=25,  # of the noisy number of records of a step that have the item, over √4
    cap=1_024,
)
for name, program in (("all", (mechanism, optax.adagrad(0.3))), ("chosen", (sparse, None))):
    trainer = jaxdp.Trainer(loss_fn, *program, source=train, physical_batch_size=2_400)
    state = trainer.init(start)
    for batch in trainer.batches(STEPS):
        state, _ = trainer.step(state, batch)
    moved = int((np.asarray(state.params["items"]) != 0).any(1).sum())
    print(
        f"noise in {name} rows: {moved:,} were updated, AUC {auc(state.params, *valid):.3f} "
        f"at epsilon {trainer.epsilon(1e-6).upper:.2f}"
    )
