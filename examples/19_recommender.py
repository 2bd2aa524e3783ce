"""A recommender: one user is one record, whose gradient is a few rows of the table of items."""

import jax
import numpy as np
import optax

import jaxdp

USERS, ITEMS, WIDTH, rng = 20_000, 2_000, 8, np.random.default_rng(0)


def histories(users):  # eight items each, four of five out of one genre of twenty
    items = rng.integers(0, ITEMS, (users, 8))
    own = items // 20 * 20 + rng.integers(0, 20, (users, 1))
    return np.where(rng.random((users, 8)) < 0.8, own, items)


def loss_fn(table, history, rng):  # what she liked is nearer to the rest of it than any item
    liked = table[history]
    rest = (liked.sum(0) - liked) / 7
    others = table[jax.random.randint(rng, (8,), 0, ITEMS)]  # items are public: from all of them
    return -jax.nn.log_sigmoid((rest * (liked - others)).sum(-1)).mean()


train, valid = histories(USERS), histories(1_000)
others = rng.integers(0, ITEMS, 1_000)
start = 0.3 * jax.random.normal(jax.random.key(0), (ITEMS, WIDTH))
# All rows get noise, not only those that were drawn: which ones these are is private. So the table
# is narrow, and the batch large: each item needs some users in every step.
budget = {"epsilon": 3, "delta": 1e-5, "steps": 60, "l2_clip_norm": 0.1}
for noise in ({"noise_multiplier": 0, "l2_clip_norm": 1e6}, budget):  # without and with privacy
    mechanism = jaxdp.dp_sgd(**noise, batch_size=2_000, dataset_size=USERS)
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.adam(0.1), train)
    state = trainer.init(start)
    for batch in trainer.batches(60):
        state, _ = trainer.step(state, batch)
    query, table = state.params[valid[:, :7]].mean(1), state.params
    right = (query * (table[valid[:, 7]] - table[others])).sum(-1) > 0
    print(f"accuracy {right.mean():.3f} at epsilon {trainer.epsilon(1e-5).upper:.2f}")
print(trainer.clipped_grad.plan(start, train[:8]))  # ghost: 576 bytes a user, not 64,000
