"""Two neighbouring data sets told apart by low-order bits alone: float32 noise and the grid.

    python -m benchmarks.grid_noise --parameters --networks --bits 40000

One parameter; 99 records whose gradient is 0, and in the other world one more whose gradient has
the clip norm. A run is one release (with correlated noise two, the record in the first). Nothing of
its size is looked at that the guarantee would not cover: scores are

- representable: the released float can be made from one world's sum by some random bits, and from
  the other's by none (Mironov 2012, "On significance of the least significant bits for differential
  privacy"; Haney et al. 2022, arXiv:2207.13793);
- low bits: a likelihood ratio of the float's exponent and its trailing zeros, learned;
- last digits: likewise of the eight last digits of the released integer, on the grid.

What is learned is learned on half of the runs. The others give a lower bound on epsilon that
assumes nothing (Clopper and Pearson 1934), to be compared with the proven one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from jaxdp.audit import audit_event, audit_scores
from jaxdp.noise import grid
from jaxdp.noise.normals import _from_bits
from jaxdp.types import Summed

RECORDS, DELTA, MULTIPLIER = 100, 1e-5, 4.0
PARAMS = jnp.zeros(1)


def mechanism_of(kind: str) -> jaxdp.Mechanism:
    """The mechanism of a kind: noise, and "correlated" for two steps that share noise."""
    noise = "grid" if "grid" in kind else "gaussian"
    if not kind.startswith("correlated"):
        return jaxdp.dp_sgd(
            noise_multiplier=MULTIPLIER,
            l2_clip_norm=1.0,
            batch_size=RECORDS,
            dataset_size=RECORDS,
            sampling="full_batch",
            noise=noise,
        )
    half = RECORDS // 2
    return jaxdp.dp_mf(
        noise_multiplier=MULTIPLIER,
        l2_clip_norm=1.0,
        batch_size=half,
        dataset_size=RECORDS,
        steps=2,
        bands=2,
        noise=noise,
    )


KINDS = ("gaussian", "grid", "correlated", "correlated on a grid")


@functools.cache
def sums_of(kind: str) -> tuple[float, list[float]]:
    """(the sensitivity, the clipped sum of the first step in both worlds)."""
    mechanism = mechanism_of(kind)
    grad_fn = mechanism.clipped_grad(lambda w, x: jnp.sum(w) * x)
    found = []
    for records in (np.zeros(RECORDS - 1), np.append(np.zeros(RECORDS - 1), 1.0)):
        summed = grad_fn(PARAMS, jnp.asarray(records, jnp.float32), "all")
        found.append(float(summed.value[0]))
    return float(summed.l2), found


def releases(kind: str, world: int, runs: int, seed: int) -> np.ndarray:
    """float32 [runs, steps]: what so many independent runs of a world release."""
    mechanism, (l2, sums) = mechanism_of(kind), sums_of(kind)
    link, steps = mechanism.privatize(), 1 if mechanism.strategy is None else 2

    @jax.jit
    @jax.vmap
    def run(key: jax.Array) -> jax.Array:
        state, found = link.init(PARAMS), []
        for step in range(steps):
            noise = mechanism.simulated_key(jax.random.fold_in(key, step), step)
            value = jnp.full(1, sums[world] if step == 0 else 0.0)
            out, state = link.update(Summed(value, jnp.float32(l2)), state, PARAMS, key=noise)
            found.append(out[0])
        return jnp.stack(found)

    keys = jax.random.split(jax.random.key(seed), runs)
    parts = [np.asarray(run(keys[n : n + 4_000])) for n in range(0, runs, 4_000)]
    return np.concatenate(parts)


@functools.cache
def normals() -> np.ndarray:
    """float32 [2^23]: all values that a normal of the ordinary noise has."""
    bits = np.arange(2**23, dtype=np.uint32) << np.uint32(9)
    return np.asarray(jax.jit(_from_bits)(bits))


def supports(kind: str, value: float) -> list[np.ndarray]:
    """All floats that the first step can release for a sum, sorted, as compilers may round it.

    A product and a sum are rounded once or twice; the division by a constant is one, or a product.
    """
    mechanism, (l2, _) = mechanism_of(kind), sums_of(kind)
    (multiplier,) = mechanism.multipliers(0).values()
    std, size = np.float32(multiplier) * np.float32(l2), np.float32(mechanism.batch_size)
    once = (value + np.float64(std) * normals()).astype(np.float32)
    twice = np.float32(value) + std * normals()
    return [np.unique(end) for x in (once, twice) for end in (x * (1 / size), x / size)]


def representable(kind: str, released: np.ndarray, tried: list[np.ndarray]) -> np.ndarray:
    """1 where the first release can come from the world with the record alone, -1 the other's.

    On the grid every integer can be released in both worlds: 0 for all that are one.

    Args:
        kind: of noise.
        released: the releases to tell apart.
        tried: releases of both worlds, to find out how the compiler rounds.
    """
    first, seen = released[:, 0], [each[:, 0] for each in tried]
    if "grid" in kind:
        return np.where(is_integer(kind, first), 0.0, 1.0)
    each = [supports(kind, value) for value in sums_of(kind)[1][::-1]]
    found = [
        max(of_world, key=lambda one: np.isin(own, one).mean())
        for of_world, own in zip(each, seen, strict=True)
    ]
    with_record, without = (np.isin(first, one) for one in found)
    return with_record.astype(float) - without.astype(float)


def is_integer(kind: str, released: np.ndarray) -> np.ndarray:
    """bool: the float is what some integer on the grid is released as."""
    size = np.float32(mechanism_of(kind).batch_size)
    scale = np.float32(grid_cells(kind) / size)
    cells = np.round(released.astype(np.float64) * grid_cells(kind)).astype(np.float32)
    made = [cells * (1 / scale), cells / scale]
    return np.any([end == released for x in made for end in (x * (1 / size), x / size)], axis=0)


def grid_cells(kind: str) -> float:
    """Cells of the grid for one unit of what is released."""
    mechanism, (l2, _) = mechanism_of(kind), sums_of(kind)
    (multiplier,) = mechanism.multipliers(0).values()
    most = 1.0 if mechanism.strategy is None else grid.growth(mechanism.strategy)
    law = grid.integer_law(multiplier, 1, most)
    return float(grid.grid_scale(law, multiplier, 1, l2)) * mechanism.batch_size


def low_bits(released: np.ndarray) -> np.ndarray:
    """int [runs, steps]: exponent and trailing zeros of every float."""
    bits = released.view(np.uint32).astype(np.int64)
    mantissa = bits & 0x7FFFFF | 0x800000
    zeros = np.log2(mantissa & -mantissa).astype(np.int64)
    return (bits >> 23 & 0xFF) * 32 + zeros


def last_digits(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """From releases to the eight last binary digits of their integers."""
    return lambda released: np.round(released.astype(np.float64) * grid_cells(kind)) % 256


def learned(one: np.ndarray, other: np.ndarray, labels: Callable[[np.ndarray], Any]) -> Any:
    """From releases to the log ratio of how often their labels were seen in two worlds."""
    tables = []
    for column in range(one.shape[1]):
        names = np.unique(np.concatenate([labels(one)[:, column], labels(other)[:, column]]))
        counts = [
            np.bincount(np.searchsorted(names, labels(part)[:, column]), minlength=len(names))
            for part in (one, other)
        ]
        tables.append((names, np.log((counts[0] + 0.5) / (counts[1] + 0.5))))

    def score(released: np.ndarray) -> np.ndarray:
        total = np.zeros(len(released))
        for column, (names, ratio) in enumerate(tables):
            found = labels(released)[:, column]
            place = np.minimum(np.searchsorted(names, found), len(names) - 1)
            total += np.where(names[place] == found, ratio[place], 0.0)
        return total

    return score


def audited(kind: str, runs: int, seed: int = 0) -> dict[str, Any]:
    """The lower bounds on epsilon that the low-order bits of ``runs`` runs a world give."""
    mechanism = mechanism_of(kind)
    steps = 1 if mechanism.strategy is None else 2
    worlds = [releases(kind, world, runs, 2 * seed + world) for world in (1, 0)]
    half = runs // 2
    kinds = {"low bits": low_bits} | ({"last digits": last_digits(kind)} if "grid" in kind else {})
    tried = [world[:half] for world in worlds]
    scores = {"representable": [representable(kind, world[half:], tried) for world in worlds]}
    for name, labels in kinds.items():
        score = learned(*tried, labels)
        scores[name] = [score(world[half:]) for world in worlds]
    found = {name: audit_scores(*each, delta=DELTA).epsilon for name, each in scores.items()}
    event = mechanism.total(steps)
    refuted = {name: bool(audit_event(*each, event).refuted) for name, each in scores.items()}
    decided = [float(np.mean(each != 0)) for each in scores["representable"]]
    return {
        "kind": kind,
        "runs": runs,
        "proven": mechanism.epsilon(steps, DELTA).upper,
        "empirical": found,
        "refuted": refuted,
        "decided_by_representability": decided,
    }
