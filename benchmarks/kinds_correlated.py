"""Correlated noise as ``benchmarks.kinds_audit`` attacks it: whole runs, step after step."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import special

import jaxdp
from benchmarks.sampling_audit import DIRECTION, Case, drawn
from jaxdp import mechanism as mechanisms
from jaxdp.noise.sensitivity import sensitivity
from jaxdp.sampling import CyclicAllocation, CyclicPoisson, FixedOrder, as_source


@dataclasses.dataclass(frozen=True)
class Correlated(Case):
    """A run of ``jaxdp.dp_mf``, banded with cyclic sampling, else of the ``strategy``.

    ``share`` of its sensitivity scales the noise: a planted fault below 1. ``law`` is that of the
    noise, "gaussian" or "grid".
    """

    share: float = 1.0
    law: str = "gaussian"
    strategy: str = "square_root"

    @property
    def turns(self) -> int:
        """The number of places, each of every so many steps, of which a record has one."""
        rule = self.sampling
        return rule.separation(self.records) if isinstance(rule, FixedOrder) else rule.bands

    def mechanism(self, run: int = 0) -> jaxdp.Mechanism:
        return correlated_mechanism(self)

    def sums(self, there: bool) -> np.ndarray:
        return released_in_order(self, there)

    def scores(self, sums: np.ndarray) -> np.ndarray:
        """Attacks [runs, 1]: the log-likelihood ratio of all releases, the record's place unknown.

        C (G + C⁻¹Z) = C G + Z has independent noise. The columns of C that a place of cyclic
        sampling adds, each with its probability or one in an epoch, have no row in common; in a
        fixed order a place adds all of its columns at once.
        """
        mechanism = self.mechanism()
        columns = mechanism.strategy.matrix().T
        apart = sums @ columns
        places = [columns[place :: self.turns] for place in range(self.turns)]
        drawn_with = getattr(self.sampling, "sampling_prob", None)
        if isinstance(self.sampling, CyclicAllocation):
            slots, std = self.sampling.slots, mechanism.uncorrelated_multiplier
            logs = [_one_of(apart, added, slots, std) for added in places]
            return special.logsumexp(logs, axis=0, b=1 / self.turns)[:, None]
        if drawn_with is None:
            drawn_with, places = 1.0, [added.sum(axis=0, keepdims=True) for added in places]
        logs = [
            _log_ratio(apart, added, drawn_with, mechanism.uncorrelated_multiplier)
            for added in places
        ]
        return special.logsumexp(logs, axis=0, b=1 / self.turns)[:, None]


def _log_ratio(apart: np.ndarray, added: np.ndarray, prob: float, std: float) -> np.ndarray:
    """[runs]: of shifts [k, steps] that are each added with a probability, or not."""
    ratios = (2 * apart @ added.T - np.square(added).sum(axis=1)) / (2 * std**2)
    either = np.stack([np.zeros_like(ratios), ratios])
    weights = np.reshape([1 - prob, prob], (2, 1, 1))
    return special.logsumexp(either, axis=0, b=weights).sum(axis=1)


def _one_of(apart: np.ndarray, added: np.ndarray, slots: int, std: float) -> np.ndarray:
    """[runs]: of shifts [k, steps], one of each ``slots`` of which is added; all epochs whole."""
    ratios = (2 * apart @ added.T - np.square(added).sum(axis=1)) / (2 * std**2)
    epochs = ratios.reshape(len(apart), -1, slots)
    return special.logsumexp(epochs, axis=2, b=1 / slots).sum(axis=1)


@functools.cache
def correlated_mechanism(case: Correlated) -> jaxdp.Mechanism:
    """The mechanism of a case: charged as if its sensitivity were right."""

    def shrunk(*given):
        return case.share * sensitivity(*given)

    rule, common = case.sampling, {"steps": case.steps, "noise": case.law}
    with mock.patch.object(mechanisms, "sensitivity", shrunk):
        if isinstance(rule, CyclicPoisson | CyclicAllocation):
            batch = round(rule.rate(0, case.records) * case.records)
            made = jaxdp.dp_mf(
                noise_multiplier=case.noise,
                l2_clip_norm=1.0,
                batch_size=batch,
                dataset_size=case.records,
                sampling=rule.name,
                bands=rule.bands,
                **common,
            )
        else:
            made = jaxdp.dp_mf(
                noise_multiplier=case.noise,
                l2_clip_norm=1.0,
                batch_size=rule.batch_size,
                dataset_size=case.records,
                sampling="fixed_order",
                strategy=case.strategy,
                **common,
            )
    if made.sampling != rule:
        raise ValueError(f"sampling must be what dp_mf makes of it, {made.sampling}, got {rule}")
    return made


def released_in_order(case: Correlated, there: bool) -> np.ndarray:
    """Noisy sums [runs, steps] along the record's direction, of one world; secrets as elsewhere."""
    data = jnp.asarray(case.data(there))
    seeds = (case.seed + 2 * run + there for run in range(case.runs))
    steps = [step for seed in seeds for step in drawn(case, seed, as_source(data))]

    def by_run(*leaves):
        stacked = np.stack(leaves)
        return stacked.reshape(case.runs, case.steps, *stacked.shape[1:])

    return np.asarray(in_order(case)(data, jax.tree.map(by_run, *steps)))


@functools.cache
def in_order(case: Correlated):
    """The compiled steps of many runs at once, each with the state that the step before left."""
    mechanism, params = case.mechanism(), jnp.zeros(2)
    clip = jaxdp.clip_and_sum(mechanism.rule, mechanism.most_records)
    tx = optax.chain(clip, mechanism.privatize())

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def run(data, draws):
        def step(state, draw):
            indices, mask, key = draw
            grads = jax.vmap(jax.grad(case.loss_fn), (None, 0))(params, data[indices])
            noisy, state = tx.update(grads, state, params, mask=mask, key=key)
            return state, noisy @ DIRECTION * mechanism.batch_size

        return jax.lax.scan(step, tx.init(params), draws)[1]

    return run
