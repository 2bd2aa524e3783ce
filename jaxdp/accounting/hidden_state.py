"""Bounds for the last iterate of a chain of noisy contractions, where nothing else is released.

Every function of a chain answers with S, one value for each batch in which the changed record may
be: the Renyi divergence of order alpha is at most alpha S for every alpha > 1 (so S is rho of
zCDP). For ``shifted`` and ``composed`` more holds: the release is sqrt(2 S)-GDP. The relation is
replace-one.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from jaxdp.accounting import gaussian, rdp
from jaxdp.accounting.chains import Array, NoisyChain, log_gains
from jaxdp.accounting.events import Bound, HiddenState, Relation

if TYPE_CHECKING:
    from jaxdp.accounting.flat import FlatRun

_FADED = -300.0  # log of a gain whose square is close to what float64 cannot hold


def shifted(chain: NoisyChain) -> Array:
    """S of the last iterate, [batches], by shifted interpolation; the sharpest bound here.

    A process interpolates between the two runs; at each step it gives up part of their distance,
    which the step's noise hides at the price of a Gaussian mechanism (Feldman, Mironov, Talwar and
    Thakurta 2018, arXiv:1808.06651, Theorem 22, for Renyi divergences; Bok, Su and Altschuler 2024,
    arXiv:2403.00278, for Gaussian DP). docs/hidden_state.md derives both, and the cheapest way to
    give up everything by the end: the greatest convex minorant of (0, 0), (tau_k, M_k), where
    tau_k = sum_{j<=k} G_j^2 v_j, M_k = sum_{j<=k} G_j s_j and G is of ``log_gains``.

    With a diameter the process may also start late, at that distance: the best of a few starts.
    """
    gains = log_gains(chain).reshape(chain.epochs, chain.batches)
    variances, shifts = chain.table("variances"), 2 * chain.table("contributions")
    c = chain.table("contractions")[:, 0]
    best = _minorants(gains, variances, shifts, chain.start_distance * float(c[0]))
    if chain.diameter is not None:
        left = 1
        while left < chain.epochs:
            start = chain.diameter * float(c[-left])
            late = _minorants(gains[-left:], variances[-left:], shifts[-left:], start)
            best = np.minimum(best, late)
            left = max(left + 1, int(1.4 * left))
    return _upwards(best, chain)


def composed(chain: NoisyChain) -> Array:
    """S of ALL iterates together, [batches]: each epoch's one step that reads the record adds up.

    A Gaussian mechanism for each (GDP composes by sums of squares); contraction plays no part, for
    every start is released.
    """
    distances = 2 * chain.table("contributions")
    value: Array = (distances**2 / (2 * chain.table("variances"))).sum(axis=0)
    if chain.start_distance > 0:
        value = np.full(chain.batches, np.inf)
    return _upwards(value, chain)


def log_sobolev(chain: NoisyChain, published: bool = False) -> Array:
    """S of the last iterate, [batches], by log-Sobolev inequalities; never below ``shifted``.

    V_k, the constant of the iterate's law in the units of a variance: V <- p^2 (c^2 V + v). A step
    that reads the record adds s^2/(2 v); another divides S by 1 + v/(c^2 V) (Ye and Shokri 2022,
    arXiv:2203.05363, Lemma 3.2, in the form of DP-SBCD's Theorem 4.6 and Lemma 4.7).

    Args:
        chain: the steps; it must start at the same place under both neighbours.
        published: raise the divisor to 1/p^2, as DP-SBCD's Corollary 4.5 does. WRONG for p < 1:
            weight decay is a bijection, so it cannot change a divergence. For claims only.

    Raises:
        ValueError: when the starts may differ.
    """
    if chain.start_distance > 0:
        raise ValueError(
            f"start_distance={chain.start_distance!r}: expected 0, the log-Sobolev recursion needs "
            "equal starts"
        )
    c, v, p = (chain.table(name) for name in ("contractions", "variances", "proximal"))
    kept, variance = np.empty(chain.steps), 0.0  # c^2 V of the law before; V
    steps = zip((c**2).ravel().tolist(), (p**2).ravel().tolist(), v.ravel().tolist(), strict=True)
    for k, (c2, p2, added) in enumerate(steps):
        kept[k] = c2 * variance
        variance = p2 * (kept[k] + added)
    with np.errstate(divide="ignore"):
        decay = -np.log1p(v / kept.reshape(v.shape))
    # Nothing is left to decay where the law was a point: no record has been read before.
    decay[0, 0] = 0.0
    if published:
        decay = decay / p**2
    _, between = _around(decay)
    later = np.cumsum(between[::-1], axis=0)[::-1]
    s = 2 * chain.table("contributions")
    return _upwards((s**2 / (2 * v) * np.exp(later)).sum(axis=0), chain)


def averaged_renyi(values: Array, orders: Array) -> Array:
    """Renyi divergences [k] when the record's batch is uniform and secret, from S [batches].

    log(mean_j exp((alpha - 1) alpha S_j))/(alpha - 1), by joint convexity (DP-SBCD, the outer step
    of Theorem 4.6). To be taken ONCE over everything that shares the partition: the S of several
    blocks are added batch by batch before.
    """
    exponents = (orders - 1)[:, None] * orders[:, None] * values[None, :]
    largest = exponents.max(axis=1)
    mean = np.exp(exponents - largest[:, None]).mean(axis=1)
    result: Array = (largest + np.log(mean)) / (orders - 1)
    return result


def _minorants(gains: Array, variances: Array, shifts: Array, start: float) -> Array:
    """S [batches] of steps [epochs, batches], whose first one begins ``start`` apart, times c."""
    gain = np.exp(gains)
    noise = gain**2 * variances
    # The noise of faded steps is not used; what they moved is carried on, as if by the next ones.
    faded = np.flatnonzero(gains.ravel() < _FADED)
    if faded.size:
        noise.ravel()[: faded[-1] + 1] = 0.0
    moved = gain * shifts
    start = start * float(gain[0, 0])
    before, weights = _around(noise)
    weights = noise + weights
    if start == 0 and len(noise) == 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(moved[0] == 0, 0.0, 0.5 * moved[0] ** 2 / weights[0])
    return np.array(
        [
            _minorant(np.append(start, moved[:, j]), np.append(before[j], weights[:, j]))
            for j in range(gains.shape[1])
        ]
    )


def _minorant(moved: Array, weights: Array) -> float:
    """Half the squared length of the taut string under the staircase of (weights, moved)."""
    # scipy.optimize is slow to import, and only this function needs it.
    from scipy.optimize import isotonic_regression

    if not moved.any():
        return 0.0
    # A jump without any noise after it, before the next one, is taken together with the next.
    blocks = np.concatenate([[0], np.cumsum(weights[:-1] > 0)])
    jumps, widths = np.bincount(blocks, moved), np.bincount(blocks, weights)
    if widths[-1] == 0:
        return float("inf")
    # The slopes of the greatest convex minorant are the weighted isotonic regression of the slopes.
    with np.errstate(over="ignore"):
        slopes = isotonic_regression(jumps / widths, weights=widths).x
        return 0.5 * float(np.sum(widths * slopes**2))


def _around(table: Array) -> tuple[Array, Array]:
    """Sums of a table [epochs, batches] over steps before (0, j), [batches], and between two.

    Those are strictly between (e, j) and (e + 1, j), or the end, [epochs, batches]. Sums of equal
    signs only: nothing cancels.
    """
    left = np.zeros_like(table)
    left[:, 1:] = np.cumsum(table[:, :-1], axis=1)
    right = np.zeros_like(table)
    right[:, :-1] = np.cumsum(table[:, :0:-1], axis=1)[:, ::-1]
    between = right.copy()
    between[:-1] += left[1:]
    return left[0], between


def _upwards(values: Array, chain: NoisyChain) -> Array:
    """Above the rounding of sums and products over all steps."""
    return values * (1 + 4e-15 * (chain.steps + 100))


def batch_values(event: HiddenState, bound: Callable[[NoisyChain], Array] = shifted) -> Array:
    """S of each batch that may hold the record, [batches], summed over the event's blocks."""
    bound = composed if event.exposed else bound
    values = np.zeros(event.blocks[0].batches)
    for chain, n in Counter(event.blocks).items():
        values = values + n * bound(chain)
    return values


# Runs with hidden-state events: averaged over the batches, or by log-Sobolev inequalities.

ASSUMED = (
    "holds while the partition is secret and nothing but the last iterate of each block leaves it"
)


def assumption(run: "FlatRun") -> str:
    """The assumption behind the bound, or the reason why there is none."""
    lost = [event.exposed for event, _ in run.hidden if event.exposed]
    if lost:
        reasons = "; ".join(dict.fromkeys(lost))
        return f"the hidden-state number is lost ({reasons}): every step is charged"
    even = any(event.average for event, _ in run.hidden)
    return ASSUMED + ("; averaged, so all batches must have one size" if even else "")


def refuses_log_sobolev(run: "FlatRun", relation: Relation) -> str:
    """The reason why the log-Sobolev bound does not cover the run, or ""."""
    if not run.hidden:
        return "it has no hidden-state event"
    if any(block.start_distance > 0 for event, _ in run.hidden for block in event.blocks):
        return "the log-Sobolev recursion needs equal starts"
    return ""


def averaged_bound(of: str, run: "FlatRun", relation: Relation, value: float) -> Bound:
    """Epsilon at a delta, or delta at an epsilon, where a hidden-state event is averaged.

    Given the record's batch j, the whole run is a mu_j-GDP mechanism, where every other release is
    a full-batch Gaussian too. Revealing j gives a pair that dominates the run (joint convexity of
    the hockey-stick divergence), whose delta is the mean of the deltas. Where no such closed form
    exists the Renyi divergences are averaged.
    """
    averaged = [(event, n) for event, n in run.hidden if event.average]
    others = run.others or ()
    sampled = any(s.sampling_prob < 1 for s, _ in others)
    if run.parts or sampled or [n for _, n in averaged] != [1]:
        return renyi_bound(of, run, relation, value, shifted)
    squares = 2 * batch_values(averaged[0][0])
    squares = squares + math.fsum(n * (2 / s.noise_multiplier) ** 2 for s, n in others)
    for event, n in run.hidden:
        if not event.average:
            squares = squares + 2 * n * float(batch_values(event).max())
    mus, counts = np.unique(np.sqrt(squares), return_counts=True)
    laws = list(zip(mus.tolist(), (counts / counts.sum()).tolist(), strict=True))

    def delta(epsilon: float) -> float:
        return math.fsum(w * gaussian.gaussian_delta(mu, epsilon) for mu, w in laws)

    if of == "delta":
        return Bound(0.0, None, min(1.0, delta(value) * (1 + 1e-9) + 1e-300), "gdp")
    if delta(0.0) <= value:
        return Bound(0.0, 0.0, 0.0, "gdp", "delta(0) is already below the target")
    largest = float(mus.max())
    margin = min(gaussian.PROFILE_ERROR + 4e-15 * largest, 0.5)
    _, upper = gaussian.solve_epsilon(delta, value, max(largest, largest**2), margin)
    return Bound(0.0, None, upper, "gdp")


def renyi_bound(
    of: str, run: "FlatRun", relation: Relation, value: float, bound: Callable[[NoisyChain], Array]
) -> Bound:
    """As ``averaged_bound``, from Renyi divergences with S of each chain by ``bound``."""
    orders = np.asarray(rdp.DEFAULT_ORDERS)
    total = replace(run, steps=run.others or ()).renyi(relation)
    for event, n in run.hidden:
        s = batch_values(event, bound)
        total += n * (averaged_renyi(s, orders) if event.average else orders * float(s.max()))
    return Bound(0.0, None, rdp.best_conversion(of, total, value), "rdp")
