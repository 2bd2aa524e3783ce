"""DP-SBCD's hidden state on trial: the last iterate against the proven and the published value.

Called by ``python -m benchmarks.auditing --only hidden``.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp.audit import audit_scores, bounds, two_worlds
from jaxdp.papers import block_coordinate as bc
from jaxdp.papers import claims
from jaxdp.papers import hidden_state as hs
from jaxdp.papers.block_coordinate.audit import hidden_run

DELTA, REPLACE = 1e-5, acc.Relation.REPLACE_ONE
SEED = 20_261_122  # chosen once; the attacks below were not changed after a run with it
FAR = 100.0  # a wanted output so far off that every gradient of the record is clipped

ALGORITHMS = {
    "R3, one batch, weight decay": bc.HiddenBlocks(
        bc.Network((2, 1), 1.0), 2.0, 1.0, 1.0, 4, 4, 10,
        proximal=bc.Proximal(weight_decay=0.3), direct=True,
    ),
    "R3, two batches in a fixed order, weight decay": bc.HiddenBlocks(
        bc.Network((2, 1), 1.0), 2.0, 1.0, 1.0, 2, 4, 10,
        proximal=bc.Proximal(weight_decay=0.3), direct=True,
    ),
    "R3, two batches in a secret order, averaged": bc.HiddenBlocks(
        bc.Network((2, 1), 1.0), 4.0, 1.0, 1.0, 2, 4, 10, average=True, direct=True,
    ),
    "R2, two layers, two batches": bc.HiddenBlocks(
        bc.Network((2, 2, 1), 1.0), 4.0, 1.0, 1.0, 2, 4, 5,
    ),
}  # fmt: skip


def worlds(algorithm):
    """Records without the first feature, and one that has nothing else, wanting +FAR or -FAR."""
    inputs, outputs = algorithm.network.widths[0], algorithm.network.widths[-1]
    x = np.zeros((4, inputs), np.float32)
    x[:3, 1], x[3, 0] = (0.5, -0.5, 0.25), 1.0
    y = np.zeros((4, outputs), np.float32)
    y[:, 0] = (0.3, -0.3, 0.1, FAR)
    return (jnp.asarray(x), jnp.asarray(y)), (jnp.asarray(x[3]), jnp.asarray(-y[3]))


def first_weights(released):
    """The weight of the first input in every released block."""
    return jnp.stack([w[0, 0] for w in released])


def algorithms(count):
    """The package's own loops: audited must stay below proven."""
    rows = []
    for name, algorithm in ALGORITHMS.items():
        ordered = "fixed" in name or "one batch" in name
        run = hidden_run(algorithm, *worlds(algorithm), partition=not ordered, score=first_weights)
        # The record of the last place is in the last batch.
        inside, outside = two_worlds(run, count, seed=SEED)
        event, chains = (
            algorithm.event(),
            [algorithm.chain(i) for i in range(algorithm.network.blocks)],
        )
        found = audit_scores(inside, outside, DELTA)
        row = {
            "algorithm": name,
            "runs": 2 * count,
            "proven": acc.epsilon(event, DELTA, REPLACE).upper,
            "claimed_theorem_4_6": claims.dp_sbcd_theorem_4_6(
                chains * algorithm.sweeps, DELTA
            ).value,
            "audited": found.epsilon,
            "exposed": acc.epsilon(algorithm.event("looked"), DELTA, REPLACE).upper,
        }
        if ordered:
            row |= as_gaussian(inside, outside, chains[0])
            if row["audited_gaussian"] > row["proven"]:
                # One bound in twenty may: more runs with another seed tell chance from a defect.
                more = (s for s in two_worlds(run, 10 * count, seed=SEED + 1))
                row["repeated"] = {"runs": 20 * count, **as_gaussian(*more, chains[0])}
        rows.append(row)
        print(row, flush=True)
    return rows


def largest_s(counts):
    """The largest S of a Gaussian, mu^2 / 2, that the counts of a fixed test refute at 95 %."""
    mu = bounds.largest_refuted(lambda mu: bounds.p_value(counts, bounds.gaussian_dp(mu)), 0.05)
    return mu**2 / 2


def as_gaussian(inside, outside, chain):
    """S of the last iterate, whose law is Gaussian: the threshold is 0 by symmetry."""
    found = audit_scores(inside[:, 0], outside[:, 0], DELTA, kind="gaussian", threshold=0.0)
    return {
        "audited_gaussian": found.epsilon, "audited_s": largest_s(found.counts),
        "proven_s": float(hs.shifted(chain)[-1]),
        "published_s": float(hs.log_sobolev(chain, published=True)[-1]),
    }  # fmt: skip


def paper_chain(decay, count):
    """The linear Gaussian chain of docs/proofs/hidden_state.md: one of two steps reads it."""
    chain = hs.NoisyChain(2, 1, (0.5, 0.5), (2.0, 1.0), (1.0, 0.9), (1.0, 1 / (1 + 0.5 * decay)))
    c, p, v, s = (
        chain.table(n).ravel().astype(np.float32)
        for n in ("contractions", "proximal", "variances", "contributions")
    )

    def run(words, member):
        noise = jax.random.normal(jax.random.wrap_key_data(words), (2,))
        sign = jnp.where(member, 1.0, -1.0)
        w = p[0] * (sign * s[0] + jnp.sqrt(v[0]) * noise[0])
        return (p[1] * (c[1] * w + jnp.sqrt(v[1]) * noise[1]))[None]

    inside, outside = two_worlds(run, count, seed=SEED)
    found = audit_scores(inside[:, 0], outside[:, 0], DELTA, kind="gaussian", threshold=0.0)
    return {
        "weight_decay": decay, "runs": 2 * count, "exact_s": float(hs.shifted(chain)[0]),
        "published_s": float(hs.log_sobolev(chain, published=True)[0]),
        "audited_s": largest_s(found.counts), "counts": dataclasses.asdict(found.counts),
    }  # fmt: skip


def hidden(count=10_000, many=50_000):
    """Both: the package's algorithms, and the chain on which the published recursion is low."""
    chains = []
    for decay in (0.0, 0.5, 1.0, 3.0):
        chains.append(paper_chain(decay, many))
        print(chains[-1], flush=True)
    return {"algorithms": algorithms(count), "chains": chains}
