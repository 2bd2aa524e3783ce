"""A release divided by a secret number, in two worlds: `python -m benchmarks.true_batch_audit`.

After arXiv:2605.15648: what the noisy sum is divided by shows in the size of its noise. One step of
a linear model, with and without one record. The sampler, the clipped gradient and the noise are
jaxdp's own, and its release is divided by the declared batch size. The two mistaken releases are
the same noisy sum, divided by the number of records drawn, or by the rate times the number of
records there are. Each is attacked by the likelihood ratio of whoever knows its divisor's rule.
"""

import argparse
import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special, stats

import jaxdp
from jaxdp.audit import audit_scores

RESULT = Path(__file__).parent / "results" / "true_batch_audit.json"
SEED = 20_261_126
AT_ONCE = 500  # steps released at a time
DELTA = 1e-5
DIVISORS = {
    "jaxdp: by the declared batch size": "declared",
    "by the number of records drawn": "drawn",
    "by rate times number of records": "there",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One step of a model of so many parameters, on so many records or one fewer."""

    records: int
    parameters: int
    noise: float = 1.0
    rate: float = 0.5
    runs: int = 20_000  # of each world

    def mechanism(self) -> jaxdp.Mechanism:
        return jaxdp.dp_sgd(
            noise_multiplier=self.noise,
            l2_clip_norm=1.0,
            batch_size=round(self.rate * self.records),
            dataset_size=self.records,
        )

    def divisors(self, kind: str, drawn: np.ndarray, there: bool) -> np.ndarray:
        """What a sum is divided by in a world where so many records were drawn; at least 1."""
        if kind == "drawn":
            return np.maximum(drawn, 1)
        records = self.records if kind == "declared" else self.records - (not there)
        return np.full(np.shape(drawn), int(self.rate * records))


def loss_fn(params, size):
    """The record's gradient is along the first parameter; those of size 0 have none."""
    return 10.0 * size * params[0]


@functools.cache
def release(case: Case):
    """The compiled private gradients of many draws: (first coordinate, squares of the others)."""
    mechanism, params = case.mechanism(), jnp.zeros(case.parameters)
    grad_fn, noise = mechanism.clipped_grad(loss_fn), mechanism.privatize()

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0, 0, 0))
    def step(data, indices, mask, key):
        summed = grad_fn(params, data[indices], mask)
        noisy, _ = noise.update(summed, noise.init(params), params, key=key)
        return noisy[0], jnp.sum(jnp.square(noisy[1:]))

    return step


def released(case: Case, there: bool, seed: int) -> np.ndarray:
    """[runs, 3] of a world: the private gradient's two numbers, and how many were drawn."""
    sizes = np.zeros(case.records, np.float32)
    sizes[-1] = 1.0
    data = jnp.asarray(sizes if there else sizes[:-1])
    sampler = case.mechanism().sampler(
        len(data),
        secret=jaxdp.Secret.from_seed(seed),
        physical_batch_size=case.records,
        reserve=case.runs,
    )
    found = []
    for begin in range(0, case.runs, AT_ONCE):
        steps = []
        for _ in range(min(AT_ONCE, case.runs - begin)):
            draw = sampler.draw()
            (indices,), (mask,) = draw.indices, draw.mask
            steps.append((indices, mask, draw.key()))
        indices, mask, keys = jax.tree.map(lambda *leaves: np.stack(leaves), *steps)
        first, squares = release(case)(data, indices, mask, keys)
        found.append(np.c_[first, squares, mask.sum(axis=1)])
    return np.concatenate(found).astype(np.float64)


def log_density(case: Case, kind: str, there: bool, first, squares) -> np.ndarray:
    """The log density [runs] of a release in a world, up to what both worlds share."""
    others = np.arange(case.records)
    logs = []
    for taken in (0, 1) if there else (0,):
        std = case.noise / case.divisors(kind, others + taken, there)  # of every coordinate
        mean = taken * std / case.noise
        weight = stats.binom.logpmf(others, case.records - 1, case.rate)
        if there:
            weight = weight + np.log(case.rate if taken else 1 - case.rate)
        squared = (first[:, None] - mean) ** 2 + squares[:, None]
        logs.append(weight - case.parameters * np.log(std) - squared / (2 * std**2))
    return special.logsumexp(np.concatenate(logs, axis=1), axis=1)


def scores(case: Case, kind: str, world: np.ndarray, there: bool) -> np.ndarray:
    """The log-likelihood ratio [runs] of a world's releases, divided by this kind of number."""
    first, squares, drawn = world.T
    scale = case.mechanism().batch_size / case.divisors(kind, drawn, there)
    first, squares = first * scale, squares * scale**2
    return log_density(case, kind, True, first, squares) - log_density(
        case, kind, False, first, squares
    )


def row(case: Case, seed: int = SEED) -> dict:
    """What is claimed of one step, and the lower bounds that the attacks prove, at 95 %."""
    worlds = [(released(case, there, seed + there), there) for there in (True, False)]
    return {
        **dataclasses.asdict(case),
        "delta": DELTA,
        "claimed": case.mechanism().epsilon(1, DELTA).upper,
        "audited": {
            kind: audit_scores(*(scores(case, kind, *world) for world in worlds), DELTA).epsilon
            for kind in DIVISORS.values()
        },
    }


CASES = (Case(4, 1_000), Case(20, 1_000), Case(20, 1_000, noise=8.0), Case(200, 1_000))


def table(rows: list[dict]) -> str:
    """The rows as they stand in docs/howto/divisor.md."""
    heads = "records", "noise multiplier", "claimed", *DIVISORS
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for r in rows:
        cells = [f"{r['records']}", f"{r['noise']:g}", f"{r['claimed']:.2f}"]
        for found in r["audited"].values():
            cells.append(f"**{found:.2f}**" if found > r["claimed"] else f"{found:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few runs, nothing is written")
    args = parser.parse_args()
    cases = [dataclasses.replace(c, runs=1_000) if args.quick else c for c in CASES]
    rows = [row(case) for case in cases]
    print(table(rows))
    if not args.quick:
        RESULT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
