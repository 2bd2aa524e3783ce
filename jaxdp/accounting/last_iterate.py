"""Bounds for runs with hidden-state events: averaged over the batches, or by log-Sobolev."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jaxdp.accounting import gaussian, rdp
from jaxdp.accounting.base import Array, Bound, Relation
from jaxdp.accounting.chains import NoisyChain
from jaxdp.accounting.flat import FlatRun, batch_values
from jaxdp.accounting.hidden_state import averaged_renyi, shifted
from jaxdp.accounting.hidden_state import log_sobolev as by_log_sobolev

ASSUMED = (
    "holds while the partition is secret and nothing but the last iterate of each block leaves it"
)


def note(run: FlatRun) -> str:
    """The assumption behind the bound, or the reason why there is none."""
    lost = [event.exposed for event, _ in run.hidden if event.exposed]
    if lost:
        reasons = "; ".join(dict.fromkeys(lost))
        return f"the hidden-state number is lost ({reasons}): every step is charged"
    even = any(event.average for event, _ in run.hidden)
    return ASSUMED + ("; averaged, so all batches must have one size" if even else "")


def refuses_log_sobolev(run: FlatRun, relation: Relation) -> str:
    """The reason why the log-Sobolev bound does not cover the run, or ""."""
    if not run.hidden:
        return "it has no hidden-state event"
    if any(block.start_distance > 0 for event, _ in run.hidden for block in event.blocks):
        return "the log-Sobolev recursion needs equal starts"
    return ""


def averaged(query: str, run: FlatRun, relation: Relation, value: float) -> Bound:
    """Epsilon at a delta, or delta at an epsilon, where a hidden-state event is averaged."""
    mus = _mixture(run)
    if mus is None:
        return _convert(query, _renyi(run, relation, shifted), value)
    if query == "delta":
        upper = min(1.0, _profile(mus, value) * (1 + 1e-9) + 1e-300)
        return Bound(0.0, None, upper, "gdp")
    if _profile(mus, 0.0) <= value:
        return Bound(0.0, 0.0, 0.0, "gdp", "delta(0) is already below the target")
    largest = float(mus[0].max())
    _, upper = gaussian.bracket_epsilon(
        lambda epsilon: _profile(mus, epsilon),
        value,
        max(largest, largest**2),
        min(gaussian.PROFILE_ERROR + 4e-15 * largest, 0.5),
    )
    return Bound(0.0, None, upper, "gdp")


def log_sobolev(query: str, run: FlatRun, relation: Relation, value: float) -> Bound:
    """Epsilon or delta by the corrected log-Sobolev recursion, a Renyi bound."""
    return _convert(query, _renyi(run, relation, by_log_sobolev), value)


def _mixture(run: FlatRun) -> tuple[Array, Array] | None:
    """Distinct mu and how probable each is, or None where no closed form exists.

    Given the record's batch j, the whole run is a mu_j-GDP mechanism, where every other release is
    a full-batch Gaussian too. Revealing j gives a pair that dominates the run (joint convexity of
    the hockey-stick divergence), whose delta is the mean of the deltas.
    """
    averaged = [(event, n) for event, n in run.hidden if event.average]
    others = run.others or ()
    sampled = any(s.sampling_prob < 1 for s, _ in others)
    if run.parts or sampled or [n for _, n in averaged] != [1]:
        return None
    squares = 2 * batch_values(averaged[0][0])
    squares = squares + math.fsum(n * (2 / s.noise_multiplier) ** 2 for s, n in others)
    for event, n in run.hidden:
        if not event.average:
            squares = squares + 2 * n * float(batch_values(event).max())
    mus, counts = np.unique(np.sqrt(squares), return_counts=True)
    return mus, counts / counts.sum()


def _profile(mixture: tuple[Array, Array], epsilon: float) -> float:
    mus, weights = mixture
    return math.fsum(
        float(w) * gaussian.gaussian_delta(float(mu), epsilon)
        for mu, w in zip(mus, weights, strict=True)
    )


def _renyi(run: FlatRun, relation: Relation, bound: Callable[[NoisyChain], Array]) -> Array:
    """Renyi divergences of the run at ``rdp.DEFAULT_ORDERS``."""
    orders = np.asarray(rdp.DEFAULT_ORDERS)
    total = replace(run, steps=run.others or ()).renyi(relation)
    for event, n in run.hidden:
        s = batch_values(event, bound)
        total += n * (averaged_renyi(s, orders) if event.average else orders * float(s.max()))
    return total


def _convert(query: str, renyi: Array, value: float) -> Bound:
    return Bound(0.0, None, rdp.convert(query, renyi, value), "rdp")
