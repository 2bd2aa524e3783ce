"""A CSV file with a column of text: its categories are a public list, not read off the column."""

import tempfile

import jax.numpy as jnp
import numpy as np
import optax

import jaxdp

JOBS = {"clerk": 0, "cook": 1, "driver": 2, "nurse": 3}  # from a public register
path, rng = f"{tempfile.mkdtemp()}/people.csv", np.random.default_rng(0)
job, age = rng.choice([*JOBS, "alchemist", "smith"], 5_000), rng.uniform(18, 65, 5_000)
pay = [JOBS.get(one, 5) for one in job] + age / 30 + 0.5 * rng.normal(size=5_000)
np.savetxt(path, np.c_[job, age, pay], fmt="%s", delimiter=",")

job, age, pay = np.loadtxt(path, dtype=str, delimiter=",").T
job = np.array([JOBS.get(one, len(JOBS)) for one in job])  # all that are not listed are one more
age = np.clip(age.astype(np.float32), 18, 65) / 65  # public bounds
pay = np.clip(pay.astype(np.float32), 0, 8) / 8
table = {"job": job, "age": age, "pay": pay}
train, valid = ({k: a[part] for k, a in table.items()} for part in np.split(range(5_000), [4_000]))


def loss_fn(params, job, age, pay):
    return jnp.square(params["job"][job] + params["age"] * age - pay)


params = {"job": jnp.zeros(len(JOBS) + 1), "age": jnp.zeros(())}
budget = {"epsilon": 3, "delta": 1e-5, "steps": 60, "l2_clip_norm": 0.3}
for noise in ({"noise_multiplier": 0, "l2_clip_norm": 1e6}, budget):  # without and with privacy
    mechanism = jaxdp.dp_sgd(**noise, batch_size=256, dataset_size=4_000)
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.adam(0.1), train)
    state = trainer.init(params)
    for batch in trainer.batches(60):
        state, _ = trainer.step(state, batch)
    error = 8 * np.sqrt(loss_fn(state.params, **valid).mean())
    print(f"error {error:.3f} at epsilon {trainer.epsilon(1e-5).upper:.2f}")
