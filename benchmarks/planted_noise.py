"""Loops whose noise, draw or memory is wrong, and loops that are right, for ``jaxdp.check_loop``.

Each loop trains a network of four leaves and gives its release at every update. FAULTY are wrong on
purpose, in one place each; RIGHT are right, also where noise is unlike from leaf to leaf or absent
from what is not trained. `python -m benchmarks.planted_loops`, or this file alone, asks the check
about all of them.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp.types import Summed

RECORDS, WIDTH, BATCH, STEPS = 16, 8, 4, 8
RATE = BATCH / RECORDS
MECHANISM = jaxdp.dp_sgd(
    noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=BATCH, dataset_size=RECORDS
)

_RNG = np.random.default_rng(3)
_X = _RNG.normal(size=(RECORDS, WIDTH)).astype(np.float32)
DATA = (_X, (_X.sum(1) > 0).astype(np.float32))
_W = _RNG.normal(size=(2, WIDTH, WIDTH)).astype(np.float32) / 3
PARAMS = {
    "one": {"bias": np.zeros(WIDTH, np.float32), "weights": _W[0]},
    "two": {"bias": np.zeros(WIDTH, np.float32), "weights": _W[1]},
}


def loss_fn(params, x, y):
    one, two = params["one"], params["two"]
    hidden = jnp.tanh(x @ one["weights"] + one["bias"])
    return jnp.square(jnp.sum(hidden @ two["weights"] + two["bias"]) - y)


@jax.jit
def gradients(params, x, y):
    """Per-example gradients, clipped to the norm 1; a gradient that is not finite counts as 0."""
    grads = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, x, y)
    flat = jnp.concatenate([g.reshape(len(x), -1) for g in jax.tree.leaves(grads)], axis=1)
    norms = jnp.linalg.norm(flat, axis=1)
    scale = jnp.where(jnp.isfinite(norms), jnp.minimum(1.0, 1 / norms), 0.0)

    def scaled(g):
        g = jnp.where(jnp.isfinite(norms).reshape(-1, *[1] * (g.ndim - 1)), g, 0.0)
        return g * scale.reshape(-1, *[1] * (g.ndim - 1))

    return jax.tree.map(scaled, grads)


@jax.jit
def by_layer(params, x, y):
    """Per-example gradients, each leaf clipped to the norm 1."""
    grads = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, x, y)

    def scaled(g):
        norms = jnp.linalg.norm(g.reshape(len(x), -1), axis=1)
        return g * jnp.minimum(1.0, 1 / norms).reshape(-1, *[1] * (g.ndim - 1))

    return jax.tree.map(scaled, grads)


def normals(tree, rng):
    return jax.tree.map(lambda v: rng.normal(size=v.shape), tree)


def plus(one, two, scale=1.0):
    return jax.tree.map(lambda a, b: np.asarray(a + scale * b), one, two)


def poisson(rng, count):
    return rng.random(count) < RATE


def independent(total, rng, **_):
    """The right noise."""
    return plus(total, normals(total, rng))


def training(
    noise=independent,
    draw=poisson,
    grads=gradients,
    release=lambda noisy, memory: (noisy, noisy, memory),
    before=lambda total, memory: (total, memory),
    optimizer=None,
):
    """A loop of these parts.

    Args:
        noise: (sum, generator, mask, step, seed) to the noisy sum.
        draw: (generator, count) to a mask.
        grads: (params, x, y) to clipped gradients, example by example.
        release: (noisy, memory) to (release, gradient of the update, memory).
        before: (sum, memory) to (sum, memory), before the noise.
        optimizer: of optax; None takes plain SGD.
    """
    step_of = optimizer and jax.jit(optimizer.update)

    def loop(data, seed):
        x, y = data
        rng, params, memory, held = np.random.default_rng(seed), PARAMS, None, None
        state = optimizer and optimizer.init(params)
        for step in range(STEPS):
            mask = draw(rng, len(x))
            each = grads(params, x, y)
            total = jax.tree.map(lambda g, m=mask: np.asarray(g, np.float64)[m].sum(0), each)
            total, held = before(total, held)
            noisy = noise(total, rng=rng, mask=mask, step=step, seed=seed)
            noisy = jax.tree.map(lambda v: v / BATCH, noisy)
            shown, used, memory = release(noisy, memory)
            if optimizer is None:
                params = jax.tree.map(lambda p, g: np.float32(p - 0.1 * g), params, used)
            else:
                moved, state = step_of(jax.tree.map(np.float32, used), state, params)
                params = plus(params, moved)
            yield shown

    return loop


def one_key(total, *, rng, **_):
    key = jax.random.key(int(rng.integers(2**31)))
    return jax.tree.map(lambda v: v + np.asarray(jax.random.normal(key, v.shape)), total)


def by_leaf(change):
    """Noise that passes through ``change``: (name, noise, generator) to noise."""

    def noise(total, *, rng, **_):
        drawn = normals(total, rng)
        changed = jax.tree_util.tree_map_with_path(
            lambda path, z: np.broadcast_to(change(jax.tree_util.keystr(path), z, rng), z.shape),
            drawn,
        )
        return plus(total, changed)

    return noise


def empty_bare(total, *, rng, mask, **_):
    return independent(total, rng) if mask.any() else total


def only_first(total, *, rng, step, **_):
    return independent(total, rng) if step == 0 else total


def every_other(total, *, rng, step, **_):
    return plus(total, normals(total, rng), 1.0 if step % 2 == 0 else 0.05)


def decaying(total, *, rng, step, **_):
    return plus(total, normals(total, rng), 1 / (1 + step))


def one_noise_for_all_steps(total, *, seed, **_):
    return independent(total, np.random.default_rng([seed, 1]))


def one_noise_for_all_runs(total, *, step, **_):
    return independent(total, np.random.default_rng(step))


def one_leaf_again(total, *, rng, seed, **_):
    noisy = independent(total, rng)
    fixed = np.random.default_rng([seed, 1]).normal(size=total["one"]["bias"].shape)
    return {**noisy, "one": {**noisy["one"], "bias": total["one"]["bias"] + fixed}}


def divided_before(total, *, rng, **_):
    return plus(total, normals(total, rng), 1 / BATCH)


def realised(total, *, rng, mask, **_):
    size = max(1, mask.sum()) / BATCH
    return jax.tree.map(lambda v: v / size, independent(total, rng))


def with_count(total, *, rng, mask, **_):
    return {**independent(total, rng), "count": np.asarray(float(mask.sum()))}


def along_the_sum(total, *, rng, **_):
    size = np.sqrt(sum(float(np.sum(v**2)) for v in jax.tree.leaves(total)))
    return jax.tree.map(lambda v: v * (1 + rng.normal() / max(size, 1e-6)), total)


def not_finite(params, x, y):
    """The same gradients, but those of a record that is not finite are NaN."""
    bad = ~np.isfinite(x).all(1)
    return jax.tree.map(
        lambda g: np.where(bad.reshape(-1, *[1] * (g.ndim - 1)), np.nan, g),
        gradients(params, x, y),
    )


def skipping(keep_noise):
    """Drops the sum, and the noise or not, where the sum is not finite."""

    def noise(total, *, rng, **_):
        drawn = normals(total, rng)
        if all(np.isfinite(v).all() for v in jax.tree.leaves(total)):
            return plus(total, drawn)
        return jax.tree.map(lambda z: z * keep_noise, drawn)

    return noise


def kept(rng, count):
    """The first four that were drawn: one more pushes out another."""
    drawn = poisson(rng, count)
    return drawn & (np.cumsum(drawn) <= BATCH)


def kept_at_random(rng, count):
    drawn = np.flatnonzero(poisson(rng, count))
    mask = np.zeros(count, bool)
    mask[rng.permutation(drawn)[:BATCH]] = True
    return mask


def until_two(rng, count):
    while (drawn := poisson(rng, count)).sum() < 2:
        pass
    return drawn


def twice_as_many(rng, count):
    return rng.random(count) < 2 * RATE


def one_size(rng, count):
    return np.isin(np.arange(count), rng.permutation(count)[:BATCH])


def unnoised_momentum(decay):
    def before(total, held):
        held = total if held is None else plus(total, held, decay)
        return held, held

    return before


def filtered(decay):
    """Momentum of noisy sums, which is what is released."""

    def release(noisy, memory):
        memory = noisy if memory is None else plus(noisy, memory, decay)
        return memory, memory, memory

    return release


FAULTY: dict[str, Callable[..., Any]] = {
    "one key for all leaves": training(one_key),
    "biases without noise": training(by_leaf(lambda name, z, _: z * ("bias" not in name))),
    "one leaf without noise": training(by_leaf(lambda name, z, _: z * (name != "['two']['bias']"))),
    "half of the coordinates": training(by_leaf(lambda _, z, __: z * (np.arange(WIDTH) < 4))),
    "one coordinate without noise": training(
        by_leaf(lambda name, z, _: z * (np.arange(WIDTH) != (5 if "bias" in name else -1)))
    ),
    "a row of noise for all rows": training(by_leaf(lambda _, z, __: z[:1] if z.ndim > 1 else z)),
    "a column for all columns": training(by_leaf(lambda _, z, __: z[:, :1] if z.ndim > 1 else z)),
    "one number for a leaf": training(by_leaf(lambda name, z, _: z.ravel()[0])),
    "pairs that are equal": training(by_leaf(lambda _, z, __: np.repeat(z[..., ::2], 2, -1))),
    "pairs that are opposite": training(
        by_leaf(lambda _, z, __: np.stack([z[..., ::2], -z[..., ::2]], -1).reshape(z.shape))
    ),
    "a tile of noise": training(by_leaf(lambda _, z, __: np.tile(z[..., :4], 2))),
    "mirrored noise": training(by_leaf(lambda _, z, __: z + z[..., ::-1])),
    "noise without its mean": training(by_leaf(lambda _, z, __: z - z.mean(-1, keepdims=True))),
    "noise of low rank": training(
        by_leaf(
            lambda name, z, rng: (
                np.cos(np.outer(np.arange(z.size), range(1, 7))) @ rng.normal(size=6)
            ).reshape(z.shape)
        )
    ),
    "noise along the sum": training(along_the_sum),
    "no noise where nobody was drawn": training(empty_bare),
    "noise in the first step alone": training(only_first),
    "little noise in every other step": training(every_other),
    "noise that falls with the steps": training(decaying),
    "one noise for all steps": training(one_noise_for_all_steps),
    "one noise for all runs": training(one_noise_for_all_runs),
    "one leaf's noise comes again": training(one_leaf_again),
    "a fifth of the noise in one layer": training(
        by_leaf(lambda name, z, _: z * (0.2 if "two" in name else 1.0))
    ),
    "noise scaled to the mean": training(divided_before),
    "clipped leaf by leaf": training(grads=by_layer),
    "uniform noise": training(by_leaf(lambda _, z, rng: rng.uniform(-(3**0.5), 3**0.5, z.shape))),
    "Laplace noise": training(by_leaf(lambda _, z, rng: rng.laplace(0, 0.5**0.5, z.shape))),
    "noise cut at two deviations": training(by_leaf(lambda _, z, __: np.clip(z, -1.7, 1.7))),
    "the size of the draw beside the sum": training(
        with_count, release=lambda noisy, _: (noisy, {k: noisy[k] for k in PARAMS}, None)
    ),
    "divided by the realised size": training(realised),
    "momentum of un-noised sums": training(before=unnoised_momentum(0.9)),
    "a batch that is not finite skipped": training(skipping(True), grads=not_finite),
    "and its noise, too": training(skipping(False), grads=not_finite),
    "four drawn records kept": training(draw=kept),
    "four of the drawn kept at random": training(draw=kept_at_random),
    "a draw repeated until it has two": training(draw=until_two),
    "drawn at twice the rate": training(draw=twice_as_many),
    "batches of one size": training(draw=one_size),
}


def through(mechanism, draw):
    """A loop whose noise a mechanism of jaxdp adds, compiled once."""
    tx = mechanism.privatize()

    @jax.jit
    def noised(total, state, key, step):
        key = mechanism.simulated_key(key, step)
        return tx.update(Summed(total, mechanism.l2(PARAMS)), state, PARAMS, key=key)

    def loop(data, seed):
        x, y = data
        rng, params, state = np.random.default_rng(seed), PARAMS, tx.init(PARAMS)
        keys = jax.random.split(jax.random.key(seed), STEPS)
        for step in range(STEPS):
            mask = draw(rng, len(x), step)
            each = gradients(params, x, y)
            total = jax.tree.map(lambda g, m=mask: np.asarray(g)[m].sum(0), each)
            noisy, state = noised(total, state, keys[step], step)
            params = jax.tree.map(lambda p, g: np.float32(p - 0.1 * g), params, noisy)
            yield noisy

    return loop


BANDED = jaxdp.dp_mf(
    noise_multiplier=1.0,
    l2_clip_norm=1.0,
    batch_size=2,
    dataset_size=RECORDS,
    steps=STEPS,
    strategy="banded",
    bands=4,
)
BUFFERED = jaxdp.dp_mf(
    noise_multiplier=1.0,
    l2_clip_norm=1.0,
    batch_size=BATCH,
    dataset_size=RECORDS,
    sampling="fixed_order",
    steps=STEPS,
    strategy="buffered",
)
ON_GRID = jaxdp.dp_sgd(
    noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=BATCH, dataset_size=RECORDS, noise="grid"
)
_LEVELS = np.linspace(1.0, 0.5, STEPS)
SCHEDULE = jaxdp.dp_sgd(
    noise_multiplier=jaxdp.schedules.NoiseSchedule(tuple((float(z), 1) for z in _LEVELS)),
    l2_clip_norm=1.0,
    batch_size=BATCH,
    dataset_size=RECORDS,
)


def cyclic(rng, count, step):
    return (np.arange(count) % 4 == step % 4) & (rng.random(count) < 0.5)


def in_order(rng, count, step):
    return np.arange(count) // BATCH == step % (RECORDS // BATCH)


def at_any_step(rng, count, step):
    return poisson(rng, count)


def scheduled(total, *, rng, step, **_):
    return plus(total, normals(total, rng), _LEVELS[step])


def unlike(total, *, rng, **_):
    """Leaves are clipped to 1 each, with variances 2, 4, 8 and 8, whose inverses have the sum 1."""
    leaves, tree = jax.tree.flatten(total)
    pairs = zip(leaves, (2, 4, 8, 8), strict=True)
    return jax.tree.unflatten(tree, [v + rng.normal(0, s**0.5, v.shape) for v, s in pairs])


def by_coordinate(total, *, rng, **_):
    """Clipped and noised in units of a public vector, which is multiplied back."""
    return jax.tree.map(
        lambda v: (v + rng.normal(size=v.shape)) * 10.0 ** (np.arange(8) - 4), total
    )


def frozen(total, *, rng, step, **_):
    """One layer is not trained; a counter and a rate go along."""
    return {
        **total,
        "one": independent(total["one"], rng),
        "two": jax.tree.map(np.zeros_like, total["two"]),
        "step": np.asarray(step * 1.0),
        "rate": np.full(2, 0.1 / (1 + step)),
    }


def parameters(loop, scale=0.1, decay=0.0):
    """The parameters of SGD, with momentum or without, in place of its gradients."""

    def shown(data, seed):
        params, held = PARAMS, None
        for noisy in loop(data, seed):
            held = noisy if held is None else plus(noisy, held, decay)
            params = plus(params, held, -scale)
            yield params

    return shown


ADAM = optax.adam(1e-2)
update_of_adam = jax.jit(ADAM.update)


def updates_of_adam(data, seed):
    """What Adam makes of noisy sums: no sum plus noise, so that the check tests it in part."""
    state = ADAM.init(PARAMS)
    for noisy in training()(data, seed):
        update, state = update_of_adam(jax.tree.map(np.float32, noisy), state)
        yield update


def with_dropout(data, seed):
    """A linear model, with half of the inputs of each record dropped, new ones at each step."""
    (x, _), rng = data, np.random.default_rng(seed)
    for _ in range(STEPS):
        kept = x * (rng.random(x.shape) < 0.5)
        kept = kept / np.maximum(1.0, np.linalg.norm(kept, axis=1, keepdims=True))
        yield kept[poisson(rng, len(x))].sum(0) + rng.normal(size=WIDTH)


@dataclasses.dataclass(frozen=True)
class Right:
    """A loop that is right, and how it is to be checked."""

    loop: Callable[..., Any]
    mechanism: Any = MECHANISM
    of: str = "gradients"


RIGHT = {
    "plain": Right(training()),
    "frozen leaves, a counter, a rate": Right(
        training(frozen, release=lambda noisy, _: (noisy, {k: noisy[k] for k in PARAMS}, None))
    ),
    "unlike noise by layer": Right(training(unlike, grads=by_layer)),
    "unlike noise by coordinate": Right(training(by_coordinate)),
    "dropout": Right(with_dropout),
    "momentum of noisy sums": Right(training(optimizer=optax.sgd(0.1, momentum=0.9))),
    "momentum of noisy sums, released": Right(training(release=filtered(0.9))),
    "Adam of noisy sums": Right(training(optimizer=optax.adam(1e-2))),
    "Adam's updates of noisy sums": Right(updates_of_adam),
    "parameters": Right(parameters(training()), of="parameters"),
    "parameters with momentum": Right(parameters(training(), decay=0.9), of="parameters"),
    "dp_mf, banded": Right(through(BANDED, cyclic), BANDED),
    "dp_mf, buffered": Right(through(BUFFERED, in_order), BUFFERED),
    "noise on the grid": Right(through(ON_GRID, at_any_step), ON_GRID),
    "a schedule": Right(training(scheduled), SCHEDULE),
    "steps that nobody was drawn for": Right(
        training(draw=lambda rng, count: rng.random(count) < 1 / RECORDS),
        jaxdp.dp_sgd(noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=1, dataset_size=RECORDS),
    ),
}


def checked(name: str, base: int = 0, **options: Any) -> Any:
    """The check's answer to one of the loops, on seeds of its own for every ``base``."""
    right = RIGHT[name] if name in RIGHT else Right(FAULTY[name])
    loop = lambda data, seed: right.loop(data, seed + 100_000 * base)  # noqa: E731
    loop.__wrapped__ = right.loop
    return jaxdp.check_loop(loop, DATA, right.mechanism, steps=STEPS, of=right.of, **options)


def row(name: str, answers: list[Any]) -> dict[str, Any]:
    """A row of the results: how often a loop was accused, and what was said first."""
    accused = sum(not answer.ok for answer in answers)
    return {
        "loop": name,
        "right": name in RIGHT,
        "accused": f"{accused} of {len(answers)}",
        "suspected": sum(bool(answer.suspicions) for answer in answers),
        "check": [
            f"{'' if f.certain else 'suspicion: '}{f.kind} ({f.where}): {f.what}"
            for f in answers[0].findings
        ],
        "not tested": list(answers[0].untested),
        "seconds": round(float(np.median([answer.seconds for answer in answers])), 2),
    }


def main(faulty: int = 5, right: int = 20) -> None:
    """Asks about every loop on seeds of its own, again and again; writes what was answered."""
    rows = []
    for name in (*FAULTY, *RIGHT):
        times = faulty if name in FAULTY else right
        rows.append(row(name, [checked(name, base) for base in range(times)]))
        print(json.dumps(rows[-1], indent=1), flush=True)
    path = Path(__file__).parent / "results" / "planted_noise.json"
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
