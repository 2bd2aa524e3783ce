"""Five well-known mistakes of public DP-SGD scripts, as loops that a user would write.

Each loop gives its noisy gradient at every update, and has a twin that is right: the flag ``right``
changes the lines that are wrong on purpose. `python -m benchmarks.planted_loops` asks the check,
the audit and the ledger about each, and writes `results/planted_loops.json`.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import audit

RECORDS, WIDTH, BATCH, CLIP, NOISE, EPOCHS = 16, 30, 4, 1.0, 1.0, 2
STEPS = EPOCHS * RECORDS // BATCH
DELTA = 1e-2
MECHANISM = dataclasses.replace(
    jaxdp.dp_sgd(noise_multiplier=NOISE, l2_clip_norm=CLIP, batch_size=BATCH, dataset_size=RECORDS),
    steps=STEPS,
    delta=DELTA,
)

_RNG = np.random.default_rng(11)
DATA = (
    _RNG.normal(size=(RECORDS, WIDTH)).astype(np.float32),
    _RNG.choice([-1, 1], RECORDS).astype(np.int32),
)


def loss_fn(w, x, y):
    return jax.nn.softplus(-y.astype(jnp.float32) * jnp.dot(x, w))


example_gradients = jax.jit(jax.vmap(jax.grad(loss_fn), (None, 0, 0)))
mean_gradient = jax.jit(
    lambda w, x, y, mask: jnp.mean(
        jax.vmap(jax.grad(loss_fn), (None, 0, 0))(w, x, y), 0, where=mask[:, None]
    )
)


def clipped(vectors):
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors * np.minimum(1.0, CLIP / np.maximum(norms, 1e-12))


def poisson(rng, count=RECORDS):
    return rng.random(count) < BATCH / RECORDS


def noise_scaled_to_the_mean(data, seed, right=False):
    """The multiplier is applied after the division by the batch size, a second time."""
    rng, w = np.random.default_rng(seed), np.zeros(WIDTH, np.float32)
    for _ in range(STEPS):
        total = clipped(np.asarray(example_gradients(w, *data)))[poisson(rng, len(data[0]))].sum(0)
        noise = rng.normal(size=WIDTH)
        if right:
            noisy = (total + NOISE * CLIP * noise) / BATCH
        else:
            noisy = (total + NOISE * CLIP / BATCH * noise) / BATCH
        w = (w - 0.5 * noisy).astype(np.float32)
        yield noisy


def clipped_by_batch(data, seed, right=False):
    """The gradient of the batch's mean loss is clipped, not those of its examples."""
    rng, w = np.random.default_rng(seed), np.zeros(WIDTH, np.float32)
    for _ in range(STEPS):
        drawn = poisson(rng, len(data[0]))
        if right:
            mean = clipped(np.asarray(example_gradients(w, *data)))[drawn].sum(0) / BATCH
        else:
            mean = clipped(np.nan_to_num(np.asarray(mean_gradient(w, *data, drawn))))
        noisy = mean + rng.normal(scale=NOISE * CLIP / BATCH, size=WIDTH)
        w = (w - 0.5 * noisy).astype(np.float32)
        yield noisy


def shuffled_epochs(data, seed, right=False):
    """Batches of one pass over shuffled records, and epsilon of Poisson sampling."""
    rng, w = np.random.default_rng(seed), np.zeros(WIDTH, np.float32)
    for _ in range(EPOCHS):
        order = rng.permutation(RECORDS)
        for at in range(0, RECORDS, BATCH):
            batch = np.flatnonzero(poisson(rng, len(data[0]))) if right else order[at : at + BATCH]
            total = clipped(np.asarray(example_gradients(w, *data)))[batch].sum(0)
            noisy = (total + rng.normal(scale=NOISE * CLIP, size=WIDTH)) / BATCH
            w = (w - 0.5 * noisy).astype(np.float32)
            yield noisy


def noise_of_a_checkpoint(data, seed, right=False):
    """Saves parameters every other step, and seeds the noise by the step; killed in its middle."""
    draws = np.random.default_rng(seed)  # not saved: the second life draws other records
    saved, life = (0, np.zeros(WIDTH, np.float32)), 0
    for life in range(2):
        step, w = saved
        while step < (STEPS // 2 + 1 if life == 0 else STEPS - 1):
            total = clipped(np.asarray(example_gradients(w, *data)))[
                poisson(draws, len(data[0]))
            ].sum(0)
            entropy = [seed, step, life] if right else [seed, step]
            noise = np.random.default_rng(entropy).normal(scale=NOISE * CLIP, size=WIDTH)
            noisy = (total + noise) / BATCH
            w, step = (w - 0.5 * noisy).astype(np.float32), step + 1
            if step % 4 == 0:
                saved = step, w
            yield noisy


def epochs_counted_for_steps(data, seed, right=False):
    """Right in every update; its epsilon is computed for as many as there are epochs."""
    yield from shuffled_epochs(data, seed, right=True)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One loop, what its author charges, and what a jaxdp ledger says to the same mistake.

    Attributes:
        loop: ``(data, seed, right=False)`` to releases.
        charged: the steps that its author's epsilon counts.
        ledger: makes the same mistake with jaxdp's parts; gives words, "" where it is not seen.
    """

    loop: Callable[..., Any]
    charged: int
    ledger: Callable[[], str]

    def check(self, right: bool) -> jaxdp.audit.Checked:
        """The check's answer, to the loop or its twin."""
        loop = lambda data, seed: self.loop(data, seed, right)  # noqa: E731
        loop.__wrapped__ = self.loop
        charged = STEPS if right else self.charged
        return jaxdp.check_loop(loop, DATA, MECHANISM, steps=charged)


def _parts(ledger):
    sampler = MECHANISM.sampler(RECORDS, ledger=ledger)
    grad_fn = MECHANISM.clipped_grad(lambda w, x, y: loss_fn(w, x, y))
    tx = optax.chain(MECHANISM.privatize(), optax.sgd(0.5))
    w = jnp.zeros(WIDTH)
    return sampler, grad_fn, jaxdp.compile_update(tx), w, tx.init(w)


def one_draw_for_two_updates():
    sampler, grad_fn, update, w, state = _parts(jaxdp.Ledger())
    data, draw = jax.tree.map(jnp.asarray, DATA), sampler.draw()
    try:
        for _ in range(2):
            w, state, _ = update(w, state, grad_fn(w, data, draw))
    except ValueError as error:
        return f"refused: {error}".partition(":")[0] + ": " + str(error).partition(":")[0]
    return ""


def counted_by_the_ledger():
    ledger = jaxdp.Ledger()
    sampler, grad_fn, update, w, state = _parts(ledger)
    data = jax.tree.map(jnp.asarray, DATA)
    for _ in range(STEPS):
        w, state, _ = update(w, state, grad_fn(w, data, sampler.draw()))
    told = MECHANISM.epsilon(EPOCHS, DELTA).upper
    return f"epsilon {ledger.epsilon(DELTA).upper:.2f} for {STEPS} draws; told {told:.2f}"


def other_noise_than_charged():
    sampler, grad_fn, _, w, _ = _parts(jaxdp.Ledger())
    tx = optax.chain(jaxdp.privatize(NOISE / BATCH, BATCH), optax.sgd(0.5))
    update, data = jaxdp.compile_update(tx), jax.tree.map(jnp.asarray, DATA)
    try:
        update(w, tx.init(w), grad_fn(w, data, sampler.draw()))
    except ValueError as error:
        return f"refused: {str(error).partition(':')[0]}"
    return ""


def gradients_of_the_mean():
    _, _, _, w, _ = _parts(jaxdp.Ledger())
    tx = optax.chain(MECHANISM.privatize(), optax.sgd(0.5))
    grads = mean_gradient(w, *DATA, np.ones(RECORDS, bool))
    try:
        tx.update(grads, tx.init(w), w)
    except (ValueError, TypeError) as error:
        return f"refused: {str(error).partition(',')[0]}"
    return ""


def nothing_was_drawn():
    """A loop that shuffles takes no draw: its ledger is empty, and says so."""
    try:
        jaxdp.Ledger().epsilon(DELTA)
    except ValueError as error:
        return f"refused: {str(error).partition(':')[0]}"
    return ""


MISTAKES = [
    Mistake(noise_scaled_to_the_mean, STEPS, other_noise_than_charged),
    Mistake(clipped_by_batch, STEPS, gradients_of_the_mean),
    Mistake(shuffled_epochs, STEPS, nothing_was_drawn),
    Mistake(noise_of_a_checkpoint, STEPS, one_draw_for_two_updates),
    Mistake(epochs_counted_for_steps, EPOCHS, counted_by_the_ledger),
]


def audited(mistake, count=400):
    """(epsilon charged, lower bound found, seconds): record 0 against one without a gradient.

    The score of a run is its releases' component along the record's gradient, summed over steps.
    """
    began = time.perf_counter()
    without = (np.array(DATA[0]), DATA[1])
    without[0][0] = 0.0
    along = clipped(np.asarray(example_gradients(np.zeros(WIDTH, np.float32), *DATA)))[0]
    along = along / np.linalg.norm(along)
    scores = [
        np.array([sum(-release @ along for release in mistake.loop(data, seed)) for seed in seeds])
        for data, seeds in ((without, range(count)), (DATA, range(count, 2 * count)))
    ]
    charged = MECHANISM.epsilon(mistake.charged, DELTA).upper
    found = audit.audit_scores(*scores, delta=DELTA).epsilon
    return charged, float(found), time.perf_counter() - began


def main():
    rows = []
    for mistake in MISTAKES:
        name = mistake.loop.__name__
        found, twin = mistake.check(right=False), mistake.check(right=True)
        charged, epsilon, seconds = audited(mistake)
        began = time.perf_counter()
        ledger = mistake.ledger()
        rows.append(
            {
                "mistake": name,
                "check": [f"{f.kind} ({f.where}): {f.what}" for f in found.broken],
                "check seconds": round(found.seconds, 2),
                "twin passes": twin.ok,
                "audit": f"{epsilon:.2f} of {charged:.2f} charged",
                "audit catches": epsilon > charged,
                "audit seconds": round(seconds, 1),
                "ledger": ledger,
                "ledger seconds": round(time.perf_counter() - began, 1),
            }
        )
        print(json.dumps(rows[-1], indent=1))
    from benchmarks import planted_noise, planted_pipelines

    for planted in planted_pipelines.PIPELINES:
        found, twin = planted(False), planted(True)
        rows.append(
            {
                "mistake": planted.__name__,
                "check": [f"{f.kind} ({f.where}): {f.what}" for f in found.findings],
                "check seconds": round(found.seconds, 2),
                "twin passes": twin.ok,
            }
        )
        print(json.dumps(rows[-1], indent=1))
    path = Path(__file__).parent / "results" / "planted_loops.json"
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    planted_noise.main()


if __name__ == "__main__":
    main()
